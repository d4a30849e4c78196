"""Positions of response tokens in the logits of a microbatch, and what is computed there."""
