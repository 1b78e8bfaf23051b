"""Which rank made a run fail, by the ranks' own records and exit codes in order of time: torchrun
does not report it.
"""

import re
import signal
from dataclasses import dataclass

from ..trace import Run, Trace
from ..trace.events import End, Place
from ..trace.origin import is_user, within_torch
from .wording import cut

# What gloo, the store and NCCL raise on ranks that lose a peer: such a rank is never the first
# cause.
_VICTIM = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|recvBytes failed|Timed out"
    r" waiting|"
    r"Socket Timeout|failed to recv|NCCL.*(remote process exited|unhandled system error)",
)
# Paths below torch's own folder in which a rank waits; a user's folder may have any of these names
# (projects in folders named torch or distributed).
_WAITS = re.compile(r"(distributed|autograd|_functorch)/|_C|utils/_contextlib")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NO_FILE = re.compile(r"No such file or directory: '(?P<path>[^']+)'")
QUOTED = 160  # characters of an error that are quoted
# Signals that only native code raises: the run is made once more before it counts. SIGKILL is not
# one: somebody sent it.
_NATIVE_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_NATIVE = "A signal is not a Python error: check that line and native code."
_ELSEWHERE = (
    "Write the script's files to a folder of its own. The records of this run cannot be trusted and"
    " are not judged."
)
_NODE = "Look at that machine: it, its network or its scheduler ended its ranks."
_REPORT = "This is a bug in fsdp2, not in your code: report it and attach the run folder."
_ARGUMENTS = "Pass the required script arguments after `--`, or under `args` in verify.yaml."
_ASKED = (
    "Do what it says: arguments of the script go after `--`, the number of ranks is `--nproc`, and"
    " GPUs are stood in for with `--device cuda-on-cpu`."
)
_STAGER = (
    "If a DefaultStager is used for several saves: that of torch 2.11 and 2.12 serves one; make a"
    " new one for each save."
)
_TOGETHER = (
    "Make all ranks decide together to stop (all-reduce the decision), and return from the script."
)
_MISMATCH = (
    "Ranks met in different collectives: look for a collective (full_tensor, a state dict, a"
    " forward) that only some ranks call, and for batches whose shapes differ between ranks."
)
_ORDER = "Make every rank call the same collectives in the same order; compare the stacks."


@dataclass(frozen=True)
class RootCause:
    """The rank at fault: a message, its line and a fix."""

    rank: int
    text: str
    location: Place | None
    fix: str
    error: str = ""  # the whole `ErrorName: message`, if the rank raised
    frames: tuple[Place, ...] = ()  # the user's frames, innermost first


def root_cause(run: Run) -> RootCause:
    """The first cause of a run that did not complete; not for other runs."""
    if run.foreign:
        return RootCause(
            0, f"the verifier's own files were written to: {run.foreign}", None, _ELSEWHERE
        )
    if run.probe_failed:
        return RootCause(0, f"the verifier itself failed on {run.probe_failed}", None, _REPORT)
    if run.timed_out:
        return _hang(run)
    suspects = []
    for order, item in enumerate(run.ended):
        trace = run.traces[item.rank]
        end = _fault(trace)
        # Ranks that the launcher killed, or that ended well, are no suspects.
        if end is None and (item.killed or (item.code == 0 and trace.end is not None)):
            continue
        suspects.append(
            (is_victim(trace), end.at if end is not None else item.at, order, item.rank, item.code)
        )
    if not suspects:
        return RootCause(
            0, "the run ended for an unknown reason", None, "Check the output of the ranks."
        )
    if all(victim for victim, *_ in suspects) and (gone := _ended_alone(run)) is not None:
        return gone
    *_, rank, code = min(suspects)
    return _explain(run, rank, code, _fault(run.traces[rank]))


def ended_by_native_code(run: Run) -> bool:
    """Whether a rank got a signal such as SIGSEGV or SIGABRT, and no other raised an error of its
    own.
    """
    hit = any(-item.code in _NATIVE_SIGNALS and not item.killed for item in run.ended)
    return (
        hit
        and not run.foreign
        and all(_fault(trace) is None or is_victim(trace) for trace in run.traces)
    )


