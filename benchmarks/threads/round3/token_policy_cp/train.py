"""Clipped policy-gradient update of a small causal transformer on stored rollouts.

Rollouts come from a fixed behaviour policy (a random Markov chain); a sequence is
rewarded for following a hidden successor rule.  Ranks form a (dp, cp) grid: whole
sequences are spread over dp, the positions of a sequence over cp.

    torchrun --nproc_per_node 2 train.py --cp 2
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_rollouts(num, length, vocab, group, seed):
    g = torch.Generator().manual_seed(seed)
    chain = torch.softmax(torch.randn(vocab, vocab, generator=g), dim=-1)
    rule = torch.randperm(vocab, generator=g)
    tokens = torch.empty(num, length + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, vocab, (num,), generator=g)
    for t in range(length):
        tokens[:, t + 1] = torch.multinomial(chain[tokens[:, t]], 1, generator=g).squeeze(1)
    old_logp = chain[tokens[:, :-1], tokens[:, 1:]].log()
    hits = (rule[tokens[:, :-1]] == tokens[:, 1:]).float()
    reward = hits.sum(1).view(-1, group)
    adv = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    return {"tokens": tokens, "old_logp": old_logp, "adv": adv.view(-1), "hits": hits}


class GatherSequence(torch.autograd.Function):
    """Concatenate the position slices of all ranks of the group along dim 2."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.width = group, x.size(2)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        start = ctx.group.rank() * ctx.width
        return grad[:, :, start:start + ctx.width].contiguous(), None


class Attention(nn.Module):
    def __init__(self, dim, heads, cp_group):
        super().__init__()
        self.heads, self.cp_group = heads, cp_group
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        k, v = (GatherSequence.apply(z, self.cp_group) for z in (k, v))
        mask = positions[:, None] >= torch.arange(k.size(2), device=x.device)[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads, cp_group):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, cp_group)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x, positions):
        x = x + self.attn(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self, vocab, length, dim, depth, heads, cp_group):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, cp_group) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, positions):
        x = self.tok(tokens) + self.pos(positions)
        for layer in self.layers:
            x = layer(x, positions)
        return torch.log_softmax(self.head(self.norm(x)), dim=-1)


def sum_grads(model, group):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad.to_local(), group=group)


def clipped_objective(logp, old_logp, adv, eps=0.3):
    ratio = (logp - old_logp).exp()
    return -torch.min(ratio * adv, ratio.clamp(1 - eps, 1 + eps) * adv)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--cp", type=int, default=0, help="ranks per sequence (default: 2 when there is an even number of ranks)")
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=32)
    ap.add_argument("--vocab", type=int, default=12)
    ap.add_argument("--dim", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world = dist.get_world_size()
    cp = args.cp or (2 if world % 2 == 0 else 1)
    mesh = init_device_mesh(device.type, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    dp_rank, dp_size = mesh.get_local_rank("dp"), mesh["dp"].size()
    cp_rank, cp_group = mesh.get_local_rank("cp"), mesh.get_group("cp")

    torch.manual_seed(1234)
    policy = Policy(args.vocab, args.length, args.dim, 2, 4, cp_group).to(device)
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(policy, mesh=mesh["dp"])
    optim = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)

    data = make_rollouts(256, args.length, args.vocab, group=8, seed=5)
    span = args.length // cp
    cols = slice(cp_rank * span, (cp_rank + 1) * span)
    positions = torch.arange(args.length, device=device)[cols]

    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        rows = torch.randperm(256, generator=g)[: args.batch].chunk(dp_size)[dp_rank]
        inputs = data["tokens"][rows, :-1][:, cols].to(device)
        targets = data["tokens"][rows, 1:][:, cols].to(device)
        old_logp = data["old_logp"][rows][:, cols].to(device)
        adv = data["adv"][rows].to(device)[:, None]
        hits = data["hits"][rows][:, cols].to(device)

        logp = policy(inputs, positions).gather(-1, targets[..., None]).squeeze(-1)
        per_token = clipped_objective(logp, old_logp, adv) - 0.5 * hits * logp
        loss = per_token.sum() / (len(rows) * args.length)
        optim.zero_grad()
        loss.backward()
        sum_grads(policy, cp_group)
        optim.step()

        stats = torch.stack([loss.detach(), (hits * logp.detach()).sum(), hits.sum()])
        stats[1:] *= dp_size
        dist.all_reduce(stats)
        stats /= dp_size
        if dist.get_rank() == 0:
            print(f"step {step:2d} loss {stats[0].item():+.6f} rule logp {(stats[1] / stats[2]).item():.5f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
