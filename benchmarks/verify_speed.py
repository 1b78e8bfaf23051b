"""What a full verification costs, in plain launches: the quickstart scaffold, `torchrun` and `fsdp2
verify` in turn.

    python benchmarks/verify_speed.py [--repeats 5] [--out build/verify_speed.json]

Each round runs one plain `torchrun --nproc-per-node 2 train.py` of as many steps as the
verification compares, then one `fsdp2 verify` (single, reference, perturbed, train, resume, two
reshards). The ratio is that of the medians of wall-clock time; processor time, which other work on
the machine disturbs less, stands beside it. The load before the first round is written down.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from results_file import text, write

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 3.0
ROLE = re.compile(r"^  (\w+) +(\d+) ranks? +(\d+) steps +([\d.]+) s", re.M)


def timed(command: list[str | Path], folder: Path) -> tuple[float, float, str]:
    """(seconds, seconds of processor time, stderr) of a command that must succeed."""
    kept = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }  # byte code, as by default
    before, started = os.times(), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, check=False, timeout=900
    )
    seconds, after = time.monotonic() - started, os.times()
    if done.returncode:
        raise SystemExit(
            f"{command}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return seconds, used, done.stderr


def measure(repeats: int) -> dict[str, Any]:
    """Both, in turn, `repeats` times."""
    load = os.getloadavg()[0]
    plain: list[tuple[float, float]] = []
    full: list[tuple[float, float]] = []
    phases: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fsdp2-speed-") as name:
        folder = Path(name)
        project = folder / "project"
        fsdp2: list[str | Path] = [sys.executable, "-m", "verified_fsdp2.skill"]
        timed([*fsdp2, "new", ROOT / "examples" / "quickstart.yaml", project], ROOT)
        steps = yaml.safe_load((project / "verify.yaml").read_text(encoding="utf-8"))["steps"]
        torchrun: list[str | Path] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", "2", "train.py", "--steps", str(steps)]
        for number in range(repeats):
            plain.append(timed([*torchrun, "--out", folder / f"out{number}"], project)[:2])
            seconds, used, reported = timed([*fsdp2, "verify", project], project)
            full.append((seconds, used))
            for role, ranks, _, taken in ROLE.findall(reported):
                phases.setdefault(f"{role} {ranks}", []).append(float(taken))
            print(f"torchrun {plain[-1][0]:.1f} s, fsdp2 verify {seconds:.1f} s", flush=True)
    middle = {
        "torchrun_seconds": statistics.median(wall for wall, _ in plain),
        "verify_seconds": statistics.median(wall for wall, _ in full),
        "torchrun_processor_seconds": statistics.median(used for _, used in plain),
        "verify_processor_seconds": statistics.median(used for _, used in full),
    }
    return {
        "steps": steps,
        "repeats": repeats,
        "ratio": round(middle["verify_seconds"] / middle["torchrun_seconds"], 2),
        "processor_ratio": round(
            middle["verify_processor_seconds"] / middle["torchrun_processor_seconds"], 2
        ),
        **{key: round(value, 2) for key, value in middle.items()},
        "rounds": [
            {"torchrun": round(one[0], 2), "verify": round(other[0], 2)}
            for one, other in zip(plain, full, strict=True)
        ],
        "phases": {role: round(statistics.median(times), 2) for role, times in phases.items()},
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
            "load_before": round(load, 2),
        },
    }


def main() -> int:
    """Measure, print, write; 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = measure(options.repeats)
    print(text(results))
    if options.out is not None:
        write(options.out, results)
    return 0 if results["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
