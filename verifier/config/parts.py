"""Parts of a training that a verification may leave out, by the names that `require` takes.

What no run did is *not covered*: no obstacle to a pass, unless a team requires it.
"""

from typing import Literal, get_args

from ..errors import UserError

Part = Literal[
    "checkpoint",
    "resume",
    "reshard",
    "accumulation",
    "bf16",
    "compile",
    "evaluation",
    "gpu",
]
PARTS: tuple[Part, ...] = get_args(Part)
# The option that makes a verification do what belongs to checkpoints.
OPTIONS: dict[Part, str] = {
    "checkpoint": "--save-args",
    "resume": "--resume-args",
    "reshard": "--reshard-to",
}


def named(text: str) -> tuple[Part, ...]:
    """What `--require` names. Raises UserError on another name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise UserError(f"--require: expected some of {', '.join(PARTS)}, found {name!r}")
    return tuple(part for part in PARTS if part in names)
