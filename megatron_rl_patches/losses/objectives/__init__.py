"""Losses from numbers per token: policy losses, distillation, and how they are averaged."""
