"""Comments that this tool reads."""
