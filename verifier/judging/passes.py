"""One entry of the tables of judging, and a table as text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Function = TypeVar("Function")


@dataclass(frozen=True)
class Pass(Generic[Function]):
    """A pure function, `why` it is there, and why it is `here` in its table."""

    apply: Function
    why: str
    here: str

    @property
    def name(self) -> str:
        """The name of its function."""
        return str(getattr(self.apply, "__name__", ""))


def printed(title: str, table: Iterable[Pass[Any]]) -> str:
    """A table as text: each pass with both reasons."""
    rows = (f"{one.name}\n    why:  {one.why}\n    here: {one.here}" for one in table)
    return "\n  ".join([title, *rows])
