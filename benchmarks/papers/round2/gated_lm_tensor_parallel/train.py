"""Language model with SwiGLU blocks, tensor parallel x data parallel.

The two input projections of an MLP share their input, so they are one autograd function:
its backward needs a single all-reduce of the input gradient over tp, which runs while
the weight gradients are computed. Everything is sharded over dp by FSDP2.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class GatedColumns(torch.autograd.Function):
    """x @ gate.T and x @ up.T with the weights cut by rows over the group."""

    @staticmethod
    def forward(ctx, x, gate, up, group):
        ctx.save_for_backward(x, gate, up)
        ctx.group = group
        return F.linear(x, gate), F.linear(x, up)

    @staticmethod
    def backward(ctx, g_gate, g_up):
        x, gate, up = ctx.saved_tensors
        flat = x.flatten(0, -2)
        g_gate, g_up = g_gate.flatten(0, -2), g_up.flatten(0, -2)

        grad_x = g_gate @ gate
        grad_x.addmm_(g_up, up)
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_gate = g_gate.t() @ flat
        grad_up = g_up.t() @ flat
        work.wait()
        return grad_x.view_as(x), grad_gate, grad_up, None


class SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden, tp_mesh, gen):
        super().__init__()
        self.group = tp_mesh.get_group()
        n, r = tp_mesh.size(), tp_mesh.get_local_rank()
        draw = lambda o, i: torch.randn(o, i, generator=gen) * i ** -0.5
        self.gate = nn.Parameter(draw(hidden, dim).chunk(n, 0)[r].clone())
        self.up = nn.Parameter(draw(hidden, dim).chunk(n, 0)[r].clone())
        self.down = nn.Parameter(draw(dim, hidden).chunk(n, 1)[r].clone())

    def forward(self, x):
        a, b = GatedColumns.apply(x, self.gate, self.up, self.group)
        return SumOverGroup.apply(F.linear(F.silu(a) * b, self.down), self.group)


class Block(nn.Module):
    """Short causal convolution, then SwiGLU."""

    def __init__(self, args, tp_mesh, gen):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.conv = nn.Conv1d(args.dim, args.dim, 4, groups=args.dim)
        self.mlp = SwiGLU(args.dim, args.hidden, tp_mesh, gen)

    def forward(self, x):
        h = F.pad(self.norm1(x).transpose(1, 2), (3, 0))
        x = x + self.conv(h).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class ConvLM(nn.Module):
    def __init__(self, args, tp_mesh, gen):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.blocks = nn.ModuleList(Block(args, tp_mesh, gen) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(args, step, seed=0):
    """Second-order sequences: a token depends on the two before it."""
    g = torch.Generator().manual_seed(seed + step)
    ids = torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=g)
    flip = torch.rand(ids.shape, generator=g) < 0.1
    for t in range(2, args.seq + 1):
        ids[:, t] = torch.where(flip[:, t], ids[:, t], (ids[:, t - 1] + 2 * ids[:, t - 2]) % args.vocab)
    return ids[:, :-1], ids[:, 1:]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=8)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--hidden", type=int, default=64)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--seq", type=int, default=16)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--lr", type=float, default=8e-3)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(dev.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    dp, dp_rank = mesh["dp"].size(), mesh["dp"].get_local_rank()

    torch.manual_seed(13)
    model = ConvLM(args, mesh["tp"], torch.Generator().manual_seed(14)).to(dev)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=8)

    n = args.batch // dp
    own = slice(dp_rank * n, (dp_rank + 1) * n)

    def mean_over_dp(t):
        dist.all_reduce(t, group=mesh["dp"].get_group())
        return t.item() / dp

    for step in range(1, args.steps + 1):
        ids, labels = (t[own].to(dev) for t in batch(args, step))
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        if step % 12 == 0:
            shown = mean_over_dp(loss.detach().clone())
            with torch.no_grad():
                ids, labels = (t[own].to(dev) for t in batch(args, 0, seed=50_000))
                test = mean_over_dp(F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()))
            if rank == 0:
                print(f"step {step:3d} | loss {shown:.5f} | test {test:.5f}", flush=True)

    model.reshard()
    embed = model.embed.weight.full_tensor()
    if rank == 0:
        print(f"embedding norm {embed.norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
