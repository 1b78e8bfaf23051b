"""ANIL on sinusoid regression: the head is adapted per task in a differentiable inner loop, the body is shared and sharded."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

TASKS, SHOTS, QUERIES, FEAT = 8, 6, 6, 16
INNER_STEPS, INNER_LR = 3, 0.1


class Body(nn.Module):
    """Features, together with the initial head: it is a parameter like the others and is gathered with them."""

    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(1, width)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, FEAT), nn.Tanh())
        self.head_w = nn.Parameter(torch.zeros(FEAT))
        self.head_b = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.hidden(torch.tanh(self.inp(x))), self.head_w.clone(), self.head_b.clone()


def tasks(step):
    g = torch.Generator().manual_seed(7000 + step)
    amp = torch.rand(TASKS, 1, generator=g) * 1.5 + 0.5
    phase = torch.rand(TASKS, 1, generator=g) * 3.0
    x = torch.rand(TASKS, SHOTS + QUERIES, generator=g) * 6 - 3
    return x[..., None], amp * torch.sin(x + phase)


def predict(feat, w, b):
    return torch.einsum("tnf,tf->tn", feat, w) + b


def adapt(feat, y, w, b):
    n = feat.shape[0]
    w, b = w.expand(n, -1).clone(), b.expand(n, 1).clone()
    for _ in range(INNER_STEPS):
        inner = (predict(feat, w, b) - y).pow(2).mean(1).sum()
        gw, gb = torch.autograd.grad(inner, (w, b), create_graph=True)
        w, b = w - INNER_LR * gw, b - INNER_LR * gb
    return w, b


def save(path, model, opt, step):
    m, o = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"model": m, "opt": o, "step": step}, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def load(path, model, opt):
    s = torch.load(path, weights_only=True)
    set_state_dict(model, opt, model_state_dict=s["model"], optim_state_dict=s["opt"], options=StateDictOptions(full_state_dict=True))
    return s["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--meta-steps", type=int, default=15)
    p.add_argument("--ckpt", default="")
    p.add_argument("--save-at", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Body(32)
    fully_shard(model.hidden)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    path = os.path.join(a.ckpt, "anil.pt")
    start = load(path, model, opt) if a.resume else 0
    for step in range(start, a.meta_steps):
        x, y = tasks(step)
        x, y = x[rank::world], y[rank::world]
        feat, w0, b0 = model(x)
        w, b = adapt(feat[:, :SHOTS], y[:, :SHOTS], w0, b0)
        per_task = (predict(feat[:, SHOTS:], w, b) - y[:, SHOTS:]).pow(2).mean(1)
        loss = per_task.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % 2 == 0:
            print(f"meta step {step + 1} query loss after adaptation {shown.item():.5f}", flush=True)
        if step + 1 == a.save_at:
            save(path, model, opt, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
