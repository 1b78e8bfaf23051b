"""A judged capacity run as text of one screen, and as JSON data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..analysis.capacity import RESERVE, CapacityPlan, HostCopy, by_part, totals
from ..analysis.roofline import Bound
from ..trace.events import CapacityRecord, Peak, Place
from .wrapping import wrapped

KINDS, ROWS, READS = 5, 8, 6
GIB = 1 << 30


def text(found: CapacityPlan, name: str, least: Bound | None = None) -> str:
    """The plan on one screen. `least`: the bound on the time of a step."""
    record = found.record
    lines = [*wrapped(headline(found, name), "", "  ")]
    if found.trouble is not None:
        trouble = found.trouble
        label = "not followed to the end" if trouble.unfollowed else f"error ({trouble.kind})"
        lines += wrapped(f"{label}: {trouble.text}", "", "  ")
        lines += [f"  at {place(trouble.at_line)}"] if trouble.at_line is not None else []
        lines += wrapped(trouble.unfollowed, "  ", "  ") if trouble.unfollowed else []
    if record is None:
        return "\n".join(lines)
    lines += ["", *_peaks(record.peaks)] if record.peaks else []
    if (top := found.highest) is not None:
        lines += [f"highest at {place(top.at_line)}" + (f", in {top.module}" if top.module else "")]
    lines += wrapped(host_copy(found.copy), "", "  ") if found.copy is not None else []
    lines += ["", *_collectives(record)] if record.collectives else []
    lines += ["", *_flops(record)] if record.flops else []
    lines += ["", *_bound(least)] if least is not None else []
    lines += ["", *_reads(record)] if record.waits else []
    limits = "Tensors of PyTorch, with eager kernels; torch.compile is left out. "
    limits += f"{size(RESERVE)} beside them stand for CUDA's context, NCCL and cuBLAS. "
    limits += (
        f"Planned in {found.seconds:.0f} s, with {size(record.host_peak)} of this machine's memory."
    )
    return "\n".join([*lines, "", *wrapped(limits)])


def headline(found: CapacityPlan, name: str) -> str:
    """What was planned, whether it fits, and by how much."""
    record = found.record
    ranks = f"{name}: rank 0 of {record.world_size}" if record is not None else name
    mesh = (
        " x ".join(f"{dim} {length}" for dim, length in record.mesh.items())
        if record is not None
        else ""
    )
    about = ranks + (f" ({mesh})" if mesh else "")
    return f"{about}: {outcome(found)}"


def outcome(found: CapacityPlan) -> str:
    """Whether it fits, without what was planned."""
    if found.record is None:
        return "no figures"
    if found.highest is None:
        return "nothing was allocated"
    if not found.whole and found.fits is None:
        return f"no whole step was seen; {size(found.highest.bytes)} of tensors until its end"
    peak = (
        f"{size(found.highest.bytes)} of tensors at the peak ({found.highest.phase}),"
        f" {size(found.needed)} with the allocator's part"
    )
    if found.memory is None:
        return peak
    if found.fits is None:
        return f"tight in {size(found.memory)}: {peak}"
    gap = found.memory - (found.needed if found.fits else found.least)
    verdict = (
        f"fits in {size(found.memory)}, {size(gap)} to spare"
        if found.fits
        else f"does not fit in {size(found.memory)}, {size(-gap)} too much"
    )
    return f"{verdict}: {peak}"


def host_copy(copy: HostCopy) -> str:
    """What the host must hold beside training."""
    node = f"{size(copy.bytes * copy.per_node)} on a node of {copy.per_node}"
    return (
        f"host memory: checkpoint.mode {copy.mode} copies {size(copy.bytes)} of each rank for a"
        f" save, {node}, into pinned memory"
    )


def size(amount: float) -> str:
    """A number of bytes for people."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(amount) >= 1 << shift:
            value = amount / (1 << shift)
            return f"{value:.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{amount:.0f} B"


def _peaks(peaks: list[Peak]) -> list[str]:
    """A table: a row for each kind of memory, a column for each phase."""
    kinds = sorted(
        {kind for peak in peaks for kind in peak.kinds},
        key=lambda kind: -max(p.kinds.get(kind, 0) for p in peaks),
    )
    rows = [["memory at the peak of", *(peak.phase for peak in peaks)]]
    rows += [
        [kind, *(size(peak.kinds[kind]) if kind in peak.kinds else "-" for peak in peaks)]
        for kind in kinds
    ]
    rows.append(["all tensors", *(size(peak.bytes) for peak in peaks)])
    rows.append(
        ["reserved by the allocator", *(size(max(peak.reserved, peak.bytes)) for peak in peaks)]
    )
    rows.append(
        ["  with expandable segments", *(size(max(peak.expandable, peak.bytes)) for peak in peaks)]
    )
    return table(rows)


