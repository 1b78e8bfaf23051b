"""Tensors of a rank's parts of the weights, such as an average that an evaluation uses."""

from ..trace import Run
from ..trace.events import Held
from .state import states

# Far above rounding of an average of equal weights, and far below one update too many.
_APART = 1e-4


def copy_apart(run: Run, single: Run, step: int) -> str:
    """The first tensor, in words, that the script keeps as parts of a parameter, and whose norm
    over all ranks is not that of one process up to a step; "" if there is none.
    """
    sizes = {one.numel for entries in single.parameters.values() for one in entries}
    theirs = states(single.traces[0])
    ranks = [states(trace) for trace in run.traces]
    for at in sorted(number for number in theirs if number <= step):
        for path, there in theirs[at].items():
            here = [rank.get(at, {}).get(path) for rank in ranks]
            parts = [one for one in here if one is not None]
            if there.numel in sizes and len(parts) == len(ranks) and _differ(parts, there):
                return f"`{path}`, parts of a copy of them, differs from step {at} on"
    return ""


def _differ(parts: list[Held], there: Held) -> bool:
    """Whether parts that together are as large as a tensor of one process have another norm."""
    own = there.holder in ("object", "local") and not there.sharded
    if not own or there.sketch is None or sum(part.numel for part in parts) != there.numel:
        return False
    squares = sum(part.sketch[0] for part in parts if part.sketch is not None)
    return abs(squares - there.sketch[0]) > _APART * max(squares, there.sketch[0])
