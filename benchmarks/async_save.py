"""How long a save in the background holds the training loop, beside a save that the loop waits for:
the same state, the same disk.

    python benchmarks/async_save.py --out benchmarks/results/async_save.json

The generated `Checkpointer` of each mode (sync, thread, process) saves the same state, about 1 GB
with AdamW, one after the other in the same processes, several times. `held` is how long the loop
stands still: `save`, and `before_update` right after it. The generated loop has a forward and a
backward pass between the two, beside which the copy is made; here nothing hides it, so this is the
most that it can cost. `slowed` is what the steps after it last longer until all is written: that
takes time of the same cores. The first save of a mode is a row of its own, `first`, and not in the
ratio: it allocates the memory that later saves copy to. Of several ranks a row is that of the one
which was held longest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from machine import environment
from results_file import write

MODES = ("sync", "thread", "process")
LIMIT = 0.1
PATIENCE = 900
SPEC = {
    "version": 1,
    "model": {
        "kind": "decoder",
        "layers": 12,
        "width": 768,
        "heads": 12,
        "vocabulary": 8192,
        "sequence_length": 16,
    },
    "data": {"kind": "synthetic", "samples": 4096},
    "precision": {"param_dtype": "float32"},
    "train": {"steps": 1000, "global_batch": 2, "micro_batch": 1},
    "verify": {"reshard_to": []},
}


def load(project: Path, mode: str) -> ModuleType:
    """The checkpoint.py of one mode, beside those of the others."""
    place = importlib.util.spec_from_file_location(
        f"checkpoint_{mode}", project.parent / mode / "checkpoint.py"
    )
    assert place is not None and place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules[place.name] = module
    place.loader.exec_module(module)
    return module


class Loop:
    """A training step of the generated project, with and without a save."""

    def __init__(self, project: Path) -> None:
        import distributed
        import model
        import optim
        import settings
        import torch

        torch.set_num_threads(1)
        device = distributed.init_distributed()
        config = model.ModelConfig()
        self.model = model.build_model(config, distributed.build_mesh(device), device, 0)
        self.optimizer = optim.build_optimizer(self.model, settings.Settings())
        self.scheduler = optim.build_scheduler(self.optimizer, settings.Settings())
        self.tokens = torch.randint(0, config.vocabulary, (1, config.sequence_length)).to(device)

    def step(self) -> float:
        """One training step; its seconds."""
        import torch.nn.functional as F

        start = time.perf_counter()
        F.cross_entropy(self.model(self.tokens).flatten(0, 1), self.tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def trial(loop: Loop, state: Any, checkpoints: Any) -> dict[str, float]:
    """One save; the steps go on until it is written."""
    import torch.distributed as dist

    plain = statistics.median(loop.step() for _ in range(3))
    state.step += 1
    dist.barrier()
    start = time.perf_counter()
    checkpoints.save(state)
    if hasattr(checkpoints, "before_update"):
        checkpoints.before_update()
    held = time.perf_counter() - start
    later = []
    if hasattr(checkpoints, "close"):
        while not all_done(checkpoints):
            later.append(loop.step() - plain)
        checkpoints.close()
    written = time.perf_counter() - start
    return {
        "held": held,
        "written": written,
        "step": plain,
        "steps_meanwhile": len(later),
        "slowed": sum(later),
    }


def all_done(checkpoints: Any) -> bool:
    """Whether the save is written, as all ranks see it."""
    import torch
    import torch.distributed as dist

    done = torch.tensor(float(checkpoints.published.done()))
    dist.all_reduce(done, dist.ReduceOp.MIN)
    return bool(done)


def measure(project: Path, trials: int) -> None:
    """Inside a rank."""
    sys.path.insert(0, str(project))
    os.chdir(project)
    import torch.distributed as dist

    loop = Loop(project)
    loop.step()
    rows: list[dict[str, Any]] = []
    savers = {}
    for mode in MODES:
        module = load(project, mode)
        (project / mode / "checkpoints").mkdir(parents=True, exist_ok=True)
        state = module.TrainState(loop.model, loop.optimizer, loop.scheduler)
        savers[mode] = state, module.Checkpointer(project / mode, 1, 0)
    for number in range(trials + 1):
        for mode, (state, checkpoints) in savers.items():
            row = trial(loop, state, checkpoints)
            rows.append({"mode": mode, "trial": number or "first", **row})
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    saved = sorted((project / "sync" / "checkpoints").iterdir())[-1]
    size = sum(file.stat().st_size for file in saved.iterdir())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    if dist.get_rank() == 0:
        worst = [{**max(same, key=lambda row: row["held"])} for same in zip(*everyone, strict=True)]
        print(json.dumps({"bytes": size, "rows": worst}))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int, trials: int, folder: Path) -> dict[str, Any]:
    """One launch; of the ranks, each row is that of the one that was held longest."""
    import yaml

    from verified_fsdp2.skill import scaffold, spec

    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    for mode in MODES:
        loaded = spec.load(folder / "spec.yaml", [f"checkpoint.mode={mode}"])
        scaffold.write(scaffold.render(loaded), folder / mode)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [
        sys.executable,
        *launcher,
        __file__,
        "--inside",
        str(folder / "sync"),
        "--trials",
        str(trials),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"ranks": ranks, **found, **summary(found["rows"])}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and each trial's ratio to the sync save beside it."""
    held = {
        mode: [row["held"] for row in rows if row["mode"] == mode and row["trial"] != "first"]
        for mode in MODES
    }
    ratios = {
        mode: [one / sync for one, sync in zip(held[mode], held["sync"], strict=True)]
        for mode in ("thread", "process")
    }
    return {
        "seconds_held": {mode: statistics.median(values) for mode, values in held.items()},
        "ratio": {mode: statistics.median(values) for mode, values in ratios.items()},
        "ratios": ratios,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: the temporary folder)"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options.inside, options.trials)
        return 0
    runs = []
    for ranks in options.ranks:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            runs.append(launch(ranks, options.trials, folder))
        finally:
            shutil.rmtree(folder)
    results = {"environment": environment(), "limit": LIMIT, "runs": runs}
    if options.out:
        write(options.out, results)
    for run in runs:
        for mode, ratio in run["ratio"].items():
            spread = run["ratios"][mode]
            print(
                f"{run['ranks']} ranks, {run['bytes'] / 1e9:.2f} GB, {mode}: held"
                f" {run['seconds_held'][mode]:.2f} s, sync {run['seconds_held']['sync']:.2f} s:"
                f" {ratio:.3f} (from {min(spread):.3f} to {max(spread):.3f})"
            )
    return 0 if all(ratio <= LIMIT for run in runs for ratio in run["ratio"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
elif __name__ == "__mp_main__":
    logging.disable()  # the process that DCP writes in says what it does
