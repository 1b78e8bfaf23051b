"""Weights that ranks built otherwise, and that are initialised once more when they are sharded."""

from pathlib import Path

import pytest

from scripts import Verify, written

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
fully_shard(model[0])
fully_shard(model)
torch.manual_seed(0)
for parameter in AGAIN:
    nn.init.normal_(parameter, std=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
draw = torch.Generator().manual_seed(dist.get_rank())
for step in range(3):
    x = torch.randn(8, 8, generator=draw)
    optimizer.zero_grad()
    (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("again", "status", "words"),
    [
        ("model.parameters()", "pass", "written again after it"),
        ("model[0].parameters()", "fail", "weight of Linear"),
    ],
)
def test_weights_that_are_written_again(
    again: str, status: str, words: str, verify_script: Verify, tmp_path: Path
) -> None:
    script = written(tmp_path, SCRIPT.replace("AGAIN", again))
    (found,) = verify_script(script, ("rank-dependent-init-no-broadcast",)).findings
    assert (found.status, words in found.evidence) == (status, True), found.evidence
