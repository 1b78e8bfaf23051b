"""Windows: steps behind the first ones that are compared, too."""

from dataclasses import dataclass

from ..errors import UserError

ASKED = "asked for"
LONGEST = 100  # steps


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last`, and the `reason` to compare them."""

    first: int
    last: int
    reason: str

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


def windows(value: object) -> str | tuple[Window, ...]:
    """`auto`, `none` or ranges of steps, such as 31-33,118-120. Raises UserError on others."""
    if value in ("auto", "none"):
        return str(value)
    parts = [part.strip().partition("-") for part in str(value).split(",")]
    if not all(first.isdecimal() and (last or first).isdecimal() for first, _, last in parts):
        raise UserError(
            f"windows: expected auto, none or steps such as 31-33,118-120, found {value!r}"
        )
    found = [Window(int(first), int(last or first), ASKED) for first, _, last in parts]
    for one in found:
        if not 1 < one.first <= one.last < one.first + LONGEST:
            raise UserError(
                f"windows: {one}: expected at most {LONGEST} steps in their order, from step 2 on"
            )
    return tuple(sorted(found, key=lambda one: one.first))
