"""The training loop as a generator of events; what to do with them is up to the consumers in train.py."""
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Progress:
    step: int
    loss: float
    norm: float


@dataclass
class EpochEnd:
    epoch: int
    step: int


def batches(task, cursor):
    """Endless; `cursor` is a dict that always points at the next batch not yet handed out."""
    while True:
        order = task.order(cursor["epoch"])
        while cursor["index"] < task.per_epoch:
            i = cursor["index"]
            cursor["index"] = i + 1
            yield task.take(order, i)
        cursor["epoch"] += 1
        cursor["index"] = 0


def training(model, opt, task, cursor, start):
    step, epoch = start, cursor["epoch"]
    for x, y in batches(task, cursor):
        if cursor["epoch"] != epoch:
            yield EpochEnd(epoch, step)
            epoch = cursor["epoch"]
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield Progress(step, mean.item() / dist.get_world_size(), float(norm.full_tensor()))