def _ended_alone(run: Run) -> RootCause | None:
    """The rank that reached the end of its script while the others still waited for it."""
    ended = (
        t
        for t in run.traces
        if t.end is not None and t.end.how in ("return", "stopped", "sys.exit")
    )
    if (trace := next(ended, None)) is None:
        return None
    waiting, end = next(
        (t.rank, t.end) for t in run.traces if t.end is not None and t.end.how == "exception"
    )
    stopped = trace.end is not None and trace.end.how == "stopped"
    done = "had made the steps that were asked for" if stopped else "reached the end of the script"
    text = f"rank {trace.rank} {done} while rank {waiting} still waited for it"
    return RootCause(trace.rank, text + _stack_text(end.frames), _first(end.frames), _TOGETHER)


def _gist(message: str) -> str:
    """The first line of a message, with what follows its colon; of DCP's, which holds whole
    tracebacks, the first line that names an error.
    """
    lines = _COLOURS.sub("", message).strip().splitlines() or [""]
    # `load_state_dict` says below it which keys are missing, or which sizes differ
    if lines[0].endswith(":") and len(lines) > 1:
        return " ".join(line.strip() for line in lines)
    errors = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    return errors[0] if lines[0].startswith("CheckpointException") and errors else lines[0]


def _fault(trace: Trace) -> End | None:
    """The record of a bad end, if the rank could write one."""
    bad = (
        r
        for r in trace.of(End)
        if r.how in ("exception", "os._exit") or (r.how == "sys.exit" and r.code != 0)
    )
    return next(bad, None)


def _explain(run: Run, rank: int, code: int, end: End | None) -> RootCause:
    if end is None:
        return _without_record(run, rank, code)
    if end.how == "exception":
        return _raised(run, rank, end)
    hows = {end.how, *(trace.end.how for trace in run.traces if trace.end is not None)}
    if hows == {"sys.exit"} and run.steps() == 0:
        why = str(end.message or "") or _last_words(run, rank)
        text = f"the script exited during startup with status {end.code}{f': {why}' if why else ''}"
        usage = "usage:" in run.stderr.get(rank, "") or not why
        return RootCause(rank, text, _first(end.frames), _ARGUMENTS if usage else _ASKED)
    message = f" ({end.message})" if end.message else ""
    text = (
        f"rank {rank} called {end.how}({end.code}){message}{_stack_text(end.frames)}, while the"
        " others went on"
    )
    return RootCause(rank, text, _first(end.frames), _TOGETHER)


def _without_record(run: Run, rank: int, code: int) -> RootCause:
    """Of a rank that could not record its end: its node was lost, a signal ended it, or it left."""
    if gone := next((item.lost for item in run.ended if item.rank == rank), ""):
        text = f"node {gone} stopped answering, and rank {rank} with it"
        return RootCause(rank, text, None, _NODE)
    if code >= 0:
        text = f"rank {rank} exited with code {code} without recording a result"
        return RootCause(rank, text, None, "Check its output.")
    name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
    errors, frames = run.stderr.get(rank, ""), _frames(run.stacks.get(rank, ""))
    last = _last_line(errors)
    text = f"rank {rank} was ended by {name}{f' ({last})' if last else ''}{_stack_text(frames)}"
    fix = _MISMATCH if "collective mismatch" in errors else _NATIVE
    return RootCause(rank, text, _own(frames), fix)


def _raised(run: Run, rank: int, end: End) -> RootCause:
    error = f"{end.error}: {end.message}"
    said = cut(_gist(str(end.message)), QUOTED)
    missing = NO_FILE.search(str(end.message))
    if missing is not None and missing["path"] not in said:  # the path is what helps
        said = f"no such file or directory: '{missing['path']}'"
    text = f"rank {rank} raised {end.error}: {said}"
    lost = any(is_victim(trace) for trace in run.traces)
    others = "; the other ranks failed because they lost this one" if lost else ""
    fix = f"Fix the error at that line{others}."
    # The DefaultStager of torch 2.11 and 2.12 serves one save only; its second one raises this
    # KeyError (torch 2.11 and 2.12 (asynchronous saves)).
    if error == "KeyError: <class 'type'>":
        fix = _STAGER
    frames = end.frames
    return RootCause(rank, text + _stack_text(frames), _first(frames), fix, error, tuple(frames))


