"""Puts patches in place and takes them away. Knows modules and attributes; has never heard of Megatron."""
