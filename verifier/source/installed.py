"""Which torch the sources are read for: the one that is installed here. It is not imported."""

from functools import cache


@cache
def installed_torch() -> tuple[int, int]:
    """Its major and minor version; (0, 0) without one."""
    from importlib import metadata  # takes longer than a small script

    try:
        major, minor = metadata.version("torch").split(".")[:2]
        return int(major), int(minor)
    except (metadata.PackageNotFoundError, ValueError):
        return 0, 0
