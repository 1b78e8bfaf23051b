"""The generated spikes.py: which steps are far above those before, and what a run does then."""

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scaffold_launch import assert_close, steps_of

from records import cases
from scripts import forked
from trees import SMALL, Generate, write_project
from verified_fsdp2.skill.spec import SpecError

SKIP = "train.on_nonfinite=skip"
SPIKES = (SKIP, "train.skip_spikes={deviations: 3, window: 5}")
SPEC = {**SMALL, "train": {"steps": 20, "global_batch": 8, "micro_batch": 2}}


def test_far_above_the_last_steps(generate: Generate) -> None:
    """As the definition has it, in Python's statistics: also where a step is not finite, and from
    what a checkpoint holds.
    """
    module, drawn = generate(SPEC, "spikes", *SPIKES), random.Random(0)
    spikes, seen = module.Spikes(torch.device("cpu")), list[list[float]]()
    found, wanted = list[bool](), list[bool]()
    for number in range(200):
        latest = [drawn.gauss(3.0, 0.1), drawn.gauss(1.0, 0.05)]
        if number % 17 == 3:
            latest[number % 2] += drawn.choice([0.2, 0.4, 5.0, math.inf, math.nan, -5.0])
        usual = all(map(math.isfinite, latest))
        for last, value in zip(zip(*seen[-5:], strict=True), latest, strict=False):
            if len(seen) >= 5:
                usual = usual and value <= statistics.mean(last) + 3 * statistics.stdev(last)
        wanted.append(usual)
        loss, norm = torch.tensor(latest[0], dtype=torch.float64), torch.tensor(latest[1])
        latest[1] = norm.item()
        found.append(bool(spikes.usual(loss, norm)))
        seen += [latest] if all(map(math.isfinite, latest)) else []
        again = module.Spikes(torch.device("cpu"))
        again.seen, spikes = spikes.seen.clone(), again
    assert found == wanted and 5 < wanted.count(False) < 40


def test_a_lasting_change_is_taken_in_the_end(generate: Generate) -> None:
    module = generate(SPEC, "spikes", SKIP, "train.skip_spikes={}")
    spikes, drawn = module.Spikes(torch.device("cpu")), torch.Generator().manual_seed(0)
    values = 3 + 0.01 * torch.randn(140, dtype=torch.float64, generator=drawn)
    values[130:] += 1
    taken = [bool(spikes.usual(value, value)) for value in values]
    assert taken == [True] * 130 + [False] * 4 + [True] * 6  # the settings of the schema


@cases(
    "settings, message",
    (SPIKES[1:], "train.skip_spikes needs train.on_nonfinite: skip, found 'stop'"),
    ((*SPIKES, "optimizer.kind=muon"), "must be null with optimizer.kind muon: the device decides"),
)
def test_refused_in_the_spec(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        write_project(tmp_path, SPEC, *settings)


MODEL = """\
import torch
from torch import nn

class Block(nn.Linear):
    pass

class Net(nn.Module):
    def __init__(self, spike):
        super().__init__()
        self.embedding, self.block = nn.Embedding(64, 8), Block(8, 64)
        self.calls, self.spike = 0, spike

    def forward(self, tokens):
        self.calls += self.training and torch.is_grad_enabled()
        passes = 4 // torch.distributed.get_world_size()
        step = START + (self.calls - 2) // passes + 1  # the first call is the dry run
        logits = self.block(self.embedding(tokens))
        return logits * (90.0 if step == self.spike else 1.0)
"""


@pytest.mark.launch
def test_one_trajectory_without_the_spike_on_any_ranks(tmp_path: Path) -> None:
    """Step 7 is left out, also by a run that has seen the steps before it on other ranks only."""
    model = {"kind": "import", "import": "own:Net", "shard": ["Block"]}
    sizes = {"vocabulary": 64, "sequence_length": 16, "arguments": {"spike": 7}}
    spec = {**SPEC, "model": {**model, **sizes}}
    project = write_project(tmp_path, spec, *SPIKES)

    def run(ranks: int, out: str, start: int, steps: int, *flags: str) -> str:
        (project / "own.py").write_text(f"START = {start}\n{MODEL}")
        flags = ("--out", str(tmp_path / out), "--steps", str(steps), *flags)
        return forked(project, ranks, *flags)

    said = "step      7  far above the steps before: this update was skipped"
    assert run(1, "one", 0, 9).count("skipped") == 1
    one = steps_of(tmp_path / "one")
    assert one[6]["loss"] > 2 * one[5]["loss"] and one[7]["loss"] < one[5]["loss"] * 1.05
    run(2, "two", 0, 5)
    assert said in run(4, "two", 5, 9, "--resume")
    assert_close(steps_of(tmp_path / "two"), one, 1e-5)
