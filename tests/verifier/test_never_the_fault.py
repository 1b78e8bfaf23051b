"""What the verifier itself does to a run, or fails to do, is never reported as a fault of the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Verify

from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request

MINIMAL = Path(__file__).parents[1] / "zoo" / "minimal.py"

DRAWS = """\
import json, os, random, sys

def draws():
    import numpy, torch
    numbers = {"python": random.random(), "numpy": float(numpy.random.rand()), "seed": torch.initial_seed()}
    return {**numbers, "torch": torch.rand(4, dtype=torch.float64).tolist()}

print(json.dumps(draws()))
"""


def launch(launcher: Launcher, folder: Path, script: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir()
    return launcher.run(Request(str(folder), str(script), str(script.parent), world_size=2, **more))


def edited(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The minimal script with some of its text replaced."""
    text = MINIMAL.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "train.py"
    script.write_text(text)
    return script


# -- random state -----------------------------------------------------------------------------------------------------


@pytest.mark.launch
def test_ranks_without_a_seed_draw_what_separate_processes_draw(launcher: Launcher, tmp_path: Path) -> None:
    """Measured with torchrun: each rank, and each run, has its own seed of Python, NumPy and torch."""
    script = tmp_path / "draws.py"
    script.write_text(DRAWS)
    drawn = []
    for run in ("first", "second"):
        launch(launcher, tmp_path / run, script)
        drawn += [json.loads((tmp_path / run / f"rank{rank}.out").read_text()) for rank in range(2)]
    for generator in ("python", "numpy", "seed", "torch"):
        values = [str(rank[generator]) for rank in drawn]
        assert len(set(values)) == len(values), generator


@pytest.mark.launch
def test_a_script_without_a_seed(verify_script: Verify, tmp_path: Path) -> None:
    script = edited(
        tmp_path,
        ("torch.manual_seed(SEED)", "pass"),
        ("batch = tokens[start : start + local]", "batch = torch.randint(0, VOCAB, (local, SEQ + 1))"),
    )
    verdict = verify_script(script, only=("same-data-on-every-rank", "rank-dependent-init-no-broadcast"))
    found = {finding.rule: finding.status for finding in verdict.findings}
    assert found == {"same-data-on-every-rank": "pass", "rank-dependent-init-no-broadcast": "fail"}
