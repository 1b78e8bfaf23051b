"""Scripts that start their ranks themselves: each of ours is one of them."""

from pathlib import Path

import pytest

from scripts import ZOO, Verify, written

SPAWNS = """
import os
import torch
import torch.multiprocessing as mp


def work(rank, world, words):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "1"  # where nobody may listen
    import torch.distributed as dist
    dist.init_process_group("gloo", rank=rank, world_size=world)
    assert words == ("a", "b") and dist.get_rank() == rank
    train(rank, world)
    dist.destroy_process_group()


def train(rank, world):
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    for step in range(6):
        mine = rows[step * 8 : step * 8 + 8][rank::world]
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    world = NUMBER
    context = mp.spawn(work, args=(world, ("a", "b")), nprocs=world, join=False)
    while not context.join():
        pass
"""


@pytest.mark.parametrize("number", ["2", 'int(os.environ["WORLD_SIZE"])'])
def test_a_script_that_spawns_its_ranks(number: str, verify_script: Verify, tmp_path: Path) -> None:
    script = written(tmp_path, SPAWNS.replace("NUMBER", number))
    only = ("run-completes", "matches-ddp", "same-data-on-every-rank")
    found = {f.rule: f.status for f in verify_script(script, only).findings}
    assert found == dict.fromkeys(only, "pass")


def test_another_number_of_ranks_is_no_failure(verify_script: Verify, tmp_path: Path) -> None:
    verdict = verify_script(written(tmp_path, SPAWNS.replace("NUMBER", "3")), ("run-completes",))
    (found,) = verdict.findings
    assert found.status == "inconclusive" and "give --nproc 3" in found.evidence


def test_a_script_that_torchrun_starts_is_left_alone(verify_script: Verify) -> None:
    (found,) = verify_script(ZOO / "minimal.py", ("run-completes",)).findings
    assert found.status == "pass"
