"""Large-batch image pretraining with LARS under FSDP2 (rotation prediction on made-up textures)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling; biases and norms are left unscaled."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            if not live:
                continue
            sq = torch.stack([torch.stack([local(p).square().sum(), local(p.grad).square().sum()]) for p in live])
            dist.all_reduce(sq)
            norms = sq.sqrt()
            for p, (wn, gn) in zip(live, norms):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                w, g, buf = local(p), local(p.grad), local(state["momentum_buffer"])
                scale = 1.0
                if p.ndim > 1:
                    g = g + group["weight_decay"] * w
                    scale = group["trust"] * wn / (gn + group["weight_decay"] * wn + 1e-8)
                buf.mul_(group["momentum"]).add_(g * scale * group["lr"])
                w.sub_(buf)


class Patchify(nn.Module):
    def __init__(self, dim, patch=4):
        super().__init__()
        self.proj = nn.Conv2d(1, dim, patch, patch)
        self.pos = nn.Parameter(torch.randn(1, 9, dim) * 0.1)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2) + self.pos


class Mixer(nn.Module):
    def __init__(self, dim, tokens=9):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Linear(16, tokens))
        self.chan = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chan(self.n2(x))


class RotNet(nn.Module):
    def __init__(self, dim=20, depth=2):
        super().__init__()
        self.patch = Patchify(dim)
        self.layers = nn.Sequential(*[Mixer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        return self.head(self.layers(self.patch(x)).mean(1))


def batch(step, size):
    g = torch.Generator().manual_seed(31 * step + 7)
    ramp = torch.linspace(-1, 1, 12)
    img = ramp[None, None, :, None] * (1 + torch.rand(size, 1, 1, 1, generator=g))
    img = img + 0.9 * torch.randn(size, 1, 12, 12, generator=g)
    rot = torch.randint(4, (size,), generator=g)
    return torch.stack([torch.rot90(im, int(k), (1, 2)) for im, k in zip(img, rot)]), rot


def pack(model, opt, sched):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o, "sched": sched.state_dict()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = RotNet()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = LARS(model.parameters(), a.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, a.lr, total_steps=a.steps + 1, cycle_momentum=False)
    begin = 0
    if a.resume:
        begin = max(int(d[2:]) for d in os.listdir(a.resume))
        state = pack(model, opt, sched)
        dcp.load(state, checkpoint_id=os.path.join(a.resume, f"s_{begin}"))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
    for step in range(begin, a.steps):
        x, r = (t.chunk(world)[rank] for t in batch(step, a.batch))
        logits = model(x)
        loss = F.cross_entropy(logits, r)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if rank == 0 and step % 5 == 4:
            print(f"{step + 1:4d} loss {loss.item():.4f} acc {(logits.argmax(1) == r).float().mean().item():.2f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(pack(model, opt, sched), checkpoint_id=os.path.join(a.out, f"s_{step + 1}"))
    if a.export:
        out = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(out, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
