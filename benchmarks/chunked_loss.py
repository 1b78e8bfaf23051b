"""Memory and time of the loss in chunks beside the plain one, at a vocabulary of 128k, in one
process.

    python benchmarks/chunked_loss.py --out benchmarks/results/chunked_loss.json

A step is the product with the head, the loss and their backward, on 4,096 tokens in float32
(bfloat16 takes minutes on a CPU). Its memory is the growth of the resident memory at its peak (the
kernel's VmHWM, reset before), less the gradients of hidden states and head, which both ways leave:
what is left holds the logits, and is given as a part of them. Steps run in turns, so that a noisy
machine slows both. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from loader_speed import SPEC, modules_of
from torch import Tensor
from torch.nn import functional

from machine import environment
from results_file import write
from verified_fsdp2.skill import scaffold, spec

TOKENS, VOCABULARY, WIDTH = 4096, 131_072, 256
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, head).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")


def generated(folder: Path) -> Loss:
    """The loss of a generated project."""
    written, project = folder / "spec.yaml", folder / "project"
    written.write_text(
        yaml.safe_dump({**SPEC, "data": {"kind": "synthetic"}, "memory": {"chunked_loss": True}}),
        encoding="utf-8",
    )
    scaffold.write(scaffold.render(spec.load(written)), project)
    with modules_of(project):
        summed_loss: Loss = __import__("loss").summed_loss
    return summed_loss


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def step(loss: Loss) -> tuple[float, int]:
    """Seconds of a step, and bytes at its peak beside inputs and gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    head = (torch.randn(VOCABULARY, WIDTH) / 16).requires_grad_()
    targets = torch.randint(VOCABULARY, (1, TOKENS))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, began = resident("VmRSS"), time.perf_counter()
    (loss(hidden, head, targets) / TOKENS).backward()
    took = time.perf_counter() - began
    gradients = (hidden.numel() + head.numel()) * head.element_size()
    return took, resident("VmHWM") - before - gradients


def measured(chunked: Loss, rounds: int) -> dict[str, dict[str, float]]:
    """{way: its seconds, and its memory as a part of the logits}."""
    ways = {"plain": plain, "chunked": chunked}
    steps: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for number in range(1 + rounds):
        for name, loss in ways.items():
            steps[name] += [step(loss)][:number]  # the first one begins threads and is left out
    logits = TOKENS * VOCABULARY * 4
    return {
        name: {
            "seconds": round(statistics.median(took for took, _ in made), 2),
            "memory": round(statistics.median(held for _, held in made) / logits, 3),
        }
        for name, made in steps.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways = measured(generated(Path(folder)), options.rounds)
    ratio = round(ways["chunked"]["seconds"] / ways["plain"]["seconds"], 2)
    print(ways, f"time {ratio}")
    if options.out:
        shape = {
            "tokens": TOKENS,
            "vocabulary": VOCABULARY,
            "width": WIDTH,
            "rounds": options.rounds,
        }
        write(options.out, {"environment": environment(), **shape, "time_ratio": ratio, **ways})
    return 0 if ways["chunked"]["memory"] <= 0.25 and ratio <= 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
