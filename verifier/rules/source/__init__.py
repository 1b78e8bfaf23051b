"""Comments that this tool reads."""

ORDER = 150
