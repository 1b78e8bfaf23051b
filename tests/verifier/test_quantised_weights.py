"""QLoRA: frozen weights of torchao's NF4Tensor, of which the probe can take no elements, and
adapters that are trained.
"""

from pathlib import Path

import pytest
import torch

from scripts import Verify, written

SCRIPT = """
import argparse
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchao.quantization import to_nf4

OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(256, 256, bias=False)
        self.weight = nn.Parameter(to_nf4(self.weight.detach()), requires_grad=False)
        self.down, self.up = nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    parser.add_argument("--resume")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    begin = 0
    if options.resume:
        weights, moments = get_state_dict(model, optimizer, options=OPTIONS)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=options.resume)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=OPTIONS
        )
        begin = int(state["step"])
    data = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    for step in range(begin, 8):
        x = data[step * 8 : step * 8 + 8].chunk(size)[rank]
        (model(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if options.save and step == 1:
            weights, moments = get_state_dict(model, optimizer, options=OPTIONS)
            state = {"model": weights, "optimizer": moments, "step": torch.tensor(step + 1)}
            dcp.save(state, checkpoint_id=options.save)
    dist.destroy_process_group()


main()
"""


def test_a_base_in_four_bits_is_compared_like_others(verify_script: Verify, tmp_path: Path) -> None:
    rules = (
        "matches-ddp",
        "matches-single-process",
        "resume-is-exact",
        "reshard-keeps-trajectory",
        "state-restored",
    )
    given = {
        "save_args": "--save {checkpoint}",
        "resume_args": "--resume {checkpoint}",
        "reshard_to": [4],
    }
    verdict = verify_script(written(tmp_path, SCRIPT), rules, steps=4, **given)
    assert {finding.rule: finding.status for finding in verdict.findings} == dict.fromkeys(
        rules, "pass"
    )


ON_GPUS = (
    ('init_process_group("gloo")', 'init_process_group("nccl")'),
    ("nn.Sequential(Layer(), Layer())", "nn.Sequential(Layer(), Layer()).cuda()"),
    (".chunk(size)[rank]", ".chunk(size)[rank].cuda()"),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_base_in_four_bits_on_gpus_that_are_not_there(
    verify_script: Verify, tmp_path: Path
) -> None:
    text = SCRIPT
    for old, new in ON_GPUS:
        assert old in text
        text = text.replace(old, new)
    rules = ("run-completes", "matches-ddp")
    verdict = verify_script(written(tmp_path, text), rules, steps=2)
    assert {finding.rule: finding.status for finding in verdict.findings} == dict.fromkeys(
        rules, "pass"
    )
