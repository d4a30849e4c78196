"""The laboratory: what proves this package, and what no user needs. It is not in the wheel."""