def is_victim(trace: Trace) -> bool:
    """Whether a rank failed only because it lost another one."""
    end = _fault(trace)
    return end is not None and lost_peer(str(end.message))


def lost_peer(message: str) -> bool:
    """Whether an error says that another rank is gone."""
    return _VICTIM.search(message) is not None


def own_frames(text: str) -> tuple[list[Place], bool]:
    """The user's frames in a stack dump, innermost first, and whether the rank was waiting in
    torch.
    """
    frames = _frames(text)
    return [f for f in frames if is_user(f.file)], bool(frames) and _waits(frames[0])


def computing(run: Run) -> str:
    """Where a rank computed when the time was over; "" if none did."""
    if not run.busy:
        return ""
    rank = run.busy[0]
    return f"rank {rank} computed{_stack_text(_frames(run.stacks.get(rank, '')), 2)}"


def _hang(run: Run) -> RootCause:
    """A time-out: the rank that is not waiting in a collective, else the one that has recorded
    least.
    """
    gone = [e.rank for e in run.ended if not e.killed]
    stacks = {rank: _frames(text) for rank, text in run.stacks.items() if text}
    busy = [rank for rank, frames in stacks.items() if frames and not _waits(frames[0])]
    if gone:
        rank, what = gone[0], "had exited, and the others waited for it"
    # If every rank computes, none waits for another: the run is slow, and no rank is named for its
    # stack.
    elif len(busy) == 1 or (busy and len(busy) < run.world_size):
        rank, what = busy[0], "was not in a collective, and the others waited for it"
    else:
        rank = min(run.traces, key=lambda trace: len(trace.records)).rank
        what = "had made the least progress, and all ranks were waiting"
    frames = stacks.pop(rank, [])
    others = [f"; rank {other}{_stack_text(stacks[other], 1)}" for other in sorted(stacks)[:3]]
    text = (
        f"no end within {run.timeout:.0f} s: rank {rank}"
        f" {what}{_stack_text(frames)}{''.join(others)}"
    )
    end = run.traces[rank].end
    return RootCause(
        rank, text, _own(frames) or _first(end.frames if end is not None else []), _ORDER
    )


def _frames(text: str) -> list[Place]:
    """The frames of the thread in a faulthandler dump that runs the user's code, innermost
    first.
    """
    blocks = re.split(r"(?:Current thread|Thread) [^\n]*\n|Fatal Python error[^\n]*\n", text)
    found = [_FRAME.findall(block) for block in blocks]
    stacks = [
        [Place(file=file, line=int(n), function=name, code="") for file, n, name in rows]
        for rows in found
    ]
    own = [frames for frames in stacks if any(is_user(f.file) for f in frames)]
    return (own or [frames for frames in stacks if frames] or [[]])[-1]


def _first(frames: list[Place]) -> Place | None:
    return frames[0] if frames else None


def _own(frames: list[Place]) -> Place | None:
    """The innermost frame that is in no library."""
    return _first([f for f in frames if is_user(f.file)])


def _waits(frame: Place) -> bool:
    """Whether a rank whose innermost frame this is waits in a collective or a backward."""
    return _WAITS.match(within_torch(frame.file)) is not None


def _stack_text(frames: list[Place], limit: int = 3) -> str:
    """` in train.py:12 main <- ...`: the user's frames, innermost first."""
    shown = [f for f in frames if is_user(f.file)] or frames
    if not shown:
        return ""
    names = ["", *(f.file.rpartition("/")[2] for f in shown[:limit])]
    return " in " + " <- ".join(
        f"{name if name != before else ''}:{f.line} {f.function}"
        for f, name, before in zip(shown, names[1:], names, strict=False)
    )


def _last_words(run: Run, rank: int) -> str:
    """The last line that a rank printed before it left: an error's, else what it said on stdout."""
    error = _last_line(run.stderr.get(rank, ""))
    said = _last_line(run.stdout.get(rank, ""))
    return error if not said or "error" in error.lower() else said


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:120] if lines else ""
