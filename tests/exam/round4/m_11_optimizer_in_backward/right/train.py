"""One small optimizer per parameter, stepped from inside the backward: no gradient outlives its layer."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=16):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Linear(tokens, tokens)
        self.ch = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Net(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.inp = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x.mean(1))


class InBackward:
    """AdamW per parameter, run by the hook that fires once the reduced gradient is in place."""

    def __init__(self, model, lr):
        self.params = dict(model.named_parameters())
        self.opts = {n: torch.optim.AdamW([p], lr=lr, eps=1e-6, weight_decay=0.01 if p.ndim > 1 else 0.0)
                     for n, p in self.params.items()}
        self.fired = 0
        for n, p in self.params.items():
            p.register_post_accumulate_grad_hook(self._hook(n))

    def _hook(self, name):
        def run(p):
            self.opts[name].step()
            p.grad = None
            self.fired += 1
        return run

    def set_lr(self, lr):
        for o in self.opts.values():
            o.param_groups[0]["lr"] = lr

    def slots(self):
        out = {}
        for n, p in self.params.items():
            st = self.opts[n].state[p]
            if not st:
                st.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            out[n] = st
        return out


def pack(model, inb, step):
    params = {n: p.detach() for n, p in model.named_parameters()}
    return {"params": params, "slots": {n: dict(s) for n, s in inb.slots().items()}, "step": torch.tensor(step)}


def make_batch(step, size, rank, world):
    g = torch.Generator().manual_seed(31 * step + 5)
    x = torch.randn(size, 6, 4, generator=g)
    y = (x[:, 0, 0] > 0).long() + 2 * (x[:, 3, 1] > 0).long() + 4 * (x[:, 5].sum(1) > 0).long()
    s = slice(rank * size // world, (rank + 1) * size // world)
    return x[s], y[s]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = Net()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    inb = InBackward(model, 1e-2)

    step = 0
    if args.resume:
        blob = pack(model, inb, 0)
        dcp.load(blob, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
        for n, s in blob["slots"].items():
            inb.slots()[n].update(s)
        step = int(blob["step"])

    while step < (args.stop_at or args.steps):
        inb.set_lr(1e-2 * min(1, (step + 1) / 4) * (1 - 0.5 * step / args.steps))
        x, y = make_batch(step, args.batch, rank, world)
        loss = F.cross_entropy(model(x), y)
        inb.fired = 0
        loss.backward()
        assert inb.fired == len(inb.params)
        step += 1
        t = loss.detach() / world
        dist.all_reduce(t)
        if rank == 0:
            print(f"step {step} loss {t.item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(pack(model, inb, step), checkpoint_id=f"{args.out}/{step:06d}")

    full = {n: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
    if rank == 0 and args.export:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
