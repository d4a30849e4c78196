"""What is computed from logits, which may be split over ranks."""
