"""Initial weights and buffers."""

ORDER = 50
