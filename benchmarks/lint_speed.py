"""How long `fsdp2 lint` takes on a script of 500 lines, process start included, side by side with
torchfix.

    python benchmarks/lint_speed.py --torchfix /path/to/torchfix [--runs 20] [--script PATH] [--out
    \\
        FILE]

The two programs run in turns, so that a busy machine is as busy for one as for the other. Processor
time is what a machine with nothing else to do would show.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results_file import write
from verified_fsdp2.verifier.source.files import files_of

ZOO = Path(__file__).resolve().parents[1] / "tests" / "zoo"
PARTS = (
    "trainer_class.py",
    "checkpoint_full_state.py",
    "gradient_accumulation.py",
    "mixed_precision.py",
)
LINES = 500


def script_of(lines: int) -> str:
    """A right FSDP2 script of about this many lines: a trainer, and functions of other right
    scripts that it could use.
    """
    head = (ZOO / PARTS[0]).read_text(encoding="utf-8").splitlines()
    cut = next(number for number, line in enumerate(head) if line.startswith("def parse_args"))
    body: list[str] = []
    for number, name in enumerate(PARTS[1:]):
        source = (ZOO / name).read_text(encoding="utf-8").partition('"""')[2].partition('"""')[2]
        kept = source.partition('if __name__ == "__main__":')[0].replace(
            "def main(", f"def variant_{number}("
        )
        body += kept.splitlines()
    filler = lines - len(head)
    return "\n".join([*head[:cut], *body[:filler], *head[cut:]]) + "\n"


def seconds_of(command: list[str]) -> tuple[float, float]:
    """The wall time and the processor time of one process, which may keep its byte code."""
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=False, timeout=600, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, used


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, list[tuple[float, float]]]:
    """The seconds of each command, run in turns."""
    for command in commands.values():
        seconds_of(command)  # byte code and file caches
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            found[name].append(seconds_of(command))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torchfix", type=Path, help="the torchfix executable; without it only fsdp2 is measured"
    )
    parser.add_argument(
        "--fsdp2", type=Path, help="the fsdp2 executable (default: this Python with -m)"
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--script",
        type=Path,
        help="another script than the one of 500 lines that is made, or a folder",
    )
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = options.script or Path(folder) / "train.py"
        if options.script is None:
            script.write_text(script_of(LINES), encoding="utf-8")
        own = (
            [str(options.fsdp2)]
            if options.fsdp2
            else [sys.executable, "-m", "verified_fsdp2.skill"]
        )
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "fsdp2 lint": [*own, "lint", str(script)],
        }
        if options.torchfix is not None:
            commands["torchfix"] = [str(options.torchfix), "--select=ALL", str(script)]
        lines = sum(len(file.read_bytes().splitlines()) for file in files_of([script]))
        found = measure(commands, options.runs)
    result: dict[str, Any] = {"lines": lines, "runs": options.runs, "platform": platform.platform()}
    for number, kind in enumerate(("wall", "processor")):
        times = {name: [pair[number] for pair in pairs] for name, pairs in found.items()}
        result[kind] = {
            name: {"min": round(min(v), 4), "median": round(statistics.median(v), 4)}
            for name, v in times.items()
        }
        for name, reported in result[kind].items():
            print(
                f"{kind:<10} {name:<12} min {reported['min'] * 1000:6.0f} ms   median"
                f" {reported['median'] * 1000:6.0f} ms"
            )
        if "torchfix" in times:
            own, other = result[kind]["fsdp2 lint"], result[kind]["torchfix"]
            result[kind]["ratio"] = {
                key: round(own[key] / other[key], 3) for key in ("min", "median")
            }
            print(
                f"{kind:<10} ratio        min {own['min'] / other['min']:6.2f}      median"
                f" {own['median'] / other['median']:6.2f}"
            )
    if options.out is not None:
        write(options.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
