"""Mixture-of-experts language model: experts split over an "ep" mesh dimension, FSDP over "dp"."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--ep", type=int, default=2, help="ranks that share one set of experts (at most)")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=16, help="sequences per step over all data-parallel ranks")
    p.add_argument("--seq-len", type=int, default=16)
    p.add_argument("--vocab", type=int, default=32)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--experts", type=int, default=4)
    p.add_argument("--expert-hidden", type=int, default=24)
    p.add_argument("--shared-hidden", type=int, default=16)
    p.add_argument("--top-k", type=int, default=2)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--log-every", type=int, default=5)
    p.add_argument("--seed", type=int, default=20)
    return p.parse_args()


class ReduceFromGroup(torch.autograd.Function):
    """Sum over the group forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CopyToGroup(torch.autograd.Function):
    """Identity forward, sum over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class GroupedExperts(nn.Module):
    """The experts of this rank; all ranks draw the full set and keep their own."""

    def __init__(self, args, ep_mesh):
        super().__init__()
        self.first = ep_mesh.get_local_rank() * args.experts // ep_mesh.size()
        self.count = args.experts // ep_mesh.size()
        mine = slice(self.first, self.first + self.count)
        w1 = torch.randn(args.experts, args.dim, args.expert_hidden) * args.dim**-0.5
        w2 = torch.randn(args.experts, args.expert_hidden, args.dim) * args.expert_hidden**-0.5
        self.w1 = nn.Parameter(w1[mine].clone())
        self.w2 = nn.Parameter(w2[mine].clone())

    def forward(self, x, top_scores, selected):
        out = torch.zeros_like(x)
        for e in range(self.count):
            token, slot = (selected == self.first + e).nonzero(as_tuple=True)
            y = F.silu(x[token] @ self.w1[e]) @ self.w2[e]
            out = out.index_add(0, token, y * top_scores[token, slot, None])
        return out


class MoE(nn.Module):
    """Top-k routing with sigmoid scores, applied to the experts' outputs, and a shared expert."""

    def __init__(self, args, ep_mesh):
        super().__init__()
        self.top_k, self.group = args.top_k, ep_mesh.get_group()
        self.gate = nn.Linear(args.dim, args.experts, bias=False)
        self.experts = GroupedExperts(args, ep_mesh)
        self.shared = nn.Sequential(
            nn.Linear(args.dim, args.shared_hidden, bias=False), nn.SiLU(), nn.Linear(args.shared_hidden, args.dim, bias=False)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = torch.sigmoid(self.gate(tokens))
        top_scores, selected = scores.topk(self.top_k, dim=-1)
        top_scores = top_scores / (top_scores.sum(-1, keepdim=True) + 1e-9)
        routed_in = CopyToGroup.apply(tokens, self.group)
        top_scores = CopyToGroup.apply(top_scores, self.group)
        routed = ReduceFromGroup.apply(self.experts(routed_in, top_scores, selected), self.group)
        return (routed + self.shared(tokens)).view_as(x)


class Block(nn.Module):
    def __init__(self, args, ep_mesh):
        super().__init__()
        self.attn_norm, self.moe_norm = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.qkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.proj = nn.Linear(args.dim, args.dim, bias=False)
        self.moe = MoE(args, ep_mesh)

    def forward(self, x):
        q, k, v = self.qkv(self.attn_norm(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.moe(self.moe_norm(x))


class MoETransformer(nn.Module):
    def __init__(self, args, ep_mesh):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.pos = nn.Embedding(args.seq_len, args.dim)
        self.blocks = nn.ModuleList(Block(args, ep_mesh) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_batch(args, index):
    """Mixed "languages": each sequence follows one of four random successor tables."""
    tables = torch.stack([torch.randperm(args.vocab, generator=torch.Generator().manual_seed(50 + i)) for i in range(4)])
    g = torch.Generator().manual_seed(args.seed * 4001 + index)
    language = torch.randint(4, (args.batch,), generator=g)
    ids = [torch.randint(args.vocab, (args.batch,), generator=g)]
    for _ in range(args.seq_len):
        ids.append(tables[language, ids[-1]])
    return torch.stack(ids, 1)


def main():
    args = get_args()
    cuda = torch.cuda.is_available()
    device_type = "cuda" if cuda else "cpu"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    ep = min(args.ep, world)
    mesh = init_device_mesh(device_type, (world // ep, ep), mesh_dim_names=("dp", "ep"))
    dp_rank, dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()

    torch.manual_seed(args.seed)
    model = MoETransformer(args, mesh["ep"]).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5) * (1 - 0.8 * s / args.steps))

    def loss_of(index):
        ids = make_batch(args, index).chunk(dp_size)[dp_rank].to(device)
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def mean_over_ranks(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / world

    for step in range(1, args.steps + 1):
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = mean_over_ranks(loss)
        if rank == 0 and (step % args.log_every == 0 or step == 1):
            print(f"step {step:3d} loss {mean:.6f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)

    model.eval()
    with torch.no_grad():
        val = sum(mean_over_ranks(loss_of(10_000 + i)) for i in range(4)) / 4
    if rank == 0:
        print(f"validation loss {val:.6f} (dp {dp_size} x ep {ep})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
