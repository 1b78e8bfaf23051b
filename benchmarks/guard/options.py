"""The command line of trainer.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="trainer.py: a right FSDP2 training script")
    parser.add_argument("--mesh", choices=("fsdp", "hsdp", "ddp"), default="fsdp")
    numbers = {"accumulate": 1, "global_batch": 32, "samples": 4112, "seed": 0, "depth": 1}
    numbers |= {"steps": 1000, "stop_at": 0, "save_every": 100, "kill_at": 0, "warmup": 50}
    numbers |= {"timeout": 600, "begin": -1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--case", help="a fault, a flip or a right variant of this folder")
    args = parser.parse_args(arguments)
    args.stop_at = args.stop_at or args.steps
    return args
