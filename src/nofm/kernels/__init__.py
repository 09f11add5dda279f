"""Masks by other means: the slow oracle that every fast path is compared with."""
