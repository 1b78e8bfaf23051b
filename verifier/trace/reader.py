"""Reads what the ranks of a run have written; one line that the probe has not written invalidates
all of it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .events import (
    BuffersRead,
    Checkpoint,
    Cleared,
    CollectiveCall,
    EditedGradients,
    Event,
    KeptGradients,
    Micro,
    ProgressEvent,
    State,
    Step,
    Stepped,
    event_from_json,
)
from .rank import Ended, Trace
from .roles import ROLES
from .run import Run
from .seal import mark

SLOT, SLOTS = 4096, 16  # bytes of a collective in `rank{r}.calls`, and how many there are
_LOADS = ("load", "torch.load")
# Every record with a step number moves with the load; one that is left out would belong to another
# step.
_NUMBERED = (BuffersRead, Cleared, EditedGradients, KeptGradients, Micro, State, Step, Stepped)


class Foreign(Exception):
    """A file of the verifier has a line that the probe did not write."""


def read_run(
    folder: Path,
    role: str,
    answer: dict[str, Any],
    world_size: int,
    command: str,
    timeout: float = 0.0,
    secret: str = "",
    places: Sequence[tuple[str, str]] = (),
) -> Run:
    """The run whose ranks wrote into `folder`; `answer` is the launcher's.

    A record has the mark of `secret`.

    `places`: paths in the records, each with the one that is read in its place.
    """
    foreign = ""
    ranks = sorted(e["rank"] for e in answer["ranks"])
    try:
        found = {rank: _read(folder / f"rank{rank}.jsonl", secret, places) for rank in ranks}
        progress = {rank: _progress(folder / f"rank{rank}.progress") for rank in ranks}
        calls = {rank: _calls(folder / f"rank{rank}.calls") for rank in ranks}
    except Foreign as error:
        found, progress, calls = {rank: [] for rank in ranks}, {}, {}
        foreign = str(error)
    # a run of `fsdp2 plan`, or of a benchmark, has no role in a verification
    if role in ROLES and ROLES[role].resumes:
        found = from_the_load_on(found)

    said = partial(_said, folder, ranks, places)
    return Run(
        role,
        world_size,
        tuple(Trace(rank, tuple(_in_training(found[rank]))) for rank in ranks),
        _ended(answer),
        answer["timed_out"],
        answer["seconds"],
        said("stacks"),
        said("err"),
        progress,
        command,
        foreign,
        timeout=timeout,
        quiet=answer.get("quiet", math.inf),
        busy=tuple(answer.get("busy", ())),
        stdout=said("out"),
        calls=calls,
    )


def _said(
    folder: Path, ranks: Sequence[int], places: Sequence[tuple[str, str]], ending: str
) -> dict[int, str]:
    """What the ranks have written into files of their own with this ending."""
    return {rank: _renamed(_text(folder / f"rank{rank}.{ending}"), places) for rank in ranks}


def _ended(answer: dict[str, Any]) -> tuple[Ended, ...]:
    """How each rank ended; a script may have written further keys."""
    return tuple(
        Ended(e["rank"], e["code"], e["killed"], e["at"], e.get("lost", ""))
        for e in answer["ranks"]
    )


def _read(path: Path, secret: str, places: Sequence[tuple[str, str]] = ()) -> list[Event]:
    """Whole lines of a trace; a line cut short by a kill is left out."""
    found = []
    quoted = [(json.dumps(old)[1:-1], json.dumps(new)[1:-1]) for old, new in places]
    for number, line in enumerate(_text(path, limit=None).split("\n")[:-1], 1):
        text, _, seal = line.rpartition("\t")
        # One line that the probe did not write makes all records of the run worthless: nothing is
        # judged by them (test_a_trace_that_many_threads_write and hostile scripts).
        if seal != mark(secret, number, text):
            raise Foreign(f"line {number} of {path.name} was not written by the probe")
        try:
            found.append(event_from_json(json.loads(_renamed(text, quoted))))
        except (ValueError, TypeError, KeyError, AttributeError):
            what = "is not a record: the script changes the `json` module"
            raise Foreign(f"line {number} of {path.name} {what}") from None
    return found


def _renamed(text: str, places: Sequence[tuple[str, str]]) -> str:
    for old, new in places:
        text = text.replace(old, new)
    return text


def from_the_load_on(found: dict[int, list[Event]]) -> dict[int, list[Event]]:
    """Leave out the steps that a resumed run makes before it loads, such as one that only creates
    state.
    """
    loads = {
        rank: next((r.seq for r in own if isinstance(r, Checkpoint) and r.op in _LOADS), 0)
        for rank, own in found.items()
    }
    made = max(
        (
            r.step
            for rank, own in found.items()
            for r in own
            if isinstance(r, Step) and r.seq < loads[rank]
        ),
        default=0,
    )
    if not made:
        return found

    def moved(record: Event) -> Event:
        if isinstance(record, Checkpoint):
            return replace(record, after_step=max(0, record.after_step - made))
        return replace(record, step=record.step - made) if isinstance(record, _NUMBERED) else record

    kept = {
        rank: [r for r in own if not isinstance(r, _NUMBERED) or r.step > made]
        for rank, own in found.items()
    }
    return {rank: [moved(record) for record in own] for rank, own in kept.items()}


def _in_training(records: list[Event]) -> list[Event]:
    """The records of a rank, each micro-batch in the step that it belongs to, if any."""
    return _in_iterations(_without_skipped(_without_dry_runs(records)))


def _without_dry_runs(records: list[Event]) -> list[Event]:
    """Leave out micro-batches whose gradients were discarded before the first step; they belong to
    no step.

    If the script discards gradients later too, it does so in its training loop: then nothing is
    left out.
    """
    cleared = [r for r in records if isinstance(r, Cleared)]
    # Gradients cleared before the first step were a dry run; if that happens later too, it is the
    # loop itself (SAM) (zoo/dry_run; SAM (exam round 1)).
    if any(r.step > 1 for r in cleared):
        return records
    last = max((r.seq for r in cleared), default=-1)
    return [r for r in records if not isinstance(r, Micro) or r.seq > last]


def _without_skipped(records: list[Event]) -> list[Event]:
    """Leave out the micro-batches of a skipped update: gradients are discarded, and the next batch
    is another one.

    A second pass over the same samples (SAM) belongs to the step.
    """
    micros = [r for r in records if isinstance(r, Micro)]
    skipped: set[int] = set()
    for cleared in (r for r in records if isinstance(r, Cleared)):
        before = [m for m in micros if m.step == cleared.step and m.seq < cleared.seq]
        after = {
            row for m in micros if m.step == cleared.step and m.seq > cleared.seq for row in m.rows
        }
        # A skipped update: gradients are cleared and other samples follow (r4 m_09). SAM's second
        # pass has the same samples (exam r4 m_09_spike_guard twin: an update that is skipped).
        if after and before and all(m.rows and after.isdisjoint(m.rows) for m in before):
            skipped |= {m.seq for m in before}
    return [r for r in records if r.seq not in skipped]


def _in_iterations(records: list[Event]) -> list[Event]:
    """Give the micro-batches of a second optimizer, between the first one's step and its own, to
    the step of the first (a GAN).

    While they run nobody knows yet whose they are: the rank that writes them counts them to the
    next step.
    """
    steps = [r for r in records if isinstance(r, Step)]
    first = [r for r in steps if r.optimizer == steps[0].optimizer]
    ends = [r.seq for r in first[1:]] + [records[-1].seq + 1 if records else 0]
    owner: dict[int, int] = {}
    for mine, end in zip(first, ends, strict=False):
        last = max((r.seq for r in steps if mine.seq < r.seq < end), default=0)
        owner |= {
            # Backwards of a GAN's second optimizer come after the first one's step, and belong to
            # it (exam round 1 b_04_gan_hinge).
            r.seq: mine.step
            for r in records
            if isinstance(r, Micro) and mine.seq < r.seq < last
        }
    return [
        replace(r, step=owner[r.seq]) if isinstance(r, Micro) and r.seq in owner else r
        for r in records
    ]


def _progress(path: Path) -> list[ProgressEvent]:
    """The events of a progress log (see probe/events/progress.py)."""
    keys: list[tuple[str, list[tuple[str, int, str]]]] = []
    found = []
    try:
        for line in _text(path, limit=None).split("\n")[:-1]:
            if line.startswith("+"):
                made = json.loads(line[1:])
                keys.append(
                    (
                        str(made["op"]),
                        [(str(f), int(n), str(name)) for f, n, name in made["frames"]],
                    )
                )
            else:
                key, _, value = line.partition(" ")
                op, frames = keys[int(key)]
                found.append(
                    ProgressEvent(op=op, frames=frames, value=int(value) if value else None)
                )
    except (ValueError, IndexError, TypeError, KeyError):
        raise Foreign(f"{path.name} has lines that the probe did not write") from None
    return found


def _calls(path: Path) -> list[CollectiveCall]:
    """The last collectives of a rank, in order (see probe/events/last_collectives.py)."""
    text = _text(path, limit=None)
    try:
        found = [json.loads(text[at : at + SLOT]) for at in range(0, len(text), SLOT)]
        return sorted((CollectiveCall(**one) for one in found), key=lambda one: one.order)
    except (ValueError, TypeError, RecursionError):
        raise Foreign(f"{path.name} has a slot that the probe did not write") from None


def _text(path: Path, limit: int | None = 20_000) -> str:
    """The end of a file of a run; "" if it is missing or not a file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return text if limit is None else text[-limit:]
