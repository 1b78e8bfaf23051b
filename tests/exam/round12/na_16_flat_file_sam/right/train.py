"""CTC phoneme recogniser, trained with sharpness-aware steps (two passes a step, the second at the raised weights).

Checkpoint: weights.bin is one flat float32 file of all tensors in full; every rank writes the rows it owns at their offsets."""
import argparse
import json
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, fully_shard

PHONES, BINS, FRAMES = 10, 12, 24


class Recogniser(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.inp = nn.Conv1d(BINS, d, 3, padding=1)
        self.mid = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d, bias=False)) for _ in range(2))
        self.out = nn.Linear(d, PHONES + 1, bias=False)

    def forward(self, mel):
        x = self.inp(mel.transpose(1, 2)).transpose(1, 2)
        for m in self.mid:
            x = x + m(x)
        return self.out(x)


def utterances(step, n):
    """Phones as bumps in the spectrum, 3 to 6 in an utterance."""
    g = torch.Generator().manual_seed(600 + step)
    length = torch.randint(3, 7, (n,), generator=g)
    phones = torch.randint(1, PHONES + 1, (n, 6), generator=g)
    mel = 0.15 * torch.randn(n, FRAMES, BINS, generator=g)
    for i in range(n):
        for j in range(int(length[i])):
            mel[i, 4 * j:4 * j + 3, phones[i, j]] += 1.0
    return mel, phones, length


class SAM:
    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho
        self.moved = []

    @torch.no_grad()
    def climb(self):
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.params]).full_tensor()
        for p in self.params:
            e = p.grad * (self.rho / (norm.item() + 1e-12))
            self.moved.append(p.detach().clone())
            p.add_(e)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, home in zip(self.params, self.moved):
            p.copy_(home)
        self.moved.clear()
        self.base.step()
        self.base.zero_grad()


class FlatFile:
    """Tensors one after the other; a rank owns whole rows (dim 0) of a tensor."""

    def __init__(self, model, opt):
        self.table, at = [], 0
        for name, p in model.named_parameters():
            for part in ("w", "v"):
                self.table.append((name, part, p, at))
                at += p.numel()
        self.size, self.opt = at, opt

    def rows(self, p):
        per = -(-p.shape[0] // dist.get_world_size())
        width = p.numel() // p.shape[0]
        return min(dist.get_rank() * per, p.shape[0]) * width

    def tensor(self, part, p):
        if part == "w":
            return p.detach().to_local()
        state = self.opt.state[p]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p.detach())
        return state["momentum_buffer"].to_local()

    def write(self, folder, step):
        path = os.path.join(folder, f"weights_{step}.bin")
        if dist.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)
            np.memmap(path, np.float32, "w+", shape=(self.size,)).flush()
        dist.barrier()
        disk = np.memmap(path, np.float32, "r+", shape=(self.size,))
        for _, part, p, at in self.table:
            local = self.tensor(part, p)
            lo = at + self.rows(p)
            disk[lo:lo + local.numel()] = local.reshape(-1).numpy()
        disk.flush()
        dist.barrier()
        if dist.get_rank() == 0:
            index = {"step": step, "tensors": [[n, part, at, list(p.shape)] for n, part, p, at in self.table]}
            with open(os.path.join(folder, "index.json"), "w") as f:
                json.dump(index, f)
        dist.barrier()

    def read(self, folder):
        try:
            with open(os.path.join(folder, "index.json")) as f:
                step = json.load(f)["step"]
        except FileNotFoundError:
            return 0
        disk = np.memmap(os.path.join(folder, f"weights_{step}.bin"), np.float32, "r", shape=(self.size,))
        for _, part, p, at in self.table:
            local = self.tensor(part, p)
            lo = at + self.rows(p)
            local.copy_(torch.from_numpy(np.array(disk[lo:lo + local.numel()])).view_as(local))
        return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.08)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Recogniser()
    for m in model.mid:
        fully_shard(m)
    fully_shard(model)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)  # the loss has the global count below it already
            m.set_force_sum_reduction_for_comms(True)
    base = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9)
    sam = SAM(model.parameters(), base, a.rho)
    store = FlatFile(model, base)
    start = store.read(a.resume) if a.resume else 0

    per = a.batch // world
    for step in range(start, a.steps):
        mel, phones, length = utterances(step, a.batch)
        total = int(length.sum())
        sel = slice(rank * per, rank * per + per)
        mel, phones, length = mel[sel], phones[sel], length[sel]
        frames = torch.full((per,), FRAMES)

        def loss_of_batch():
            logp = model(mel).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(logp, phones, frames, length, reduction="sum") / total

        loss = loss_of_batch()
        loss.backward()
        sam.climb()
        loss_of_batch().backward()
        sam.descend()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 0 or step + 1 == a.steps):
            print(f"step {step + 1} loss {shown.item():.4f}", flush=True)
        if a.out and a.save_every and (step + 1) % a.save_every == 0:
            store.write(a.out, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
