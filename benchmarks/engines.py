"""Each engine of `launch`, started as its users start it, disturbed, and held against an
undisturbed run.

    python benchmarks/engines.py --out benchmarks/results/engines.json [--table \\
        references/scaling.md] [--only slurm]
        [--ray PYTHON] [--kubeflow PYTHON] [--sky PYTHON]

It needs root (network namespaces, Slurm's daemons), Debian's iproute2, slurm-wlm and munge, and for
each option a Python that has ray[train], kubeflow_trainer_api or skypilot. What is missing is said
in the row of its engine. All that it starts ends with it.

A row is good if the run has each step once and its losses are those of one undisturbed process;
`starts` are the steps from which the ranks went on. `make test-engines` makes the environments and
runs it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_cases_manifests import kubernetes, skypilot
from engine_cases_ray import ray
from engine_cases_slurm import slurm
from engine_cases_torchrun import torchrun
from engine_tools import Missing, Place, reference, workplace
from machine import environment
from results_file import write

Row = dict[str, Any]
HEADING = "## What was run"
ABOUT = """\
Made by `make test-engines`; do not edit. A small project, 30 steps, a checkpoint every 4, \
disturbed after step 10. Each run
ended with every step once and the losses of one undisturbed process. step_timeout is 8 s, \
join_timeout 30 s (60 s with Slurm and
SkyPilot), tcp_retries2 is 6; two busy cores."""
ENGINES: dict[str, Callable[[Place], Iterator[Row]]] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "ray": ray,
    "skypilot": skypilot,
}


def measure(names: list[str], place: Place) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        began = time.monotonic()
        try:
            for row in ENGINES[name](place):
                seconds = round(time.monotonic() - began, 1)
                rows.append({"engine": name, **row, "seconds": seconds})
                print(json.dumps(rows[-1]), flush=True)
                began = time.monotonic()
        except Missing as missing:
            rows.append({"engine": name, "missing": str(missing)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def in_page(page: str, rows: list[Row]) -> str:
    """The page with its last section made anew."""
    return (
        page.partition(HEADING)[0].rstrip("\n")
        + f"\n\n{HEADING}\n\n"
        + ABOUT
        + "\n\n"
        + table(rows)
    )


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| engine | how it was run | what was done to it | what happened | s |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if "missing" in row:
            lines.append(f"| {row['engine']} | not run: {row['missing']} | | | |")
        else:
            cells = (
                row["engine"],
                row["how"],
                row["disturbed"],
                row["happened"],
                f"{row['seconds']:.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=ENGINES,
        action="append",
        help="this engine; others stay as --out has them",
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--table", type=Path, help="the page whose last section shows the results")
    for package in ("ray", "kubeflow", "sky"):
        parser.add_argument(
            f"--{package}", metavar="PYTHON", help="the Python that has this package"
        )
    options = parser.parse_args()
    names = options.only or list(ENGINES)
    with ExitStack() as stack:
        folder = stack.enter_context(workplace())
        pythons = {package: getattr(options, package) for package in ("ray", "kubeflow", "sky")}
        rows = measure(names, Place(folder, reference(folder / "reference"), pythons))
    kept = []
    if options.out and options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
        kept = [row for row in before if row["engine"] not in names]
    everything = sorted([*kept, *rows], key=lambda row: list(ENGINES).index(row["engine"]))
    print(table(everything))
    if options.table:
        page = options.table.read_text(encoding="utf-8")
        options.table.write_text(in_page(page, everything), encoding="utf-8")
    if options.out:
        results = {"environment": environment(), "rows": everything}
        write(options.out, results)
    return 0 if all(row.get("ok") for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
