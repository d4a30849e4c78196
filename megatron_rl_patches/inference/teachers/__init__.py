"""Several sets of weights that take turns in one model."""
