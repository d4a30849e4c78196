"""A stand-in of TransformerEngine in plain torch: what megatron-core imports and calls of it, and no more.

``cpu_backend(transformer_engine=True)`` puts it in place of an absent TransformerEngine. Layers compute and
communicate as the real ones do, in the precision of their arguments, and mark parameters as those do. What it
does not have is either missing, as in an old TransformerEngine, or refused by name.
"""
