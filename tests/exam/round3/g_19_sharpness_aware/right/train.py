"""Sharpness-aware fine-tuning (two passes per step) with embedding noise; the noise belongs to the example, not to the rank.
Checkpoints alternate between two slots, a small text file names the good one."""

import argparse
import json
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, T, BATCH = 28, 24, 12, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(DIM), nn.Conv1d(DIM, 2 * DIM, 4)
        self.out = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        h = self.conv(F.pad(self.norm(x).transpose(1, 2), (3, 0))).transpose(1, 2)
        return x + self.out(F.silu(h))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, noise):
        x = self.emb(ids) + noise
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def example(index):
    g = torch.Generator().manual_seed(index)
    a, b = torch.randint(0, VOCAB, (2,), generator=g)
    ids = (a + (1 + b % 3) * torch.arange(T + 1)) % VOCAB
    noise = (torch.rand(T, DIM, generator=g) * 2 - 1) * 5 / (T * DIM) ** 0.5
    return ids, noise


def perturb(params, rho):
    """moves the weights uphill by rho in the direction of the gradient over all ranks; returns the way back"""
    grads = [p.grad for p in params]
    norm = nn.utils.get_total_norm(grads)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    moves = [g * (rho / (norm.item() + 1e-12)) for g in grads]
    with torch.no_grad():
        for p, m in zip(params, moves):
            p.add_(m)

    def undo():
        with torch.no_grad():
            for p, m in zip(params, moves):
                p.sub_(m)

    return undo


class Slots:
    def __init__(self, root):
        self.root, self.turn = root, 0

    def save(self, state, step):
        slot = "AB"[self.turn % 2]
        self.turn += 1
        path = os.path.join(self.root, slot)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        dcp.save(state, checkpoint_id=path)
        if dist.get_rank() == 0:
            with open(os.path.join(self.root, "latest.json.tmp"), "w") as f:
                json.dump({"slot": slot, "step": step}, f)
            os.replace(os.path.join(self.root, "latest.json.tmp"), os.path.join(self.root, "latest.json"))
        dist.barrier()

    @staticmethod
    def latest(root):
        with open(os.path.join(root, "latest.json")) as f:
            info = json.load(f)
        return os.path.join(root, info["slot"]), info["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    model = LM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.3, momentum=0.9, nesterov=True)
    first, slots = 0, Slots(args.out)
    if args.resume:
        path, first = Slots.latest(args.resume)
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    for step in range(first, args.steps):
        ids, noise = (torch.stack(t) for t in zip(*(example(step * BATCH + i) for i in range(rank, BATCH, world))))

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[:, :-1], noise).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            return loss.detach()

        flat = closure()
        undo = perturb(params, args.rho)
        sharp = closure()
        undo()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        shown = torch.stack([flat, sharp]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown[0]:.4f} at the perturbed weights {shown[1]:.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            slots.save({"model": m, "optim": o}, step + 1)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
