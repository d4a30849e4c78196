"""From logits, split over the vocabulary or not, to a few numbers per token."""
