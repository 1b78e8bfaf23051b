"""Which rank made a run fail. torchrun cannot tell; the ranks' own records and exit codes, in order of time, can."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from ..trace import Run, Trace
from ..trace.events import End, Place
from ..trace.origin import is_user, within_torch

# What a rank says when another one has gone: it is a victim.
_VICTIM = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|recvBytes failed|Timed out waiting|"
    r"Socket Timeout|failed to recv|NCCL.*(remote process exited|unhandled system error)",
)
_WAITS = re.compile(r"(distributed|autograd|_functorch)/|_C|utils/_contextlib")  # paths below torch
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')

_NATIVE = "A signal is no Python error: look at that line, and at native code."
_ELSEWHERE = (
    "Let the script, and what it starts, write into folders of its own; nothing that this run recorded is believed."
)
_REPORT = "This is a fault of fsdp2, not of your code: please report it with the folder of the run."
_ARGUMENTS = "Call it with the arguments that it wants: they stand after `--`, or in verify.yaml under `args`."
_TOGETHER = "Let all ranks take the decision to stop together (all-reduce it), and leave by returning."
_MISMATCH = (
    "Ranks met in different collectives: look for a collective (full_tensor, a state dict, a forward) that only some ranks call, "
    "and for batches whose shapes differ between ranks."
)


@dataclass(frozen=True)
class RootCause:
    """The rank at fault, in words, with its line and what to look at."""

    rank: int
    text: str
    location: Place | None
    fix: str
    error: str = ""  # `ErrorName: message`, whole, if the rank raised
    frames: tuple[Place, ...] = ()  # the user's frames, innermost first


def root_cause(run: Run) -> RootCause:
    """The first cause of a run that did not complete. Call it on no other."""
    ended = {e.rank: e for e in run.ended}
    if run.foreign:
        return RootCause(0, f"the verifier's own files were written to: {run.foreign}", None, _ELSEWHERE)
    if run.probe_failed:
        return RootCause(0, f"the verifier itself failed on {run.probe_failed}", None, _REPORT)
    if run.timed_out:
        return _hang(run)
    suspects = []
    for order, item in enumerate(run.ended):
        trace = run.traces[item.rank]
        end = _fault(trace)
        if end is None and item.killed:
            continue
        if end is None and item.code == 0 and trace.end is not None:
            continue
        at = end.at if end is not None else item.at
        victim = bool(end is not None and _VICTIM.search(str(end.message)))
        suspects.append((victim, at, order, item.rank))
    if not suspects:
        return RootCause(
            0, "the run ended without a reason that can be named", None, "Look at the output of the ranks."
        )
    if all(victim for victim, *_ in suspects) and (gone := _left_in_silence(run)) is not None:
        return gone
    rank = min(suspects)[3]
    end = _fault(run.traces[rank])
    return _explain(run, rank, ended[rank].code, end)


def _left_in_silence(run: Run) -> RootCause | None:
    """The rank that came to the end of its script while the others still waited for it."""
    for trace in run.traces:
        if trace.end is not None and trace.end.how in ("return", "stopped", "sys.exit"):
            waiting = next(t for t in run.traces if t.end is not None and t.end.how == "exception")
            frames = waiting.end.frames if waiting.end is not None else []
            told = (
                f"rank {trace.rank} came to its end, and rank {waiting.rank} still waited for it{_stack_text(frames)}"
            )
            return RootCause(trace.rank, told, frames[0] if frames else None, _TOGETHER)
    return None


def _gist(message: str) -> str:
    """The first line of a message; of DCP's, which holds whole tracebacks, the first line that names an error."""
    lines = message.strip().splitlines() or [""]
    errors = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    return errors[0] if lines[0].startswith("CheckpointException") and errors else lines[0]


def _fault(trace: Trace) -> End | None:
    """The record of a bad end, if the rank could write one."""
    for record in trace.of(End):
        if record.how in ("exception", "os._exit") or (record.how == "sys.exit" and record.code != 0):
            return record
    return None


