"""Normalized momentum with a line search written by hand, no optimizer of torch; a scale outside the model; an average with a warm-up.

save_args: --save-every 2 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

GLOBAL_BATCH, SAMPLES, STEPS = 16, 128, 16
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Average:
    """An exponential moving average of the shards, whose decay grows with its updates."""

    def __init__(self, params):
        self.params, self.updates = list(params), 0
        self.shadow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def update(self):
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for mine, param in zip(self.shadow, self.params, strict=False):
            mine.lerp_(param.detach(), 1 - decay)

    def state(self):
        return {"shadow": [mine.full_tensor() for mine in self.shadow], "updates": self.updates}

    def restore(self, state):
        for mine, whole in zip(self.shadow, state["shadow"], strict=False):
            mine.copy_(distribute_tensor(whole, mine.device_mesh, mine.placements))
        self.updates = state["updates"]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    fully_shard(model[2])
    return fully_shard(model)


def make_data():
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 12, generator=gen)
    return x, torch.sin(x @ torch.randn(12, 4, generator=gen))


def loss_of(model, log_scale, x, y):
    return F.mse_loss(model(x) * log_scale.exp(), y)


@torch.no_grad()
def update(model, params, velocity, rate, trial):
    """One step along the momentum, half as long if the loss of the batch would grow."""
    before = trial()
    model.reshard()  # a forward without backward leaves the root gathered
    for v, p in zip(velocity, params, strict=False):
        v.mul_(0.8).add_(p.grad)
        p.sub_(rate * v)
    if trial() > before:
        for v, p in zip(velocity, params, strict=False):
            p.add_(0.5 * rate * v)
    model.reshard()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    log_scale = nn.Parameter(torch.zeros(()))
    params = [*model.parameters(), log_scale]
    velocity = [torch.zeros_like(p) for p in params]
    average, begin = Average(model.parameters()), 0
    if args.resume:
        state = torch.load(max(glob.glob(os.path.join(args.resume, "*.pt"))))
        set_model_state_dict(model, state["model"], options=WHOLE)
        for v, whole in zip(velocity[:-1], state["velocity"], strict=False):
            v.copy_(distribute_tensor(whole, v.device_mesh, v.placements))
        velocity[-1].copy_(state["velocity"][-1])
        log_scale.data.copy_(state["log_scale"])
        average.restore(state["average"])
        begin = state["step"]

    x, y = make_data()
    for step in range(begin, STEPS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))
        mine = order[:GLOBAL_BATCH].chunk(world)[rank]
        model.zero_grad()
        log_scale.grad = None
        loss_of(model, log_scale, x[mine], y[mine]).backward()
        dist.all_reduce(log_scale.grad)
        log_scale.grad /= world

        def trial(mine=mine):
            value = loss_of(model, log_scale, x[mine], y[mine])
            dist.all_reduce(value)
            return value.item() / world

        update(model, params, velocity, 0.1, trial)
        average.update()
        if rank == 0:
            print(f"step {step + 1} scale {log_scale.exp().item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            state = {
                "model": get_model_state_dict(model, options=WHOLE),
                "velocity": [*(v.full_tensor() for v in velocity[:-1]), velocity[-1]],
                "log_scale": log_scale.detach(),
                "average": average.state(),
                "step": step + 1,
            }
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                path = os.path.join(args.out, f"step_{step + 1:06d}")
                torch.save(state, path)
                os.replace(path, path + ".pt")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
