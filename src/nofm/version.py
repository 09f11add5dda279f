"""The version, in a file of its own so that building needs no import of torch."""

__version__ = "0.1.0"
