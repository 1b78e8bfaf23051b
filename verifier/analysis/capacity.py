"""What a capacity run shows: does it fit, what is in the way, and was it followed to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import FAIL, INCONCLUSIVE, PASS
from ..trace import Run
from ..trace.events import CapacityRecord, Collective, End, Peak, Place

# Bytes that CUDA's context, NCCL and cuBLAS take outside of the allocator; a lower bound, so that
# "fits" is not promised too early.
RESERVE = 1 << 30  # bytes that CUDA's context, NCCL and cuBLAS take beside tensors, at least
STATE = "optimizer state"  # a kind of memory, and the parameters that the optimizer updates
SHARDED = "sharded parameters"
FIRST = "first step"  # the phase of that name
DEVICE, META, MESH, BATCH, OTHER = "device", "meta", "mesh", "batch", "other"
# Words of torch's errors by what is wrong; the first kind that matches names the error (tried
# faults (benchmarks/plan/seeded.py)).
_SIGNS = (  # in the text of an error, in lower case
    (
        DEVICE,
        (
            "same device",
            "device type tensor to numpy",
            "invalid device ordinal",
            "different devices",
            "'cuda' device type",
        ),
    ),
    (META, ("meta tensor", "meta device", "on meta", "no data")),
    (MESH, ("mesh", "process group", "world size", "world_size")),
    (BATCH, ("batch", "divisible", "divide")),
)
# Errors that only a capacity run has (no values, no other ranks, missing files): the script may be
# right, so exit 4 and not 1.
_UNFOLLOWED = {
    "FileNotFoundError": (
        "it reads a file that is not there: give it as for training, or leave out what reads it"
    ),
    "NotImplementedError": "an operator has no form that computes shapes alone",
    "TimeoutError": "it waits for what other ranks do, of which a capacity run has none",
    "DynamicOutputShapeException": (
        "the size of a result depends on values, which a capacity run does not have"
    ),
    "DataDependentOutputException": "it depends on values, which a capacity run does not have",
    "Unplannable": "it depends on values, which a capacity run does not have",
}


@dataclass(frozen=True)
class Trouble:
    """What ended a capacity run early.

    `kind`: what is wrong; `unfollowed`: why the script may be right all the same.
    """

    kind: str
    text: str
    at_line: Place | None
    unfollowed: str = ""


@dataclass(frozen=True)
class HostCopy:
    """What a save that goes on beside training copies of a rank to the memory of its host."""

    mode: str  # checkpoint.mode
    bytes: int
    per_node: int  # ranks that share a host


@dataclass(frozen=True)
class CapacityPlan:
    """The judged capacity run.

    `needed`: bytes of the device at the peak, with the allocator's part and RESERVE. `copy`: None
    where no save is known to go on beside training.
    """

    record: CapacityRecord | None
    trouble: Trouble | None
    memory: int | None  # bytes of the device; None if they were not given
    seconds: float
    copy: HostCopy | None = None

    @property
    def highest(self) -> Peak | None:
        """The highest of the peaks."""
        peaks = self.record.peaks if self.record is not None else []
        return max(peaks, key=lambda peak: peak.bytes, default=None)

    @property
    def least(self) -> int:
        """Bytes of the device without which no allocator could run it."""
        return self.highest.bytes + RESERVE if self.highest is not None else 0

    @property
    def needed(self) -> int:
        """Bytes of the device with what the allocator adds by rounding and fragmentation."""
        peaks = self.record.peaks if self.record is not None else []
        return max((max(peak.reserved, peak.bytes) for peak in peaks), default=0) + RESERVE

    @property
    def expandable(self) -> int:
        """The same with `expandable_segments:True`."""
        peaks = self.record.peaks if self.record is not None else []
        return max((max(peak.expandable, peak.bytes) for peak in peaks), default=0) + RESERVE

    @property
    def whole(self) -> bool:
        """Whether a whole step was seen: what comes after a part of one may need more."""
        return self.record is not None and self.record.steps > 0

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None without the memory of a device, if even that depends on the
        allocator, or without a whole step.
        """
        if self.memory is None or self.highest is None:
            return None
        if self.least > self.memory:
            return False
        return True if self.whole and self.needed <= self.memory else None

    @property
    def tight(self) -> bool:
        """Whether it fits only if the allocator wastes less than by default."""
        return self.memory is not None and self.whole and self.least <= self.memory < self.needed

    @property
    def exit_code(self) -> int:
        """0 it fits, 1 it does not or an error was found, 4 it could not be followed to its end."""
        if self.fits is False or (self.trouble is not None and not self.trouble.unfollowed):
            return FAIL
        return INCONCLUSIVE if self.trouble is not None or not self.whole else PASS


