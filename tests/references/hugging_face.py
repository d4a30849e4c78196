"""Configurations of published models, as their ``config.json`` has them."""

GEMMA_3_27B = {  # google/gemma-3-27b-it, the language model
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
}