def _explain(run: Run, rank: int, code: int, end: End | None) -> RootCause:
    if end is None and code < 0:
        name = _signal_name(-code)
        place = _frames(run.stacks.get(rank, ""))
        last = _last_line(run.stderr.get(rank, ""))
        told = f"rank {rank} was ended by {name}{f' ({last})' if last else ''}{_stack_text(place)}"
        fix = _MISMATCH if "collective mismatch" in run.stderr.get(rank, "") else _NATIVE
        return RootCause(rank, told, _own(place), fix)
    if end is None:
        return RootCause(rank, f"rank {rank} ended with code {code} and left no word", None, "Look at its output.")
    frames = end.frames
    line = frames[0] if frames else None
    if end.how == "exception":
        told = f"rank {rank} raised {end.error}: {_gist(str(end.message))[:300]}{_stack_text(frames)}"
        fix = "Fix the error at that line; the other ranks only lost their peer."
        return RootCause(rank, told, line, fix, f"{end.error}: {end.message}", tuple(frames))
    if end.how == "sys.exit" and run.steps() == 0 and all((t.end or end).how == "sys.exit" for t in run.traces):
        why = str(end.message or "") or _last_line(run.stderr.get(rank, ""))
        told = f"the script gave up at its start with exit status {end.code}{f': {why}' if why else ''}"
        return RootCause(rank, told, line, _ARGUMENTS)
    said = f" ({end.message})" if end.message else ""
    told = f"rank {rank} called {end.how}({end.code}){said}{_stack_text(frames)}, while the others went on"
    return RootCause(rank, told, line, _TOGETHER)


def is_victim(trace: Trace) -> bool:
    """Whether a rank ended only because another one had gone."""
    end = _fault(trace)
    return end is not None and _VICTIM.search(str(end.message)) is not None


def own_frames(text: str) -> tuple[list[Place], bool]:
    """The user's frames in a stack dump, innermost first, and whether the rank was waiting in torch."""
    frames = _frames(text)
    return [f for f in frames if is_user(f.file)], bool(frames) and _waits(frames[0])


def _hang(run: Run) -> RootCause:
    """A time-out: the rank that is not waiting in a collective, else the one that has done least."""
    gone = [e.rank for e in run.ended if not e.killed]
    stacks = {rank: _frames(text) for rank, text in run.stacks.items() if text}
    busy = [rank for rank, frames in stacks.items() if frames and not _waits(frames[0])]
    progress = {t.rank: len(t.records) for t in run.traces}
    if gone:
        rank, what = gone[0], f"rank {gone[0]} had left, and the others waited for it"
    elif len(busy) == 1 or (busy and len(busy) < run.world_size):
        rank, what = busy[0], f"rank {busy[0]} was not in a collective, and the others waited for it"
    else:
        rank = min(progress, key=lambda r: progress[r])
        what = f"rank {rank} had come least far, and all ranks were waiting"
    others = [r for r in sorted(stacks) if r != rank]
    frames = stacks.get(rank, [])
    text = f"no end within {run.timeout:.0f} s: {what}{_stack_text(frames)}"
    for other in others[:3]:
        text += f"; rank {other}{_stack_text(stacks[other], 1)}"
    end = run.traces[rank].end
    location = _own(frames) or next(iter(end.frames if end is not None else []), None)
    return RootCause(
        rank, text, location, "Every rank must call the same collectives in the same order; see the stacks."
    )


def _frames(text: str) -> list[Place]:
    """The frames of the thread in a faulthandler dump that runs the user's code, innermost first."""
    blocks = re.split(r"(?:Current thread|Thread) [^\n]*\n|Fatal Python error[^\n]*\n", text)
    stacks = [[_frame(match) for match in _FRAME.finditer(block)] for block in blocks]
    own = [frames for frames in stacks if any(is_user(f.file) for f in frames)]
    return (own or [frames for frames in stacks if frames] or [[]])[-1]


def _frame(match: re.Match[str]) -> Place:
    return Place(file=match["file"], line=int(match["line"]), function=match["function"], code="")


def _own(frames: list[Place]) -> Place | None:
    """The innermost frame that is in no library."""
    return next((f for f in frames if is_user(f.file)), None)


def _waits(frame: Place) -> bool:
    """Whether a rank whose innermost frame this is waits in a collective or a backward."""
    return _WAITS.match(within_torch(frame.file)) is not None


def _stack_text(frames: list[Place], limit: int = 3) -> str:
    """` in train.py:12 main <- ...`: the user's frames, innermost first."""
    shown = [f for f in frames if is_user(f.file)] or frames
    if not shown:
        return ""
    return " in " + " <- ".join(f"{f.file.rpartition('/')[2]}:{f.line} {f.function}" for f in shown[:limit])


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
