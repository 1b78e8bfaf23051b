"""Errors that ended the training and that the script caught, so that it went on to its end."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..evidence import Sources
from ..trace import Run, Trace
from ..trace.events import LoopAt, Passing, Place, Reached
from .error_handlers import Handler, handler_of
from .rank_guards import loop_of
from .root_cause import QUOTED, lost_peer
from .syntax import walk
from .wording import count, cut, some

# They end a loop by design: the user's interrupt, a generator that is closed, an empty queue.
_ENDINGS = {"KeyboardInterrupt", "StopIteration", "GeneratorExit", "Empty", "CancelledError"}
# So do these where a handler names them: records are read until there are no more.
_DATA_END = {"EOFError", "IndexError"}
# A batch that cannot be used is left out; so many in a row, with none behind them, are the rest of
# the training.
_EACH_TIME = 3
# By these, where a handler names them, a script asks whether there is something.
_ASKS = {"LookupError", "AttributeError", "ImportError"}


@dataclass(frozen=True)
class Swallowed:
    """An error that left the body of the training loop, or ended it, and that the script caught.

    `missing`: how it is known that steps are missing, "" if it is not; `doubt`: why a right script
    may be made so, "" if none is.
    """

    rank: int
    text: str
    raised: Place
    caught: str
    missing: str
    doubt: str
    at: float
    everywhere: bool = False  # whether every rank raised it
    in_thread: bool = False


@dataclass(frozen=True)
class Caught:
    """The records of one error on its way out, and what caught it; None: no code of the project."""

    records: list[Passing]
    handler: Handler | None

    @property
    def first(self) -> Passing:
        return self.records[0]

    @property
    def last(self) -> Passing:
        return self.records[-1]

    @property
    def place(self) -> Place:
        """The line of the function in which it was caught."""
        return self.last.frames[-1]

    @property
    def loops(self) -> list[LoopAt]:
        """The loops around its lines, outermost first."""
        found: dict[tuple[str, int], LoopAt] = {}
        for one in (one for record in reversed(self.records) for one in record.loops):
            found.setdefault((one.file, one.line), one)
        return list(found.values())

    @property
    def asks(self) -> bool:
        """Whether the script asks by it if there is something."""
        named = self.handler is not None and self.handler.names
        return named and not _ASKS.isdisjoint(self.last.classes)

    def inside(self, loop: LoopAt) -> bool:
        """Whether it was caught within the body of a loop."""
        around = loop.file == self.place.file and loop.line <= self.place.line <= loop.last
        return around and self.handler is not None and loop.line < self.handler.line <= loop.last

    def caught(self) -> str:
        """`except Exception` (train.py:9)."""
        if self.handler is None:
            return "a library, or a Future that is not asked,"
        return f"`{self.handler.text}` ({_name(self.place.file)}:{self.handler.line})"

    def said(self) -> str:
        """`RuntimeError: no memory in train.py:12 step <- :40 main, which ... caught`."""
        same = self.first.error == self.last.error
        frames = (self.last if same else self.first).frames
        message = cut(next(iter(self.first.message.strip().splitlines()), ""), QUOTED)
        shown, file = [], ""
        for one in frames[:3]:
            shown.append(f"{_name(one.file) if one.file != file else ''}:{one.line} {one.function}")
            file = one.file
        error = f"{self.first.error}: {message} in {' <- '.join(shown)}"
        return f"{error}, which {self.caught()} caught"

    def swallowed(self, rank: int, missing: str, doubt: str) -> Swallowed:
        """It as what ended the training of a rank."""
        first, caught = self.first, self.caught()
        at = first.frames[0]
        return Swallowed(rank, self.said(), at, caught, missing, doubt, first.at)


def swallowed(run: Run | None, sources: Sources) -> Swallowed | None:
    """The first error that ended the training of a rank and that the script caught; one that a rank
    raised because it lost another one only if there is no other.
    """
    if run is None:
        return None
    found = [
        one
        for trace in run.traces
        for find in (_of, _in_threads)
        for one in find(trace, run, sources)
    ]
    own = [one for one in found if not lost_peer(one.text)]
    # that of a rank that lost another one has its cause in the other's end, if that is known
    found = own or (found if run.completed else [])
    first = min(found, key=lambda one: (bool(one.doubt), one.at), default=None)
    if first is None:
        return None
    ranks = sorted({one.rank for one in found if one.raised == first.raised})
    everywhere = len(ranks) == run.world_size > 1
    who = "every rank" if everywhere else f"rank{'s' * (len(ranks) > 1)} {some(map(str, ranks))}"
    return replace(first, text=f"{who} raised {first.text}", everywhere=everywhere)


def last_error(run: Run | None, sources: Sources) -> str:
    """The last error that a script caught after the sharding and without making any step; "" if
    there was none.
    """
    for trace in run.traces if run is not None else ():
        for error in reversed(list(errors_of(trace, sources))):
            if (
                error.first.sharded
                and error.handler is not None
                and not is_designed(error, sources)
            ):
                return f"rank {trace.rank} raised {error.said()}"
    return ""


def _of(trace: Trace, run: Run, sources: Sources) -> Iterator[Swallowed]:
    made = [record for record in trace.of(Reached) if not record.ended]
    last = made[-1].seq if made else -1
    active = next((record.stack for record in reversed(made) if record.stack), [])
    # An error after which the training goes on is a retry, or a batch that is left out.
    errors = [
        one for one in errors_of(trace, sources) if one.last.seq > last and not one.last.thread
    ]
    for error in errors:
        # Without any step it is not known which loop would have made them.
        before = not active and error.first.sharded
        loops = [one for one in error.loops if before or _holds(one, active)]
        left = [one for one in loops if not error.inside(one)]
        if is_designed(error, sources) or _died(error, trace):
            continue
        # A function that makes one step may catch it, and return to the loop.
        callers = [one for one in error.last.callers if before or _holds(one, active)]
        around = left or loops or callers
        missing = _missing(error.last, around) or _behind(trace, run)
        lost = _empty_iteration(error.last, around)
        each_time = _each_time(error.last) if error is errors[-1] else ""
        doubt = _doubt(error)
        if before and error.handler is not None and error.handler.names:
            doubt = doubt or "no step shows which loop trains"
        if lost or each_time:
            missing = each_time or missing or lost
        elif not left and around:
            leaves = bool(loops) and _leaves(error)
            if not leaves and (error is not errors[-1] or _goes_on(error, around, trace)):
                continue
            # A batch that is left out in the last iteration is no end of the training.
            if not missing and all(_is_known(one) for one in around):
                continue
            doubt = doubt or ("" if leaves else "the loop may have ended for another reason")
        elif not left and not _leaves_library(error, active, sources):
            continue
        yield error.swallowed(trace.rank, missing, doubt)


def _in_threads(trace: Trace, run: Run, sources: Sources) -> Iterator[Swallowed]:
    """Errors that ended a function, or a loop, of a thread; no function that trains met them."""
    for error in errors_of(trace, sources):
        left = [one for one in error.loops if not error.inside(one)]
        handled = error.handler is not None and not left
        if not all(record.thread for record in error.records) or handled:
            continue
        if is_designed(error, sources) or _died(error, trace):
            continue
        missing, made = _missing(error.last, left), _steps(trace)
        together = bool(missing) and _iterations(left) in (made, _backwards(trace))
        doubt = "it is not known whether the training needs what the thread does"
        missing = missing and f"{missing}; the training ended after {count(made, 'step')}"
        found = error.swallowed(trace.rank, missing, "" if together else doubt)
        yield replace(found, in_thread=True)


def _iterations(loops: list[LoopAt]) -> int:
    """How many iterations the innermost of these loops has made, where their lengths are known."""
    made = 0
    for one in loops:
        made = made * (one.total or 0) + (one.done or 0)
    return made


def _backwards(trace: Trace) -> int:
    return sum(record.backwards for record in trace.of(Reached))


def errors_of(trace: Trace, sources: Sources) -> Iterator[Caught]:
    """The errors of a rank, in order."""
    found: dict[int, list[Passing]] = {}
    for record in (record for record in trace.of(Passing) if record.frames):
        found.setdefault(record.number, []).append(record)
    for records in found.values():
        last = records[-1]
        yield Caught(records, handler_of(sources, last.frames[-1], last.classes))


def _died(error: Caught, trace: Trace) -> bool:
    """Whether the rank died of an error."""
    end = trace.end
    return (
        end is not None
        and end.how == "exception"
        and any((one.error, one.message) == (end.error, end.message) for one in error.records)
    )


def _empty_iteration(error: Passing, loops: list[LoopAt]) -> str:
    """How an error shows that an iteration of several steps, such as an epoch, made none; "" if it
    does not.
    """
    loop = loops[-1] if loops else None
    if loop is None or not loop.done or error.since_step or error.steps < 2 * loop.done:
        return ""
    each = error.steps // loop.done
    what = f"iteration {loop.done + 1} of the loop at {_name(loop.file)}:{loop.line}"
    return f"{what} made no step, each before about {each}"


def _each_time(error: Passing) -> str:
    """How an error shows that each iteration raised it, and none made a step; "" if it does not."""
    if error.again < _EACH_TIME or not error.before_step:
        return ""
    return f"it was raised {error.again} times after step {error.steps}, and no step was made then"


def _leaves_library(error: Caught, active: list[Place], sources: Sources) -> bool:
    """Whether it left the call of a library that makes the steps in a loop of its own."""
    if any(loop_of(sources, at.file, at.line) is not None for at in active):
        return False
    return any((at.file, at.line) == (error.place.file, error.place.line) for at in active)


def _leaves(error: Caught) -> bool:
    """Whether its handler leaves the loop."""
    return error.handler is not None and error.handler.leaves


def _goes_on(error: Caught, loops: list[LoopAt], trace: Trace) -> bool:
    """Whether the loop in whose body a rank caught its last error may have gone on to its end."""
    ends = [record for record in trace.of(Reached) if record.ended]
    if error.asks:
        return True
    # What is behind the step of an iteration, such as a log, may fail in the last one before a
    # break; the last micro-batches of an epoch may fill no window of an accumulation.
    if not ends or not error.last.before_step or ends[-1].backwards > error.last.since_step:
        return True
    # Where batches are left out until the loop is over, the last error is that of the last one.
    more = (one.total and one.done is not None and one.done + 1 < one.total for one in loops)
    return not any(more)


def _is_known(loop: LoopAt) -> bool:
    return loop.total is not None or loop.goes_on is not None


def is_designed(error: Caught, sources: Sources) -> bool:
    """Whether a script ends its training by this error as it is meant to: an interrupt, or
    `raise StopTraining` with a handler that names that class.
    """
    first, handler = error.first, error.handler
    if not _ENDINGS.isdisjoint(first.classes):
        return True
    if first.error == "SystemExit":
        return first.message in ("", "0", "None")
    if handler is None or not handler.names or first.origin not in ("user", "library"):
        return False
    at = first.frames[0]
    raises = (node for node in walk(sources.tree(at.file)) if isinstance(node, ast.Raise))
    return at.library is None and any(
        node.lineno <= at.line <= (node.end_lineno or 0) for node in raises
    )


def _doubt(error: Caught) -> str:
    """Why a right script may end its training so; "" if it may not."""
    first, handler = error.first, error.handler
    if first.origin == "user":
        return "the class of the error is the project's, so the script may end its training by it"
    if handler is not None and handler.names and not _DATA_END.isdisjoint(first.classes):
        return "the script may read until its data end"
    return ""


def _missing(error: Passing, loops: list[LoopAt]) -> str:
    """How the loops show that steps are missing; "" if they do not. The innermost one is named."""
    found, before = "", 0
    for loop in loops:
        name = f"{_name(loop.file)}:{loop.line}"
        if loop.goes_on:
            found = f"the condition of the loop at {name} still holds"
        if loop.total is None:
            continue
        done = loop.done
        if done is None:  # one backward, and not more, is taken for one iteration
            done = min(error.backwards - before * loop.total, loop.total)
        if done + 1 < loop.total or (done < loop.total and error.before_step):
            at = f"iteration {max(done, 0) + 1} of {loop.total}"
            found = f"the loop at {name} ended in {at}"
        before = before * loop.total + max(done, 0)
    return found and f"{found}, after {count(error.steps, 'step')}"


def _behind(trace: Trace, run: Run) -> str:
    """Whether a rank made fewer steps than another one."""
    made, most = (max(map(_steps, traces)) for traces in ([trace], run.traces))
    return f"it made {count(made, 'step')}, and another rank {most}" if made < most else ""


def _steps(trace: Trace) -> int:
    return max((record.steps for record in trace.of(Reached)), default=0)


def _holds(loop: LoopAt, active: list[Place]) -> bool:
    return any(loop.file == at.file and loop.line <= at.line <= loop.last for at in active)


def _name(file: str) -> str:
    return file.rpartition("/")[2]
