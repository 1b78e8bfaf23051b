"""Run in a checkout of microsoft/dion, without a GPU: the first token and learning rate of each
step, with and without a resume, and after a stop within `CheckpointManager.save`.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, ".")
from dion import Muon
from models.gpt_utils import DistributedDataLoader
from train import CheckpointManager

torch.Tensor.cuda = lambda tensor: tensor
folder = tempfile.mkdtemp()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
header = np.array([20240520, 1, 1000] + [0] * 253, dtype=np.int32)
Path(folder, "tokens.bin").write_bytes(
    header.tobytes() + np.arange(1000, dtype=np.uint16).tobytes()
)


def train(title, last, saves=None):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader, val = (DistributedDataLoader(f"{folder}/*.bin", 1, 10, 0, 1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: 1 - it / 10)
    manager = CheckpointManager(f"{folder}/checkpoints", model, optimizer, loader, val, None)
    manager.load(allow_missing=True)
    x, _ = loader.next_batch()
    for step in range(0 if manager.step is None else manager.step + 1, last + 1):
        print(
            f"{title} step {step}: first token {x[0, 0]}, learning rate"
            f" {optimizer.param_groups[0]['lr']:.1f}"
        )
        x, _ = loader.next_batch()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(), scheduler.step(), model.zero_grad(set_to_none=True)
        step == saves and manager.save(step=step)


def stop(*_):
    raise InterruptedError


train("uninterrupted", 5), train("until the save", 2, saves=2), train("resumed", 5)
move, shutil.move = shutil.move, stop
try:
    train("resumed, until it is stopped in the next save", 4, saves=4)
except InterruptedError:
    shutil.move = move
train("resumed after the stop", 1)

weight = torch.nn.Parameter(torch.ones(2, 2))
optimizer = Muon(
    [{"params": [weight], "algorithm": "adamw", "betas": (0.95, 0.98)}], use_triton=False
)
weight.grad = torch.ones(2, 2)
optimizer.step()
share = float(optimizer.state[weight]["momentum"][0, 0])  # 1 - beta1 of the gradient
print(
    f"betas=(0.95, 0.98) in a group: the first step makes a momentum of {share:.2f} from a gradient"
    " of 1"
)