def without_data(why: str, memory: int | None) -> CapacityPlan:
    """The plan of what cannot be run: its data are not here."""
    trouble = Trouble(OTHER, "the data are not here", None, why)
    return CapacityPlan(None, trouble, memory, 0.0)


def judge(run: Run, memory: int | None) -> CapacityPlan:
    """The judged capacity run."""
    found = run.traces[0].of(CapacityRecord) if run.traces else []
    record = found[-1] if found else None
    return CapacityPlan(record, _trouble(run, record), memory, run.seconds)


def _trouble(run: Run, record: CapacityRecord | None) -> Trouble | None:
    end = run.traces[0].end if run.traces else None
    if run.timed_out:
        return Trouble(
            OTHER,
            f"not at its end after {run.timeout:g} s",
            None,
            "give it more time with --timeout",
        )
    if end is None:
        code = next((one.code for one in run.ended), 0)
        return Trouble(
            OTHER, f"the process ended with status {code}", None, "it left no record of its end"
        )
    if end.how == "exception":
        return _error(end, record)
    if end.code:
        said = run.stderr.get(0, "").strip().rpartition("\n")[2]
        text = f"the script ended with status {end.code}" + (f": {said}" if said else "")
        return Trouble(_kind(text), text, end.frames[0] if end.frames else None)
    # A mesh over fewer ranks than there are leaves the others idle: an error of the script,
    # although nothing was raised (planned specs whose mesh leaves ranks out).
    if record is not None and 0 < record.mesh_ranks < record.world_size:
        text = (
            f"the largest mesh has {record.mesh_ranks} of {record.world_size} ranks: the others"
            " take no part"
        )
        return Trouble(MESH, text, record.mesh_line)
    return _without_steps(record) if record is None or not record.steps else None


def _without_steps(record: CapacityRecord | None) -> Trouble:
    """The script ended by itself, and no whole step was seen."""
    if record is not None and any(peak.phase == FIRST for peak in record.peaks):
        why = "no optimizer has stepped, and no weights were updated, before the script ended"
        return Trouble(OTHER, "it ended before the end of its first step", None, why)
    why = "no forward had gradients, or followed an update of the weights, before the script ended"
    return Trouble(OTHER, "no model was trained", None, why)


def _error(end: End, record: CapacityRecord | None) -> Trouble:
    place = end.frames[0] if end.frames else None
    text = f"{end.error}: {end.message.strip().partition(chr(10))[0]}"
    why = _UNFOLLOWED.get(end.error, "")
    raised = place is not None and place.code.startswith(("raise ", "assert "))
    reads = [
        read.at_line.line
        for read in (record.reads if record is not None else [])
        if read.in_step and read.at_line
    ]
    # A check of the script on values that it read in the capacity run judged stand-ins: no error of
    # the script.
    if not why and raised and reads:
        lines = ", ".join(map(str, sorted(set(reads))[:3]))
        why = (
            f"the script raised it itself, after it read values that are stand-ins (lines {lines})"
        )
    return Trouble(_kind(text), text, place, why)


def _kind(text: str) -> str:
    lower = text.lower()
    return next((kind for kind, signs in _SIGNS if any(sign in lower for sign in signs)), OTHER)


def totals(record: CapacityRecord) -> list[tuple[Collective, int, int]]:
    """(one of them, count, bytes) of the collectives of the last whole step, by kind, group, dtype
    and phase.
    """
    last = max((one.step for one in record.collectives if one.step <= record.steps), default=0)
    found: dict[tuple[str, str, int, str, str], tuple[Collective, int, int]] = {}
    for one in record.collectives:
        if one.step == last:
            key = (one.collective, one.group, one.group_size, one.dtype, one.phase)
            first, count, size = found.get(key, (one, 0, 0))
            found[key] = (first, count + one.count, size + one.count * one.bytes)
    return sorted(found.values(), key=lambda entry: -entry[2])


def by_part(flops: Mapping[str, int]) -> list[tuple[str, int]]:
    """FLOPs by the part of the model, the layers of a stack together: `layers.*.attention`."""
    found: Counter[str] = Counter()
    for name, amount in flops.items():
        found[
            ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(model)"
        ] += amount
    return found.most_common()
