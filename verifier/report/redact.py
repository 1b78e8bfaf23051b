"""Texts without what differs between equal runs: temporary folders, addresses, ports."""

import re
from pathlib import Path

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_PORT = re.compile(r"((?:127\.0\.0\.1|localhost|::1)\]?:)\d+")


def stable(text: str, work: Path) -> str:
    """The text with `{checkpoint}` for its folders, `{work}` for ours, no memory addresses or local
    ports, and valid as UTF-8.
    """
    folder = re.escape(str(work))
    text = re.sub(
        rf"{folder}/(?:(?:(?:\d\d+-[a-z_]+-\d+/)?world/)?files/checkpoint)(?![\w.-])",
        "{checkpoint}",
        text,
    )
    text = re.sub(rf"{folder}(?![\w.-])", "{work}", text)
    text = _PORT.sub(r"\1...", _ADDRESS.sub("0x...", text))
    return text.encode("utf-8", "replace").decode("utf-8")
