"""How small a gradient error is still found: a factor 1 + eps on gradients, halved until no rule
fails.

    python benchmarks/detection_limit.py --out benchmarks/results/detection_limit.json

The host is a right script (tests/zoo/minimal.py) on 2 ranks; the error is put in by an edit, at one
of four places, under SGD and under AdamW, and once with an active clip. For each: the smallest eps
that is found and the next smaller one, which is not.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus import TESTS
from results_file import write
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with

HOST = TESTS / "zoo" / "minimal.py"
OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)"
BACKWARD = "        loss.backward()\n"
SMALLEST = 30  # eps = 2^-30 is below what float32 holds
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n"
SHARDED = (
    "        for p in {which}:\n            if hasattr(p, 'device_mesh'):\n               "
    " p.grad.mul_({factor})\n"
)
LOSS = "loss, over the world size"
PLACES = {
    LOSS: "        (loss * (1 + {eps} * (world - 1))).backward()\n{clip}",
    "every sharded gradient, after backward": (
        BACKWARD + SHARDED.replace("{which}", "model.parameters()") + "{clip}"
    ),
    "one sharded matrix, after backward": (
        BACKWARD + SHARDED.replace("{which}", "[model.head.weight]") + "{clip}"
    ),
    "every sharded gradient, before the step": (
        BACKWARD + "{clip}" + SHARDED.replace("{which}", "model.parameters()")
    ),
}
OPTIMIZERS = {"SGD": "torch.optim.SGD(model.parameters(), lr=0.3)", "AdamW": OPTIMIZER}


def script(optimizer: str, place: str, clip: bool, eps: float) -> str:
    """The host with an error of size `eps` in it (none: the host with that optimizer and clip)."""
    text = HOST.read_text(encoding="utf-8")
    if text.count(OPTIMIZER) != 1 or text.count(BACKWARD) != 1:
        raise ValueError(f"{HOST} has changed: its optimizer or its backward is not where it was")
    body = PLACES[place].replace("{factor}", f"1 + {eps!r}").replace("{eps}", repr(eps))
    return text.replace(OPTIMIZER, OPTIMIZERS[optimizer]).replace(
        BACKWARD, body.replace("{clip}", CLIP if clip else "")
    )


def failing(launcher: Launcher, text: str) -> dict[str, float | None]:
    """{rule: measured / limit} of the parity rules that fail on a script."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(text, encoding="utf-8")
        chosen = select(("matches-ddp", "matches-single-process"), ())
        verdict = verify_with(launcher, resolve(path, {}), Path(folder) / "work", chosen)
    for finding in verdict.findings:
        if finding.status == "inconclusive":
            raise RuntimeError(f"{finding.rule}: {finding.evidence}")
    return {
        f.rule: 1.0 / f.margin if f.margin else None for f in verdict.findings if f.status == "fail"
    }


def smallest(launcher: Launcher, optimizer: str, place: str, clip: bool) -> dict[str, Any]:
    """One line of the table, by bisection over the powers of two."""
    if failing(launcher, script(optimizer, place, clip, 0.0)):
        raise RuntimeError(f"{optimizer}, clip {clip}: the host without an error is not right")
    found, missed = 3, SMALLEST
    rules = failing(launcher, script(optimizer, place, clip, 2.0**-found))
    if not rules:
        raise RuntimeError(
            f"{optimizer}, {place}, clip {clip}: an error of 2^-{found} is not found"
        )
    while missed - found > 1:
        middle = (found + missed) // 2
        if now := failing(launcher, script(optimizer, place, clip, 2.0**-middle)):
            found, rules = middle, now
        else:
            missed = middle
    row = {"optimizer": optimizer, "place": place, "clip": clip}
    return {**row, "found": 2.0**-found, "missed": 2.0**-missed, "rules": sorted(rules)}


def rows() -> Iterator[tuple[str, str, bool]]:
    """(optimizer, place, clip) of every line."""
    for optimizer in OPTIMIZERS:
        for place in PLACES:
            yield optimizer, place, False
        yield optimizer, LOSS, True  # a factor on gradients before an active clip changes nothing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    table = []
    with Launcher(wish=wish(temporary("runs"))) as launcher:
        for optimizer, place, clip in rows():
            row = smallest(launcher, optimizer, place, clip)
            table.append(row)
            state = "clip" if clip else "no clip"
            print(
                f"{optimizer:<6} {state:<8} {place:<40} {row['found']:.1e} "
                f" {', '.join(row['rules'])}",
                flush=True,
            )
        versions = launcher.versions
    largest = max(row["found"] for row in table)
    print(f"every relative error of gradients from {largest:.1e} up is found")
    if options.out:
        environment = {**versions, "platform": platform.platform()}
        result = {
            "environment": environment,
            "ranks": 2,
            "steps": 5,
            "found_from": largest,
            "rows": table,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write(options.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
