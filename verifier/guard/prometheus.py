"""A text file for Prometheus, as the textfile collector of node_exporter reads it."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .journal import Breach
from .measured import Measured


def write(path: str, measured: Measured, breaches: list[Breach]) -> None:
    """Write the numbers of a check, whole or not at all."""
    curves = measured.values.get("curves", {})
    lines = _metric("step", "gauge", "steps of the optimizer", [("", measured.step)])
    lines += _metric("check_time_seconds", "gauge", "when it was checked", [("", measured.time)])
    for name in ("loss", "norm"):
        if isinstance(value := curves.get(name), float) and math.isfinite(value):
            lines += _metric(name, "gauge", f"{name} of that step", [("", value)])
    laws = Counter(breach.law for breach in breaches)
    rows = [(f'{{law="{law}"}}', count) for law, count in sorted(laws.items())] or [("", 0)]
    lines += _metric("breaches_total", "counter", "laws that did not hold", rows)
    target = Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    beside.replace(target)


def _metric(name: str, kind: str, text: str, rows: Sequence[tuple[str, float]]) -> list[str]:
    full = f"fsdp2_guard_{name}"
    head = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    return head + [f"{full}{labels} {value:.10g}" for labels, value in rows]
