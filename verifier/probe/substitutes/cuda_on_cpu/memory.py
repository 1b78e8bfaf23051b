"""CUDA's memory figures: those of this process, since its tensors lie in its own memory."""

import contextlib
import resource
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...session import Session
from . import marks
from ._answers import always, answer
from .devices import _PAGE, of_device, total_memory

_fraction: dict[str, float] = {"of": 1.0}
_KINDS = (
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "requested_bytes",
    "inactive_split_bytes",
)


def _held() -> int:
    if not marks.CUDA.initialized:
        return 0
    if (counted := marks.watch.held()) is not None:
        return counted
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return _peak()


def _peak() -> int:
    if not marks.CUDA.initialized:
        return 0
    if (counted := marks.watch.peak()) is not None:
        return counted
    try:  # the peak that is reset below; that of getrusage is not
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset() -> None:
    marks.watch.reset()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _free() -> tuple[int, int]:
    total = total_memory()
    return max(total - _held(), 0), total


def _stats() -> "OrderedDict[str, Any]":
    if not marks.CUDA.initialized:
        return OrderedDict()
    held, peak = _held(), _peak()
    found: dict[str, Any] = {
        "num_alloc_retries": 0,
        "num_ooms": 0,
        "num_sync_all_streams": 0,
        "max_split_size": -1,
    }
    for kind in _KINDS:
        for pool in ("all", "large_pool", "small_pool"):
            values = (
                (held, peak, peak, 0) if pool == "all" and "inactive" not in kind else (0, 0, 0, 0)
            )
            found |= {
                f"{kind}.{pool}.{name}": value
                for name, value in zip(
                    ("current", "peak", "allocated", "freed"), values, strict=True
                )
            }
    return OrderedDict(sorted(found.items()))


def _nested() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _stats().items():
        *outer, last = key.split(".")
        at = found
        for name in outer:
            at = at.setdefault(name, {})
        at[last] = value
    return found


def _set_fraction(fraction: float, device: Any = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _fraction["of"] = fraction


def install(session: Session) -> None:
    """Answer the memory functions of `torch.cuda` and `torch.accelerator`."""
    held, peak, reset = of_device(_held), of_device(_peak), of_device(_reset)
    both: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), held),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), peak),
        **dict.fromkeys(
            ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
            reset,
        ),
        "memory_stats": of_device(_stats),
        "empty_cache": always(None),
        "reset_accumulated_memory_stats": always(None),
    }
    answer(
        session,
        "torch.accelerator.memory",
        {**both, "get_memory_info": of_device(_free)},
    )
    more: dict[str, Callable[..., Any]] = {
        "mem_get_info": of_device(_free),
        "memory_stats_as_nested_dict": of_device(_nested),
        "memory_snapshot": always([]),
        "memory_summary": lambda device=None, abbreviated=False: f"{_held()} bytes of this process",
        "set_per_process_memory_fraction": _set_fraction,
        "get_per_process_memory_fraction": lambda device=None: _fraction["of"],
        "_record_memory_history": always(None),
        "_snapshot": lambda device=None, **more: {"segments": [], "device_traces": []},
        "_dump_snapshot": lambda filename="snapshot", **more: Path(filename).write_bytes(b""),
        "device_memory_used": held,
        "host_memory_stats": lambda: defaultdict(int),
        "reset_peak_host_memory_stats": always(None),
    }
    answer(session, "torch.cuda.memory", {**both, **more})
    answer(session, "torch.cuda", {"device_memory_used": held, "memory_usage": always(0)})
