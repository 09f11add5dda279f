"""The training engine: what makes a run go, survive and be seen. Nothing here knows which method or task it runs."""
