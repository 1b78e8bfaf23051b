"""Small GPT pre-training, Megatron-style tensor parallel layers + FSDP2 over the data ranks.

bf16-style optimizer flow: gradients are copied to fp32 main gradients, the global norm is
taken over the whole model once, then clipping and the Adam update run on the main weights.
"""
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class Config:
    vocab: int = 48
    dim: int = 32
    heads: int = 4
    layers: int = 2
    seq: int = 16
    global_batch: int = 8
    steps: int = 36
    warmup: int = 6
    lr: float = 6e-3
    clip: float = 0.5
    seed: int = 3


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ColumnLinear(nn.Module):
    def __init__(self, full, group):
        super().__init__()
        self.group = group
        n, r = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(full.chunk(n, 0)[r].clone())

    def forward(self, x):
        return F.linear(_CopyIn.apply(x, self.group), self.weight)


class RowLinear(nn.Module):
    def __init__(self, full, group):
        super().__init__()
        self.group = group
        n, r = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(full.chunk(n, 1)[r].clone())

    def forward(self, x):
        return _ReduceOut.apply(F.linear(x, self.weight), self.group)


class Block(nn.Module):
    def __init__(self, cfg, group, gen):
        super().__init__()
        d, tp = cfg.dim, dist.get_world_size(group)
        w = lambda o, i: torch.randn(o, i, generator=gen) / math.sqrt(i)
        self.local_heads = cfg.heads // tp
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v = (ColumnLinear(w(d, d), group) for _ in range(3))
        self.proj = RowLinear(w(d, d), group)
        self.up = ColumnLinear(w(4 * d, d), group)
        self.down = RowLinear(w(d, 4 * d), group)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.ln1(x)
        q, k, v = (m(h).view(b, t, self.local_heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, cfg, group, gen):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.seq, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg, group, gen) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.out(self.norm(x))


class MainOptimizer:
    """Adam with clipping by the global norm; knows which tensors tp splits and which it repeats."""

    def __init__(self, model, cfg, mesh, split_names):
        self.params = list(model.named_parameters())
        self.split = split_names
        self.skip_in_norm = set()
        self.clip = cfg.clip
        self.mesh = mesh
        self.tp_rank = mesh["tp"].get_local_rank()
        self.adam = torch.optim.Adam([p for _, p in self.params], lr=cfg.lr, betas=(0.9, 0.95))

    @staticmethod
    def _local(t):
        return t.to_local() if isinstance(t, DTensor) else t

    def grads_for_norm(self, for_clipping=False):
        grads = []
        for name, p in self.params:
            if p.grad is None:
                continue
            if not for_clipping:
                if name in self.skip_in_norm:
                    continue
                # a repeated tensor enters the norm once
                if not (self.tp_rank == 0 or name in self.split):
                    continue
            grads.append(self._local(p.grad))
        return grads

    def grad_norm(self):
        total = sum(g.float().pow(2).sum() for g in self.grads_for_norm())
        dist.all_reduce(total, group=self.mesh["dp"].get_group())
        dist.all_reduce(total, group=self.mesh["tp"].get_group())
        return total.sqrt()

    def step(self):
        norm = self.grad_norm()
        if self.clip > 0:
            scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            for g in self.grads_for_norm(for_clipping=True):
                g.mul_(scale)
        self.adam.step()
        self.adam.zero_grad()
        return norm.item()


def sample(cfg, step):
    g = torch.Generator().manual_seed(7_000 + step)
    start = torch.randint(0, cfg.vocab, (cfg.global_batch, 1), generator=g)
    stride = torch.randint(1, 4, (cfg.global_batch, 1), generator=g)
    seq = (start + stride * torch.arange(cfg.seq + 1)) % cfg.vocab
    noise = torch.rand(seq.shape, generator=g) < 0.05
    seq = torch.where(noise, torch.randint(0, cfg.vocab, seq.shape, generator=g), seq)
    return seq[:, :-1], seq[:, 1:]


def main():
    cfg = Config()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(dev.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(cfg.seed)
    model = GPT(cfg, mesh["tp"].get_group(), torch.Generator().manual_seed(cfg.seed)).to(dev)
    split = {n for n, p in model.named_parameters() if n.split(".")[-2] in ("q", "k", "v", "proj", "up", "down")}
    for b in model.blocks:
        fully_shard(b, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    opt = MainOptimizer(model, cfg, mesh, split)
    sched = torch.optim.lr_scheduler.LambdaLR(opt.adam, lambda s: min(1.0, (s + 1) / cfg.warmup))

    dp_rank, dp = mesh["dp"].get_local_rank(), mesh["dp"].size()
    n = cfg.global_batch // dp
    for step in range(cfg.steps):
        x, y = (t[dp_rank * n:(dp_rank + 1) * n].to(dev) for t in sample(cfg, step))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = opt.step()
        sched.step()
        if (step + 1) % 6 == 0:
            dist.all_reduce(loss.detach_(), group=mesh["dp"].get_group())
            if rank == 0:
                print(f"iter {step + 1:3d} | lm loss {loss.item() / dp:.5f} | grad norm {norm:.4f}", flush=True)

    model.reshard()
    ln = model.blocks[0].ln1.weight.full_tensor()
    out = model.out.weight.full_tensor()
    if rank == 0:
        print(f"final | ln1 norm {ln.norm().item():.6f} | out norm {out.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
