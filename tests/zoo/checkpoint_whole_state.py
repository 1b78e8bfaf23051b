"""All that a loop carries comes back: weights, optimizer, plateau schedule, average of the weights, statistics, best score.

save_args: --save-every 2 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

FEATURES, WIDTH, CLASSES = 12, 32, 4
GLOBAL_BATCH, SAMPLES, STEPS, DECAY = 16, 320, 20, 0.9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        hidden = self.inner(x)
        if self.training:
            with torch.no_grad():
                mean = hidden.mean(0)
                dist.all_reduce(mean)
                self.centre.lerp_(mean / dist.get_world_size(), 0.1)
        return self.head(torch.tanh(hidden))


class Average:
    def __init__(self, model):
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, param in model.named_parameters():
            self.shadow[name].lerp_(param.detach(), 1 - DECAY)


def make_data(samples, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=gen)
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7))
    return x, (x @ teacher + 0.1 * torch.randn(samples, CLASSES, generator=gen)).argmax(1)


@torch.no_grad()
def evaluate(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.train(False)
    total = torch.zeros(2, dtype=torch.float64)
    for part_x, part_y in zip(x.split(24), y.split(24), strict=True):
        logits = model(part_x[rank::world])
        total[0] += F.cross_entropy(logits, part_y[rank::world], reduction="sum")
        total[1] += len(part_y[rank::world])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def collect(model, optimizer, scheduler, average, best, step):
    weights, state = get_state_dict(model, optimizer)
    extra = {"scheduler": scheduler.state_dict(), "best": best, "step": step}
    return {"model": weights, "optimizer": state, "average": average.shadow, "extra": extra}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    average = Average(model)
    best, done = float("inf"), 0
    if args.resume:
        state = collect(model, optimizer, scheduler, average, best, done)
        complete = [path.parent for path in Path(args.resume).glob("step_*/.metadata")]
        newest = max(complete, key=lambda path: int(path.name.rpartition("_")[2]))
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["extra"]["scheduler"])
        best, done = state["extra"]["best"], state["extra"]["step"]

    x, y = make_data(SAMPLES, seed=0)
    held_x, held_y = make_data(62, seed=1)
    local = GLOBAL_BATCH // world
    for step in range(done, STEPS):
        torch.manual_seed(1000 * step + rank)  # dropout differs between ranks and is the same after a resume
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        optimizer.zero_grad()
        penalty = sum((param**2).sum() for param in decayed)
        loss = F.cross_entropy(model(x[start : start + local]), y[start : start + local])
        loss.backward()
        optimizer.step()
        average.update(model)
        value = evaluate(model, held_x, held_y)
        scheduler.step(value)
        if value < best:
            best = value
        if args.save_every and (step + 1) % args.save_every == 0:
            state = collect(model, optimizer, scheduler, average, best, step + 1)
            dcp.save(state, checkpoint_id=Path(args.out) / f"step_{step + 1}")
        size = penalty.full_tensor().item()
        if rank == 0:
            print(
                f"step {step + 1} loss {loss.item():.4f} held out {value:.4f} best {best:.4f} weights {size:.2f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
