"""verified-fsdp2: FSDP2 training code that is proved right."""

__version__ = "0.2.0"
