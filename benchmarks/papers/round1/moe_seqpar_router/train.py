"""Switch-MLP language model with sequence parallelism.

Mesh (dp, tp). Outside the expert MLPs every tp rank works on its own stretch of the
sequence; the expert weights are cut over tp by hidden units, so their input is gathered
and their output reduce-scattered. Weights are sharded over dp by FSDP2.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def _reduce_scatter(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class GatherStretches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx, g):
        return _reduce_scatter(g, ctx.group), None


class ReduceStretches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, g):
        return _gather(g, ctx.group), None


class SwitchMLP(nn.Module):
    def __init__(self, dim, hidden, experts, group, gen):
        super().__init__()
        self.group = group
        n, r = dist.get_world_size(group), dist.get_rank(group)
        w1 = torch.randn(experts, hidden, dim, generator=gen) * dim ** -0.5
        w2 = torch.randn(experts, dim, hidden, generator=gen) * hidden ** -0.5
        self.router = nn.Linear(dim, experts, bias=False)
        self.router.sequence_parallel = True
        self.w1 = nn.Parameter(w1.chunk(n, 1)[r].clone())
        self.w2 = nn.Parameter(w2.chunk(n, 2)[r].clone())

    def forward(self, h):
        gate, choice = self.router(h).softmax(-1).max(-1)
        x = GatherStretches.apply(h, self.group)
        choice = _gather(choice, self.group)
        out = torch.zeros_like(x)
        for e in range(self.w1.shape[0]):
            pick = (choice == e).unsqueeze(-1)
            y = F.linear(F.gelu(F.linear(x, self.w1[e])), self.w2[e])
            out = out + torch.where(pick, y, 0.0)
        return ReduceStretches.apply(out, self.group) * gate.unsqueeze(-1)


class Mixer(nn.Module):
    """Causal average over all earlier positions, done on the gathered sequence."""

    def __init__(self, dim, group):
        super().__init__()
        self.group = group
        self.v = nn.Linear(dim, dim)
        self.v.sequence_parallel = True

    def forward(self, h, start, length):
        full = GatherStretches.apply(self.v(h), self.group)
        steps = torch.arange(1, full.shape[1] + 1, device=h.device).view(1, -1, 1)
        return (full.cumsum(1) / steps)[:, start:start + length]


class Block(nn.Module):
    def __init__(self, args, group, gen):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
        self.norm1.sequence_parallel = self.norm2.sequence_parallel = True
        self.mixer = Mixer(args.dim, group)
        self.mlp = SwitchMLP(args.dim, args.hidden, args.experts, group, gen)

    def forward(self, x, start):
        x = x + self.mixer(self.norm1(x), start, x.shape[1])
        return x + self.mlp(self.norm2(x))


class SwitchLM(nn.Module):
    def __init__(self, args, group, gen):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.blocks = nn.ModuleList(Block(args, group, gen) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab)
        for m in (self.embed, self.norm, self.head):
            m.sequence_parallel = True

    def forward(self, ids, start):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, start)
        return self.head(self.norm(x))


def sync_sequence_parallel_grads(model, group):
    """Weights that are repeated over tp but saw a part of the sequence: sum the parts."""
    for module in model.modules():
        if getattr(module, "sequence_parallel", False):
            for p in module.parameters(recurse=False):
                grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                dist.all_reduce(grad, group=group)


def batch(args, step):
    g = torch.Generator().manual_seed(4000 + step)
    period = torch.randint(2, 5, (args.batch, 1), generator=g)
    base = torch.randint(0, args.vocab, (args.batch, 5), generator=g)
    index = torch.arange(args.seq + 1).expand(args.batch, -1) % period
    ids = base.gather(1, index)
    return ids[:, :-1], ids[:, 1:]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=24)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--hidden", type=int, default=48)
    p.add_argument("--experts", type=int, default=4)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--seq", type=int, default=16)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=6e-3)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(dev.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    tp_group, tp_rank = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    dp_rank, dp = mesh["dp"].get_local_rank(), mesh["dp"].size()

    torch.manual_seed(6)
    model = SwitchLM(args, tp_group, torch.Generator().manual_seed(6)).to(dev)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    length, n = args.seq // tp, args.batch // dp
    start = tp_rank * length
    for step in range(1, args.steps + 1):
        ids, labels = (t[dp_rank * n:(dp_rank + 1) * n, start:start + length].to(dev) for t in batch(args, step))
        nll = F.cross_entropy(model(ids, start).flatten(0, 1), labels.flatten(), reduction="sum")
        loss = nll / (n * args.seq)
        loss.backward()
        sync_sequence_parallel_grads(model, tp_group)
        opt.step()
        opt.zero_grad()
        if step % 8 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step:3d} | loss {shown.item() / dp:.6f}", flush=True)

    model.reshard()
    router = model.blocks[0].mlp.router.weight.full_tensor()
    head = model.head.weight.full_tensor()
    if rank == 0:
        print(f"router {router.norm().item():.6f} head {head.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
