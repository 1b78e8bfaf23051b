#!/usr/bin/env python3
"""The launcher of a thin copy (`fsdp2 install --thin`): it calls the installed verified-fsdp2 of the same version."""

import sys
from importlib import metadata

VERSION = ""


def main() -> int:
    """The exit code of `fsdp2` with these arguments; 2 if it is not installed in this Python, or another version is."""
    try:
        found = metadata.version("verified-fsdp2")
    except metadata.PackageNotFoundError:
        found = ""
    if found != VERSION:
        there = f"has verified-fsdp2 {found}" if found else "has no verified-fsdp2"
        print(
            f"fsdp2: {sys.executable} {there}; this skill needs {VERSION}: install it, or install the skill again",
            file=sys.stderr,
        )
        return 2
    from verified_fsdp2.skill.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
