"""Processes that a script starts by multiprocessing's spawn and forkserver, on a machine without a
GPU.
"""

from pathlib import Path

import pytest
import torch

from scripts import Verify, written

SCRIPT = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

GPU = torch.cuda.get_device_name(0)  # in every process that imports the script


def feed(queue, rank, done):
    generator = torch.Generator("cuda").manual_seed(rank)
    while not done.is_set():
        queue.put(torch.randn(4, 8, generator=generator, device="cuda").tolist())


def main():
    mp.set_start_method("forkserver")
    with mp.Manager():
        pass
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    queue, done = mp.Queue(4), mp.Event()
    producer = mp.Process(target=feed, args=(queue, rank, done))
    producer.start()
    samples = torch.randn(24, 8, generator=torch.Generator().manual_seed(rank))
    for row in DataLoader(samples, num_workers=1, multiprocessing_context="spawn"):
        batch = torch.cat([torch.tensor(queue.get()), row]).cuda()
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    done.set()
    producer.kill()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_spawned_processes_have_cuda_and_end_with_a_stopped_rank(
    verify_script: Verify, tmp_path: Path
) -> None:
    script = written(tmp_path, SCRIPT)
    verdict = verify_script(script, ("run-completes",), steps=2, timeout=200.0)
    assert [finding.status for finding in verdict.findings] == ["pass"]
    assert verdict.environment["cuda_on_cpu"] is True
