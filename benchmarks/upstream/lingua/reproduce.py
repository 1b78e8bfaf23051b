"""The learning rate after a resume that saves and loads as lingua/checkpoint.py does.

One process, no GPU.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.lr_scheduler import LambdaLR

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def build():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return (
        model,
        optimizer,
        LambdaLR(optimizer, lambda step: min(step / 4, 1.0)),
    )  # warmup: 4, as lr_cosine begins


model, optimizer, scheduler = build()
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)
    resumed, again, schedule = build()
    schedule.load_state_dict(scheduler.state_dict())  # TrainState.load_state_dict
    weights, moments = get_state_dict(resumed, again)  # CheckpointManager.load
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder)
print(
    "learning rate of the next step:",
    optimizer.param_groups[0]["lr"],
    "without a resume,",
    again.param_groups[0]["lr"],
    "after it",
)
