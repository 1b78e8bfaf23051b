"""Weights that a script divides over ranks itself: one process has them whole."""

from pathlib import Path

import pytest

from scripts import Verify, written

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep"))


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        BACKWARD
        return gradient


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Experts(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        mine = experts // world
        whole = torch.randn(experts, 8, 8) * 0.3
        self.gate = nn.Linear(8, experts, bias=False)
        self.weight = nn.Parameter(whole[rank * mine : (rank + 1) * mine].clone())
        self.first, self.mine = rank * mine, mine

    def forward(self, x):
        scores = Copied.apply(self.gate(x).softmax(-1))
        x = Copied.apply(x)
        parts = (
            scores[:, NUMBER, None] * torch.tanh(x @ self.weight[k])
            for k in range(self.mine)
        )
        return Summed.apply(sum(parts))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 1))
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
draw = torch.Generator().manual_seed(1)
for step in range(6):
    x = torch.randn(16, 8, generator=draw)
    optimizer.zero_grad()
    (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
IN_ORDER, INTERLEAVED = "self.first + k", "rank + k * world"  # the experts of a rank


@pytest.mark.parametrize(
    ("number", "backward", "status", "words"),
    [
        (IN_ORDER, "dist.all_reduce(gradient)", "pass", "agrees with one process"),
        (IN_ORDER, "pass", "fail", "the loss is that of one process, its gradient is not"),
        (INTERLEAVED, "dist.all_reduce(gradient)", "inconclusive", "where they are divided"),
    ],
)
def test_experts_of_each_rank(
    number: str, backward: str, status: str, words: str, verify_script: Verify, tmp_path: Path
) -> None:
    text = SCRIPT.replace("NUMBER", number).replace("BACKWARD", backward)
    (found,) = verify_script(written(tmp_path, text), ("matches-single-process",)).findings
    assert (found.status, words in found.evidence) == (status, True), found.evidence
    if status == "fail":
        assert "1.gate.weight is the last that differs" in found.evidence
