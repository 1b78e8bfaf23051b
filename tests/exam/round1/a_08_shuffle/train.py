"""Instruction tuning of a small LM: several epochs over a shuffled set of (prompt, answer) pairs, loss on the answer only.

torchrun --standalone --nproc-per-node 2 train.py --epochs 4 --save-every 5 --out ckpt
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, SEP, LEN = 26, 25, 13


class GRULayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.gru(self.norm(x))[0]
        return x + self.ff(x)


class Seq(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList([GRULayer(dim), GRULayer(dim)])
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def make_pairs(n=160, seed=4):
    """Prompt: 6 letters; answer: each letter moved on by three."""
    rnd = random.Random(seed)
    rows, labels = [], []
    for _ in range(n):
        prompt = [rnd.randrange(0, 8) for _ in range(6)]
        answer = [(c + 3) % 25 for c in prompt]
        row = prompt + [SEP] + answer
        rows.append(row[:-1])
        labels.append([-100] * 6 + row[7:])
    return torch.tensor(rows), torch.tensor(labels)


class ShuffledSampler:
    """Every epoch a new order, the same on all ranks; rank r takes every world-th index of it."""

    def __init__(self, n, batch, rank, world, seed):
        self.n, self.batch, self.rank, self.world, self.seed = n, batch, rank, world, seed
        self.per_epoch = n // batch

    def order(self, epoch):
        rnd = random.Random(f"shuffle-{self.seed}-{epoch}")
        order = list(range(self.n))
        rnd.shuffle(order)
        return order

    def epoch(self, epoch, skip=0):
        order = self.order(epoch)
        for b in range(skip, self.per_epoch):
            yield order[b * self.batch : (b + 1) * self.batch][self.rank :: self.world]


def save_checkpoint(folder, model, opt, epoch, batch, step):
    model_sd, opt_sd = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        name = os.path.join(folder, f"{step:06d}.pt")
        torch.save({"model": model_sd, "opt": opt_sd, "epoch": epoch, "batch": batch, "step": step}, name + ".part")
        os.rename(name + ".part", name)
    dist.barrier()


def load_checkpoint(folder, model, opt):
    name = sorted(f for f in os.listdir(folder) if f.endswith(".pt"))[-1]
    ck = torch.load(os.path.join(folder, name), map_location="cpu", weights_only=True)
    set_state_dict(
        model,
        opt,
        model_state_dict=ck["model"],
        optim_state_dict=ck["opt"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck["epoch"], ck["batch"], ck["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    rows, labels = make_pairs()
    torch.manual_seed(args.seed)
    model = Seq()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    sampler = ShuffledSampler(len(rows), args.batch, rank, world, args.seed)
    epoch, batch, step = load_checkpoint(args.resume, model, opt) if args.resume else (0, 0, 0)

    while epoch < args.epochs:
        for idx in sampler.epoch(epoch, skip=batch):
            logits = model(rows[idx])
            loss = F.cross_entropy(logits.flatten(0, 1), labels[idx].flatten(), ignore_index=-100)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            batch, step = batch + 1, step + 1
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {shown.item():.4f}", flush=True)
            if args.save_every and step % args.save_every == 0:
                save_checkpoint(args.out, model, opt, epoch, batch, step)
        epoch, batch = epoch + 1, 0

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
