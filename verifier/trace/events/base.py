"""What events of every topic hold."""

from ..typed import KINDS, Event, Part


class Place(Part):
    """A line of the user's code."""

    file: str
    line: int
    function: str
    code: str


class Located(Event):
    """An event at a line of the user's code; None where none of it is running."""

    at_line: Place | None


del KINDS[Located.kind]  # a base, and no kind of its own
