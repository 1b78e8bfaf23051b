"""Large-batch training with LAMB written for FSDP2 shards."""

import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict as sdt
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al.). All element-wise work is done on the local shards."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            updates = []
            for p in params:
                st = self.state[p]
                if not st:
                    st["step"] = torch.zeros(())
                    st["exp_avg"] = torch.zeros_like(p)
                    st["exp_avg_sq"] = torch.zeros_like(p)
                st["step"] += 1
                t = st["step"].item()
                w, g, m, v = (local(x) for x in (p, p.grad, st["exp_avg"], st["exp_avg_sq"]))
                m.lerp_(g, 1 - b1)
                v.lerp_(g * g, 1 - b2)
                u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                updates.append(u + group["weight_decay"] * w)
            sq = torch.stack(
                [torch.stack((local(p).square().sum(), u.square().sum())) for p, u in zip(params, updates)]
            )
            dist.all_reduce(sq)
            norms = sq.sqrt()
            for p, u, (wn, un) in zip(params, updates, norms.tolist()):
                ratio = min(wn / un, 10.0) if wn > 0 and un > 0 else 1.0
                local(p).sub_(u, alpha=group["lr"] * ratio)


class Mixer(nn.Module):
    def __init__(self, seq, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Linear(seq, seq)
        self.ch1, self.ch2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch2(F.gelu(self.ch1(self.n2(x))))


class Net(nn.Module):
    def __init__(self, seq=8, feat=6, dim=24, classes=5):
        super().__init__()
        self.inp = nn.Linear(feat, dim)
        self.layers = nn.ModuleList(Mixer(seq, dim) for _ in range(2))
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


def dataset(n=1536):
    g = torch.Generator().manual_seed(21)
    x = torch.randn(n, 8, 6, generator=g)
    y = (x.cumsum(1)[:, -1] @ torch.randn(6, 5, generator=g)).argmax(1)
    return x, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = Lamb(model.parameters(), lr=2e-2)

    def snapshot():
        m, o = sdt.get_state_dict(model, opt)
        return {"model": m, "optimizer": o}

    first = 0
    if args.resume:
        path = max(args.resume.glob("step_*"), key=lambda p: int(p.name[5:]))
        snap = snapshot()
        dcp.load(snap, checkpoint_id=path)
        sdt.set_state_dict(model, opt, model_state_dict=snap["model"], optim_state_dict=snap["optimizer"])
        first = int(path.name[5:])

    x, y = dataset()
    for step in range(first, args.steps):
        for group in opt.param_groups:
            group["lr"] = 2e-2 * min(1.0, (step + 1) / 5)
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(len(x), (args.batch,), generator=g)[rank::world]
        loss = F.cross_entropy(model(x[ids]), y[ids])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=args.out / f"step_{step + 1}")
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)

    if args.export:
        opts = sdt.StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = sdt.get_model_state_dict(model, options=opts)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
