"""What a committed result was measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform


def environment(*packages: str) -> dict[str, str | int | None]:
    """Versions of torch and of these packages, Python, the platform, cores."""
    return {
        **{package: importlib.metadata.version(package) for package in ("torch", *packages)},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }
