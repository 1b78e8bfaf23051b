"""What events of every topic hold."""

from __future__ import annotations

from dataclasses import dataclass

from ..typed import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Part):
    """A line of the user's code."""

    file: str
    line: int
    function: str
    code: str
