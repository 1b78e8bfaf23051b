"""How one process takes the global batch of a script whose batch size is that of a rank: by the
script's own option.
"""

import re
import shlex
from collections.abc import Iterable, Sequence

from ..config.option import Option
from ..trace import Run
from ..trace.events import Step

_OTHERS = {"eval", "val", "valid", "validation", "test", "prefetch"}


def whole_batch(
    train: Run, single: Run, options: Iterable[Option], args: Sequence[str]
) -> tuple[str, ...]:
    """The arguments with which one process should take all samples of a step; () where the options
    do not show them.

    An option counts if its name has "batch" and its value is what every forward of every rank, and
    of the one process, was given.
    """
    sizes = {len(micro.rows) for run in (train, single) for rank in run.micros(1) for micro in rank}
    ranks = len(train.sample_ranks)
    if (
        len(sizes) != 1
        or ranks < 2
        or single.global_batch(1).total() * ranks != train.global_batch(1).total()
    ):
        return ()
    size = sizes.pop()
    found = {
        one.name: one for one in options if _is_batch(one.name) and value_of(one, args) == str(size)
    }
    return (
        tuple(shlex.split(next(iter(found.values())).given(str(size * ranks))))
        if len(found) == 1
        else ()
    )


def takes_the_same(train: Run, single: Run) -> bool:
    """Whether one process began with the samples and the learning rate of all ranks."""
    rates = [next((record.lr for record in run.places(Step)), None) for run in (train, single)]
    return (
        single.completed
        and single.global_batch(1) == train.global_batch(1)
        # A script may scale its learning rate by the batch size: then the run with the larger batch
        # is no oracle.
        and rates[0] == rates[1]
    )


def value_of(option: Option, args: Sequence[str]) -> str:
    """What an option is set to: the last value among the arguments, else its default."""
    given = ""
    for number, word in enumerate(args):
        head, equals, value = word.partition("=")
        if head == option.name:
            given = value if equals else (args[number + 1] if number + 1 < len(args) else "")
    return given or option.default


def _is_batch(name: str) -> bool:
    words = set(re.split(r"[._\-:]+", name.lower()))
    # The words by which trainers name their batch size; the value must also be what each forward
    # was given (public trainers whose batch size is that of a rank).
    return bool(words & {"batch", "batchsize", "bs"}) and not words & _OTHERS
