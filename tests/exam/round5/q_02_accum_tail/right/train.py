"""Keyword spotting on made-up log-mel patches, gradient accumulation over micro-batches, FSDP2 on CPU."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

MELS, FRAMES, WORDS = 12, 16, 5


class ConvBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(2, c)
        self.dw = nn.Conv1d(c, c, 5, padding=2, groups=c)
        self.pw = nn.Conv1d(c, c, 1)

    def forward(self, x):
        return x + self.pw(F.gelu(self.dw(self.norm(x))))


class Spotter(nn.Module):
    def __init__(self, c=24, depth=2):
        super().__init__()
        self.inp = nn.Conv1d(MELS, c, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(c) for _ in range(depth))
        self.out = nn.Linear(c, WORDS)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x.mean(-1))


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(WORDS, MELS, FRAMES, generator=torch.Generator().manual_seed(7))
    y = torch.randint(WORDS, (n,), generator=g)
    shift = torch.randint(-2, 3, (n,), generator=g)
    x = torch.stack([proto[w].roll(int(s), -1) for w, s in zip(y, shift)])
    return x + 0.7 * torch.randn(x.shape, generator=g), y


def newest(folder):
    names = sorted(n for n in os.listdir(folder) if n.endswith(".pt"))
    return os.path.join(folder, names[-1])


def save(path, model, opt, step):
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(model, options=full),
        "optim": get_optimizer_state_dict(model, opt, options=full),
        "step": step,
    }
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def load(path, model, opt):
    state = torch.load(path, weights_only=False)
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=full)
    set_optimizer_state_dict(model, opt, state["optim"], options=full)
    return state["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24, help="optimizer steps")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--micro", type=int, default=8, help="global micro-batch")
    p.add_argument("--lr", type=float, default=3e-2)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume")
    p.add_argument("--export")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = Spotter()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9)

    x, y = make_data(80, seed=3)
    micros = len(y) // a.micro
    steps_per_epoch = math.ceil(micros / a.accum)
    step = load(newest(a.resume), model, opt) if a.resume else 0

    while step < a.steps:
        epoch = step // steps_per_epoch
        perm = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
        first = (step % steps_per_epoch) * a.accum
        for i in range(first, micros):
            window = min(a.accum, micros - i // a.accum * a.accum)
            boundary = (i + 1) % a.accum == 0 or i + 1 == micros
            model.set_requires_gradient_sync(boundary)
            idx = perm[i * a.micro : (i + 1) * a.micro][rank::world]
            loss = F.cross_entropy(model(x[idx]), y[idx])
            (loss / window).backward()
            if not boundary:
                continue
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if rank == 0 and step % 3 == 1:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if a.save_every and step % a.save_every == 0:
                save(os.path.join(a.out, f"step{step:06d}.pt"), model, opt, step)
            if step == a.steps:
                break

    if a.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
