"""Which term of a loss is not that of one process: the finding names its line."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts import Verify, written
from verified_fsdp2.verifier.probe.events.loss_terms import Terms
from verified_fsdp2.verifier.probe.frames import Frames

SCRIPT = """
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def spread(hidden):
    values = hidden.logsumexp(dim=-1).square()
    return TERM


def objective(model, x, y):
    hidden = model[0](x)
    logits = model[2](model[1](hidden))
    count = (y >= 0).sum()
    total = F.cross_entropy(logits, y, ignore_index=-100, reduction="sum")
    task = TASK
    extra = spread(hidden)
    return task + 0.1 * extra


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x, y):
        return objective(self.layers, x, y)


torch.manual_seed(0)
model = Net()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
draw = torch.Generator().manual_seed(1)
for step in range(6):
    x, y = torch.randn(16, 8, generator=draw), torch.randint(0, 5, (16,), generator=draw)
    y[:3] = -100
    optimizer.zero_grad()
    loss = model(x.chunk(world)[rank], y.chunk(world)[rank])
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
SUM, MEAN, LOCAL = "values.sum() / 4", "values.mean()", "total / count"
WHOLE = "total * world / dist.nn.functional.all_reduce(count.float())"


@pytest.mark.parametrize(
    ("term", "task", "words", "fix", "line"),
    [
        (SUM, WHOLE, "their sum, where FSDP takes the mean", "Divide", f"return {SUM}"),
        (
            MEAN,
            LOCAL,
            "divided by a count of each rank's own in `task`",
            "Divide by the number",
            "task =",
        ),
    ],
)
def test_the_term_that_differs(
    term: str, task: str, words: str, fix: str, line: str, verify_script: Verify, tmp_path: Path
) -> None:
    text = SCRIPT.replace("TERM", term).replace("TASK", task)
    (found,) = verify_script(written(tmp_path, text), ("matches-single-process",)).findings
    assert found.status == "fail" and words in found.evidence
    assert found.location is not None and found.location.code.startswith(line)
    assert found.fix is not None and found.fix.startswith(fix)


def test_terms_that_are_those_of_one_process(verify_script: Verify, tmp_path: Path) -> None:
    text = SCRIPT.replace("TERM", MEAN).replace("TASK", WHOLE)
    (found,) = verify_script(written(tmp_path, text), ("matches-single-process",)).findings
    assert found.status == "pass"


@pytest.mark.parametrize("close", [lambda t: t.unused(), lambda t: t.compiles(None)])
def test_no_frame_is_followed_on_without_a_backward(close: Callable[[Terms], None]) -> None:
    """A script may step by `torch.autograd.grad`, or compile after its first forward."""
    before, module = sys.gettrace(), torch.nn.Linear(2, 1)
    sys.settrace(None)
    session: Any = SimpleNamespace(
        request=SimpleNamespace(mode="fsdp"), dormant=False, roots=[("", module)]
    )
    session.frames, session.guarded = Frames(str(Path(__file__).parent)), lambda hook: hook
    try:
        terms = Terms(session)
        terms.called(module, None)
        assert sys.gettrace() is not None
        loss = _loss(module)
        assert [term.name for term in terms.terms] == ["mean", ""] and loss.requires_grad
        close(terms)
        assert sys.gettrace() is None and not terms.terms and not terms.seen
    finally:
        sys.settrace(before)


def _loss(module: torch.nn.Module) -> torch.Tensor:
    mean = module(torch.ones(4, 2)).mean()
    return mean * 1.0
