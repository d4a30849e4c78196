"""What is summed over the vocabulary: log-probabilities, top-k, divergences; logits may be deferred."""

from . import operations as operations  # fills in the operations that leave logits deferred
