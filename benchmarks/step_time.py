"""What the generated training loop costs beside a bare hand-written FSDP2 loop: the same model,
batch and optimizer.

    python benchmarks/step_time.py --out build/step_time.json

Both run in the same processes, a step of the one after a step of the other: the generated `train()`
runs unmodified, and each time it asks for its next batch, one bare step is made first. So a noisy
machine slows both. A ratio is that of the medians of one round, over all ranks but the first steps;
several rounds give the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from machine import environment
from results_file import write
from verified_fsdp2.skill import scaffold, spec

WARM = 5  # steps that are not counted: first allocations, shorter time-outs
LIMIT = 1.03
SPEC = {
    "version": 1,
    "model": {
        "kind": "decoder",
        "layers": 4,
        "width": 256,
        "heads": 4,
        "vocabulary": 1024,
        "sequence_length": 128,
    },
    "data": {"kind": "synthetic", "samples": 4096},
    "precision": {"param_dtype": "float32"},
    "verify": {"reshard_to": []},
}


def measure(project: Path, steps: int) -> None:
    """Inside a rank: run the generated `train()` with a bare step before each of its own, and print
    both medians.
    """
    sys.path.insert(0, str(project))
    os.chdir(project)
    import data
    import distributed
    import model
    import settings
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import train
    from torch.optim import AdamW

    device = distributed.init_distributed()
    mesh = distributed.build_mesh(device)
    config = model.ModelConfig()
    bare = model.build_model(config, mesh, device, 0)
    optimizer = AdamW(bare.parameters(), lr=1e-4, fused=True)
    inputs = torch.randint(0, 1024, (settings.Settings.micro_batch, config.sequence_length))
    own: list[float] = []
    generated: list[float] = []
    began = 0.0

    def bare_step() -> None:
        loss = F.cross_entropy(bare(inputs).flatten(0, 1), inputs.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    real = data.GlobalBatches.micro_batches

    def next_batches(loader: Any, position: int) -> Any:
        nonlocal began
        now = time.perf_counter()
        if began:
            generated.append(now - began)
        bare_step()
        own.append(time.perf_counter() - now)
        began = time.perf_counter()
        return real(loader, position)

    data.GlobalBatches.micro_batches = next_batches
    sys.argv = ["train.py", "--steps", str(steps), "--out", "out"]
    train.train(settings.parse_settings(), device, mesh)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "bare": statistics.median(own[WARM:]),
                    "generated": statistics.median(generated[WARM:]),
                }
            )
        )
    dist.destroy_process_group()


def one_round(project: Path, steps: int, ranks: int) -> dict[str, float]:
    """Seconds of a step: the medians of one launch."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, __file__, "--inside", str(project), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options.inside, options.steps)
        return 0
    train = {"steps": 1000, "global_batch": 4 * options.ranks, "micro_batch": 4}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(yaml.safe_dump({**SPEC, "train": train}), encoding="utf-8")
        scaffold.write(scaffold.render(spec.load(path)), Path(folder) / "project")
        rounds = [
            one_round(Path(folder) / "project", options.steps, options.ranks)
            for _ in range(options.rounds)
        ]
    ratios = [r["generated"] / r["bare"] for r in rounds]
    results = {
        "environment": environment(),
        "ranks": options.ranks,
        "steps": options.steps,
        "limit": LIMIT,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "rounds": rounds,
    }
    if options.out:
        write(options.out, results)
    print(
        f"a step: generated / bare = {results['ratio']:.3f} (from {min(ratios):.3f} to"
        f" {max(ratios):.3f}); limit {LIMIT}"
    )
    return 0 if results["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
