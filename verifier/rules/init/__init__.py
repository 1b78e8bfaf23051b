"""Initial weights and buffers."""
