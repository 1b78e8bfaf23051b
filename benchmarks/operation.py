"""What a scaffold's metrics cost in each step, and what is left of them after a kill -9:
TensorBoard and W&B, the real packages.

    pip install tensorboard wandb
    python benchmarks/operation.py --out build/operation.json

cost: microseconds of `step_begins` and `train_step` together, on rank 0, the median of 1,000 calls;
a line goes to a file. crash: two ranks are killed in the middle of a run, which then resumes.
`steps_once` holds if a logger has each step exactly once. profile: the records of a run with
--profile beside those of one without: `unchanged` holds if they are the same bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from machine import environment
from results_file import text, write
from verified_fsdp2.skill import scaffold, spec

CALLS = 1000
EXACT = ("step", "loss", "grad_norm", "lr", "validation_loss")
SPEC = {
    "version": 1,
    "model": {
        "kind": "decoder",
        "layers": 2,
        "width": 64,
        "heads": 4,
        "vocabulary": 256,
        "sequence_length": 64,
    },
    "data": {"kind": "synthetic", "samples": 1024},
    "precision": {"param_dtype": "float32"},
    "train": {"steps": 40, "global_batch": 8},
    "checkpoint": {"interval": 8},
    "verify": {"reshard_to": []},
}
COSTS = {
    "lines and metrics.jsonl": [],
    "one line in 10 steps": ["train.log_interval=10"],
    "and MFU": ["operation.mfu=true", "operation.peak_tflops=1"],
    "and TensorBoard": ["operation.tensorboard=true"],
    "and W&B": ["operation.wandb=true"],
}


def project(folder: Path, *settings: str) -> Path:
    folder.mkdir()
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    scaffold.write(scaffold.render(spec.load(folder / "spec.yaml", settings)), folder / "project")
    return folder / "project"


def inside(folder: Path) -> None:
    """In a process of its own: call the generated Metrics as the loop does."""
    sys.path.insert(0, str(folder))
    import distributed
    import metrics
    import torch

    distributed.init_distributed()
    run = folder / "cost"
    run.mkdir()
    wanted = metrics.Metrics.__init__.__code__.co_varnames[
        2 : metrics.Metrics.__init__.__code__.co_argcount
    ]
    values: dict[str, Any] = {"step": 0, "steps": CALLS, "ideal_seconds": 1e-3}
    measured = metrics.Metrics(run, *(values[name] for name in wanted))
    loss, norm = torch.tensor(1.5, dtype=torch.float64), torch.tensor(0.5)
    seconds = []
    for step in range(1, CALLS + 1):
        start = time.perf_counter()
        measured.step_begins()
        measured.train_step(step, 1e-3, loss, 1024, norm)
        seconds.append(time.perf_counter() - start)
    if hasattr(measured, "close"):
        measured.close()
    (folder / "cost.json").write_text(json.dumps(seconds), encoding="utf-8")


def cost(folder: Path, settings: list[str]) -> dict[str, float]:
    made = project(folder, *settings)
    with (folder / "log").open("w") as log:
        subprocess.run(
            [sys.executable, __file__, "--inside", made],
            stdout=log,
            stderr=log,
            check=True,
            timeout=300,
        )
    micros = [
        1e6 * seconds for seconds in json.loads((made / "cost.json").read_text(encoding="utf-8"))
    ]
    return {
        "median_us": round(statistics.median(micros), 1),
        "mean_us": round(statistics.mean(micros), 1),
    }


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    command = [sys.executable, *launcher, *flags]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    shown, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(shown)
    return shown


def ranks_of(launcher: int) -> list[int]:
    return [
        int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ]


def records(run: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: the log format of LevelDB, blocks of 32 KiB, after a header of
    7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    data, place, part = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def wandb_losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each step in one offline folder."""
    (file,) = folder.glob("*.wandb")
    found = []
    for record in wandb_records(file):
        values = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if "loss" in values:
            found.append((values["_step"], values["loss"]))
    return found


def crash(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = project(folder, "operation.tensorboard=true", "operation.wandb=true")
    process = start(made)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step     20"):
            for rank in ranks_of(process.pid):
                os.kill(rank, signal.SIGKILL)
            break
    process.communicate(timeout=60)
    run = made / "out" / "run-001"
    killed = records(run)[-1]["step"]
    finish(start(made, "--resume"))
    lines = [(r["step"], r["loss"]) for r in records(run) if "loss" in r]
    folders = sorted(run.glob("wandb/offline-run-*"))
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    scalars = board.Scalars("loss")
    return {
        "killed_after_step": killed,
        "metrics.jsonl": {"steps_once": [step for step, _ in lines] == list(range(1, 41))},
        "tensorboard": {"steps_once": [scalar.step for scalar in scalars] == list(range(1, 41))},
        "wandb": {
            "folders": len(folders),
            "ids": len({path.name.split("-")[-1] for path in folders}),
            "steps_of_the_killed": len(wandb_losses(folders[0])),
            "steps_once": wandb_losses(folders[-1]) == lines,
        },
    }


def profile(folder: Path) -> dict[str, Any]:
    made = project(folder, "operation.profile=true")
    finish(start(made, "--steps", "8", "--out", "plain"))
    finish(start(made, "--steps", "8", "--out", "profiled", "--profile"))
    plain, profiled = (
        [
            [r.get(key) for key in EXACT]
            for r in records(made / out / "run-001")
            if "communication_share" not in r
        ]
        for out in ("plain", "profiled")
    )
    summary = made / "profiled" / "run-001" / "profile_steps_3_to_5" / "summary.json"
    return {
        "unchanged": plain == profiled,
        **json.loads(summary.read_text(encoding="utf-8"))["mean"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "environment": environment("tensorboard", "wandb"),
            "cost": {
                name: cost(Path(folder) / f"cost{n}", own)
                for n, (name, own) in enumerate(COSTS.items())
            },
            "crash": crash(Path(folder) / "crash"),
            "profile": profile(Path(folder) / "profile"),
        }
    print(text(results))
    if options.out:
        write(options.out, results)
    once = all(
        results["crash"][name]["steps_once"] for name in ("metrics.jsonl", "tensorboard", "wandb")
    )
    return 0 if once and results["profile"]["unchanged"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
