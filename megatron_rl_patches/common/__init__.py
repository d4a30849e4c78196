"""What cores and engine have in common: model chunks, attributes set for a while, names imported late."""
