"""What the guard costs: the same training with and without it, in turn.

    python benchmarks/guard/cost.py --out benchmarks/results/guard_cost.json

Two launches of 2 ranks live side by side; one trains a few steps while the other waits, in an order
drawn for each turn, so that the load of the machine meets both alike. A pair is a window of steps
of each, as many as lie between two comparisons: the sum of its turns. The ratio is the median over
pairs; memory is the peak of each rank; the start is the time that installing takes.

What a step costs that is not compared does not depend on the size of the model: it is measured
where it is a large part of a step, with a small one and no comparison:

    python benchmarks/guard/cost.py --width 8 --rows 8 --window 100 --turn 50 --every 100000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

DEPTH = 6
WARM = 6  # steps before the first window
POLL = 0.002


def train(folder: Path, width: int, rows: int, turn: int) -> None:
    """One rank of one launch: trains whenever its turn comes."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(DEPTH)
    ]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    number = 0
    while True:
        if rank == 0:
            (folder / f"ready{number}").touch()
            while not (folder / f"go{number}").exists():
                time.sleep(POLL)
        dist.barrier()
        if (folder / "stop").exists():
            break
        begun, used = time.perf_counter(), time.process_time()
        for _ in range(turn):
            step()
        dist.barrier()
        if rank == 0:
            row = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - used}
            (folder / f"part{number}").write_text(json.dumps(row))
            (folder / f"part{number}").rename(folder / f"done{number}")
        number += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"peak{rank}").write_text(str(peak))
    dist.destroy_process_group()


def launch(folder: Path, options: argparse.Namespace, guarded: bool) -> subprocess.Popen[bytes]:
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--standalone", "--nproc-per-node", "2", str(HERE / "cost.py")]
    command += ["--rank-of", str(folder)]
    for key in ("width", "rows", "turn"):
        command += [f"--{key}", str(getattr(options, key))]
    if guarded:
        watch = [
            sys.executable,
            "-m",
            "verified_fsdp2.skill",
            "guard",
            "--every",
            str(options.every),
        ]
        command = [*watch, "--out", str(folder / "guard.jsonl"), "--", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def one_turn(folder: Path, number: int) -> dict[str, float]:
    wait_for(folder / f"ready{number}")
    (folder / f"go{number}").touch()
    done = folder / f"done{number}"
    wait_for(done)
    found: dict[str, float] = json.loads(done.read_text())
    return found


def wait_for(path: Path, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit(f"no {path.name} in {seconds:.0f} s")
        time.sleep(POLL)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    pairs, window, turn = options.pairs, options.window, options.turn
    rows: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("plain", "guarded")}
        for folder in folders.values():
            folder.mkdir()
        running = [launch(folder, options, kind == "guarded") for kind, folder in folders.items()]
        turns = window // turn
        for pair in range(pairs):
            total = {kind: {"seconds": 0.0, "cpu": 0.0} for kind in folders}
            for number in range(pair * turns, (pair + 1) * turns):
                kinds = list(folders)
                random.Random(number).shuffle(kinds)
                for kind in kinds:
                    for what, value in one_turn(folders[kind], number).items():
                        total[kind][what] += value
            rows.append(total)
            print(json.dumps(rows[-1]), flush=True)
        for folder in folders.values():
            wait_for(folder / f"ready{pairs * turns}")
            (folder / "stop").touch()
            (folder / f"go{pairs * turns}").touch()
        for process in running:
            process.wait(120)
        peaks = {
            kind: max(float(file.read_text()) for file in folder.glob("peak*"))
            for kind, folder in folders.items()
        }
        lines = (folders["guarded"] / "guard.jsonl").read_text().splitlines()
    return summary(rows, options, peaks, [json.loads(line) for line in lines])


def summary(
    rows: list[dict[str, dict[str, float]]],
    options: argparse.Namespace,
    peaks: dict[str, float],
    lines: list[dict[str, Any]],
) -> dict[str, Any]:
    def ratio(what: str) -> float:
        return statistics.median(row["guarded"][what] / row["plain"][what] for row in rows)

    window = options.window
    plain = statistics.median(row["plain"]["seconds"] for row in rows) / window
    more = [row["guarded"]["seconds"] - row["plain"]["seconds"] for row in rows]
    return {
        "pairs": len(rows),
        "steps_between_comparisons": options.every,
        "steps": window,
        "width": options.width,
        "step_seconds": round(plain, 5),
        "more_seconds_a_step": round(statistics.median(more) / window, 6),
        "ratio_of_seconds": round(ratio("seconds"), 4),
        "ratio_of_processor_time": round(ratio("cpu"), 4),
        "peak_mb": {kind: round(value, 1) for kind, value in peaks.items()},
        "more_mb": round(peaks["guarded"] - peaks["plain"], 1),
        "comparisons": sum(line["kind"] == "check" for line in lines),
        "breaches": sum(line["kind"] == "breach" for line in lines),
        "start_seconds": start_seconds(),
    }


def start_seconds() -> float:
    """The median time that `import verified_fsdp2.guard` takes after torch, of five processes."""
    code = (
        "import time, torch, torch.distributed.fsdp, torch.distributed.checkpoint\n"
        "begun = time.perf_counter()\nimport verified_fsdp2.guard\n"
        "print(time.perf_counter() - begun)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for _ in range(5)
    ]
    return round(statistics.median(map(float, runs)), 3)


def main() -> int:
    from machine import environment
    from results_file import write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--window", type=int, default=100, help="steps of a pair, of each kind")
    parser.add_argument("--every", type=int, default=100, help="that of the guard")
    parser.add_argument("--width", type=int, default=512, help="of the model: a step of 0.3 s")
    parser.add_argument("--rows", type=int, default=80, help="of a batch")
    parser.add_argument(
        "--turn", type=int, default=5, help="steps that one trains while the other waits"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        train(options.rank_of, options.width, options.rows, options.turn)
        return 0
    found = measure(options)
    print(json.dumps(found, indent=1))
    if options.out:
        write(options.out, {"environment": environment(), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
