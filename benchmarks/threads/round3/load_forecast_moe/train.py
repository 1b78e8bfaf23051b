# Electricity load forecasting with a small mixture of experts.
# Input: 24 hourly readings plus calendar features, output: the next 6 hours.
# The routers are trained with exploration noise; every noise slot is a separate
# random stream that belongs to a fixed part of the global batch.
#
# usage: torchrun --nproc_per_node N train.py [--save DIR] [--resume DIR]
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

HISTORY, HORIZON, CALENDAR = 24, 6, 4
SLOTS = 4


class RouterNoise:
    """Random streams for router exploration, one per slot of the global batch."""

    def __init__(self, slots, seed):
        self.streams = {slot: torch.Generator().manual_seed(seed + 1024 + 100 * slot) for slot in slots}

    def draw(self, like):
        rows = like.shape[0] // len(self.streams)
        parts = [torch.randn(rows, like.shape[1], generator=g) for g in self.streams.values()]
        return torch.cat(parts).to(like)

    def entries(self):
        for slot, stream in self.streams.items():
            yield f"router_noise.{slot}", stream

    def state_dict(self):
        return {key: stream.get_state() for key, stream in self.entries()}

    def load_state_dict(self, state):
        for key, stream in self.entries():
            stream.set_state(state[key])


class MixtureLayer(nn.Module):
    def __init__(self, width, experts, noise, noise_scale):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.w_out = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)
        self.noise, self.noise_scale = noise, noise_scale

    def forward(self, x):
        h = self.norm(x)
        logits = self.router(h)
        if self.training:
            logits = logits + self.noise_scale * self.noise.draw(logits)
        top, index = logits.topk(2, dim=-1)
        gate = torch.zeros_like(logits).scatter(1, index, top.softmax(dim=-1))
        hidden = F.gelu(torch.einsum("bd,edf->ebf", h, self.w_in))
        out = torch.einsum("ebf,efd->ebd", hidden, self.w_out)
        return x + torch.einsum("be,ebd->bd", gate, out)


class Forecaster(nn.Module):
    def __init__(self, width, layers, experts, noise, noise_scale):
        super().__init__()
        self.encode = nn.Linear(HISTORY + CALENDAR, width)
        self.layers = nn.ModuleList(MixtureLayer(width, experts, noise, noise_scale) for _ in range(layers))
        self.decode = nn.Linear(width, HORIZON)

    def forward(self, x):
        h = self.encode(x)
        for layer in self.layers:
            h = layer(h)
        return self.decode(h)


def load_curves(step, batch, seed):
    """Households, offices and factories with weekly rhythm and weather influence."""
    g = torch.Generator().manual_seed(seed * 65537 + step)
    kind = torch.randint(0, 3, (batch, 1), generator=g)
    start = torch.randint(0, 168, (batch, 1), generator=g)
    weather = torch.randn(batch, 1, generator=g)
    hour = start + torch.arange(HISTORY + HORIZON)
    day = 2 * torch.pi * (hour % 24) / 24
    weekend = ((hour // 24) % 7 >= 5).float()
    home = 0.8 + 0.5 * torch.sin(day - 2.2) + 0.25 * torch.sin(2 * day) + 0.3 * weekend
    office = (torch.sin(day - 1.8).clamp_min(-0.2) + 0.4) * (1 - 0.8 * weekend)
    plant = 1.2 + 0.15 * torch.sin(3 * day) - 0.5 * weekend
    curve = torch.where(kind == 0, home, torch.where(kind == 1, office, plant))
    curve = curve * (1 + 0.15 * weather) + 0.04 * torch.randn(batch, HISTORY + HORIZON, generator=g)
    first = day[:, :1]
    calendar = torch.cat([first.sin(), first.cos(), weekend[:, :1], weather], dim=1)
    return torch.cat([curve[:, :HISTORY], calendar], dim=1), curve[:, HISTORY:]


def build_state(model, optimizer, noise, step):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "step": torch.tensor(step)}
    state.update(noise.state_dict())
    return state


def restore(path, model, optimizer, noise):
    state = build_state(model, optimizer, noise, 0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    noise.load_state_dict(state)
    return int(state["step"])


def train(args, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    assert SLOTS % world == 0 and args.batch % SLOTS == 0
    per_rank = SLOTS // world
    noise = RouterNoise(range(rank * per_rank, (rank + 1) * per_rank), args.seed)

    torch.manual_seed(args.seed)
    model = Forecaster(args.width, args.layers, args.experts, noise, args.noise_scale).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    first = restore(args.resume, model, optimizer, noise) if args.resume else 0
    for step in range(first, args.steps):
        x, y = load_curves(step, args.batch, args.seed)
        x, y = x.chunk(world)[rank].to(device), y.chunk(world)[rank].to(device)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        report = loss.detach().clone()
        dist.all_reduce(report)
        if rank == 0:
            print(f"step={step} mse={report.item() / world:.6f}", flush=True)
        if args.save and step + 1 == args.save_after:
            dcp.save(build_state(model, optimizer, noise, step + 1), checkpoint_id=args.save)


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--experts", type=int, default=4)
    p.add_argument("--noise-scale", type=float, default=1.0)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=31)
    p.add_argument("--save", default="", help="folder for the checkpoint")
    p.add_argument("--save-after", type=int, default=10, help="write it after this many steps")
    p.add_argument("--resume", default="", help="folder of a checkpoint to go on from")
    return p.parse_args()


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(cli(), torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()
