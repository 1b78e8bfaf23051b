"""Small language model trained with Muon on sharded matrices."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muon import MuonAdamW

VOCAB, CTX, BATCH, STEPS = 32, 16, 16, 18


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, dim=-1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.relu(self.up(self.n2(x))).square())


class LM(nn.Module):
    def __init__(self, dim=30, depth=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(CTX, dim))
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(step):
    """Sequences that repeat themselves after a random period."""
    g = torch.Generator().manual_seed(800 + step)
    period = torch.randint(3, 7, (BATCH, 1), generator=g)
    motif = torch.randint(0, VOCAB, (BATCH, 7), generator=g)
    ids = motif.gather(1, torch.arange(CTX + 1)[None] % period)
    return ids[:, :-1], ids[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    model = LM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    matrices = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    ids = {id(p) for p in matrices}
    opt = MuonAdamW(matrices, [p for p in model.parameters() if id(p) not in ids])

    start = 0
    if args.resume:
        mine = [f for f in os.listdir(args.resume) if f.endswith(f"-{rank}.pt")]
        newest = max(mine, key=lambda f: int(f.split("-")[0]))
        state = torch.load(os.path.join(args.resume, newest), weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        start = state["step"]

    for step in range(start, STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x[rank::world]).transpose(1, 2), y[rank::world])
        opt.zero_grad()
        loss.backward()
        for group in opt.param_groups:
            peak = 0.02 if group["kind"] == "muon" else 3e-3
            group["lr"] = peak * min(1.0, 2 * (1 - step / STEPS))
        opt.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            state = {"model": model.state_dict(), "opt": opt.state_dict(), "step": step + 1}
            torch.save(state, os.path.join(args.out, f"{step + 1}-{rank}.pt"))

    if args.export:
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
