"""How many bytes a model takes: estimated from its configuration, and measured on this machine."""
