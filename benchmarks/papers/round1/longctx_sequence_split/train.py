"""Long-context language model with the sequence split over a context-parallel group.

Each rank embeds and transforms its own stretch of the sequence; keys and values are
gathered over the group for attention. Parameters are sharded by FSDP2 over all ranks
(data x context), so gradient reduction covers both axes.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class GatherSequence(torch.autograd.Function):
    """Concatenate the stretches of all context ranks along dim 2; sum and cut in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        n, r = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(n, dim=2)[r].contiguous(), None


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.SiLU(), nn.Linear(3 * dim, dim))

    def forward(self, x, offset, group):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k, v = GatherSequence.apply(k, group), GatherSequence.apply(v, group)
        rows = torch.arange(offset, offset + t, device=x.device)
        visible = rows[:, None] >= torch.arange(k.shape[2], device=x.device)[None, :]
        att = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.out(att.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class LongLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ctx_len):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(ctx_len, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, offset, group):
        x = self.tok(ids) + self.pos.weight[offset: offset + ids.shape[1]]
        for layer in self.layers:
            x = layer(x, offset, group)
        return self.head(self.norm(x))


def documents(n, ctx_len, vocab, seed):
    """Sequences whose second half repeats the first: the model has to look far back."""
    g = torch.Generator().manual_seed(seed)
    half = torch.randint(1, vocab, (n, ctx_len // 2), generator=g)
    walk = (half[:, :1] + torch.cumsum(half % 3, 1)) % vocab
    seq = torch.cat([walk, walk, walk[:, :1]], 1)
    return seq[:, :-1], seq[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--context-parallel", type=int, default=0, help="0: two if the world is even")
    ap.add_argument("--ctx-len", type=int, default=32)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.15)
    ap.add_argument("--momentum", type=float, default=0.9)
    ap.add_argument("--vocab", type=int, default=32)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    cp_size = args.context_parallel or (2 if world % 2 == 0 else 1)
    mesh = init_device_mesh(device.type, (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    shard_mesh = mesh["dp", "cp"]._flatten("dp_cp")
    cp_group, cp_rank = mesh["cp"].get_group(), mesh["cp"].get_local_rank()
    dp_rank, dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()

    torch.manual_seed(23)
    model = LongLM(args.vocab, 32, 4, 2, args.ctx_len).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=shard_mesh)
    fully_shard(model, mesh=shard_mesh)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 8))

    n, t = args.batch // dp_size, args.ctx_len // cp_size
    offset = cp_rank * t

    def mine(pair):
        return (z[dp_rank * n:(dp_rank + 1) * n, offset:offset + t].to(device) for z in pair)

    def lm_loss(logits, labels):
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return nll.mean()

    for step in range(1, args.steps + 1):
        ids, labels = mine(documents(args.batch, args.ctx_len, args.vocab, 50 + step))
        loss = lm_loss(model(ids, offset, cp_group), labels)
        loss.backward()
        opt.step()
        warm.step()
        opt.zero_grad()
        if step % 8 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"[{step:3d}/{args.steps}] loss {shown.item() / world:.5f} lr {warm.get_last_lr()[0]:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        ids, labels = mine(documents(args.batch, args.ctx_len, args.vocab, 9_999))
        held = lm_loss(model(ids, offset, cp_group), labels)
    dist.all_reduce(held)
    model.reshard()
    size = model.head.weight.full_tensor().norm()
    if rank == 0:
        print(f"held-out {held.item() / world:.6f} |head| {size.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