def _collectives(record: CapacityRecord) -> list[str]:
    rows = [["collectives of a step", "group", "ranks", "dtype", "in", "number", "bytes"]]
    found = totals(record)
    for one, count, amount in found[:ROWS]:
        rows.append(
            [
                one.collective,
                one.group,
                str(one.group_size),
                one.dtype,
                one.phase,
                f"{count:,}",
                size(amount),
            ]
        )
    return [*table(rows), *([f"  and {len(found) - ROWS} more"] if len(found) > ROWS else [])]


def _flops(record: CapacityRecord) -> list[str]:
    whole = {name: one.forward + one.backward for name, one in record.flops.items()}
    forward, backward = (
        sum(getattr(one, key) for one in record.flops.values()) for key in ("forward", "backward")
    )
    again = sum(one.recompute for one in record.flops.values())
    total = max(forward + backward, 1)
    line = (
        f"FLOPs of a step of this rank: {flops(total)}, forward {flops(forward)}, backward"
        f" {flops(backward)}"
    )
    line += f" ({flops(again)} of it recomputed)" if again else ""
    parts = [f"{name} {amount / total:.0%}" for name, amount in by_part(whole)[:KINDS]]
    note = (
        []
        if backward
        else wrapped("no backward: a step here is a forward on weights that the script has changed")
    )
    return [*wrapped(line), *wrapped("most of them: " + ", ".join(parts), "  ", "  "), *note]


def _bound(least: Bound) -> list[str]:
    """The bound on the time of a step, and what it is made of."""
    parts = {
        "compute": least.compute,
        "collectives that it waits for": least.waited,
        "first and last of FSDP": least.exposed,
    }
    parts |= {
        "optimizer": least.optimizer,
        "all on the link": least.link,
        "all on the network": least.network,
    }
    shown = ", ".join(f"{name} {seconds(amount)}" for name, amount in parts.items() if amount)
    return [
        *wrapped(f"{fastest(least)}. A bound, no forecast."),
        *wrapped(f"without torch.compile: at least {seconds(least.eager)}", "  ", "  "),
        *wrapped(shown, "  ", "  "),
    ]


def fastest(least: Bound) -> str:
    """The bound in one line."""
    speed = (
        f", at most {least.tokens_per_second:,.0f} tokens/s on each GPU"
        if least.tokens_per_second
        else ""
    )
    line = (
        f"a step on {least.device} ({least.per_node} in a node) takes at least"
        f" {seconds(least.step)}{speed}"
    )
    return f"{line}, {mfu(least)}; {least.limited_by}-bound"


def mfu(least: Bound) -> str:
    """The bound on MFU, and what it counts."""
    if least.mfu is None:
        return f"no bound on MFU below 100% (by {least.mfu_counts})"
    return f"MFU at most {least.mfu:.0%} (by {least.mfu_counts})"


def seconds(amount: float) -> str:
    """A time for people."""
    return f"{amount:.2f} s" if amount >= 1 else f"{1000 * amount:.3g} ms"


def flops(amount: float) -> str:
    """A number of FLOPs for people."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if amount >= scale:
            return f"{amount / scale:.1f} {unit}"
    return f"{amount:.0f} FLOP"


def _reads(record: CapacityRecord) -> list[str]:
    found = record.waits
    lines = ["lines of the steps that wait for the device (the values are stand-ins):"]
    for read in found[:READS]:
        lines.append(
            f"  {read.what}, {read.count} x in {record.steps} steps: {place(read.at_line)}"
        )
    return [*lines, *([f"  and {len(found) - READS} more"] if len(found) > READS else [])]


def place(at: Place | None) -> str:
    """`train.py:7  the code`."""
    if at is None:
        return "no line of the script"
    return f"{at.file.rpartition('/')[2]}:{at.line}  {at.code}"


def table(rows: list[list[str]], words: tuple[int, ...] = (0,)) -> list[str]:
    """Lines with columns, the first row their titles: those of `words` and those without digits to
    the left.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    left = [
        n in words or not any(c.isdigit() for cell in column[1:] for c in cell)
        for n, column in enumerate(columns)
    ]
    return [
        "  ".join(
            cell.ljust(width) if plain else cell.rjust(width)
            for cell, width, plain in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]


def data(found: CapacityPlan, name: str, least: Bound | None = None) -> dict[str, Any]:
    """The plan as JSON data."""
    trouble = found.trouble
    shown = None
    if trouble is not None:
        at = trouble.at_line.to_json() if trouble.at_line is not None else None
        shown = {
            "kind": trouble.kind,
            "text": trouble.text,
            "at_line": at,
            "unfollowed": trouble.unfollowed,
        }
    return {
        "schema": 1,
        "target": name,
        "fits": found.fits,
        "tight": found.tight,
        "device_memory": found.memory,
        "peak": found.highest.bytes if found.highest is not None else None,
        "needed": found.needed if found.highest is not None else None,
        "reserve": RESERVE,
        "trouble": shown,
        "host_copy": asdict(found.copy) if found.copy is not None else None,
        "bound": least.to_dict() if least is not None else None,
        "seconds": found.seconds,
        # the key that `fsdp2 plan --json` has had from the beginning
        "rehearsal": found.record.to_json() if found.record is not None else None,
    }
