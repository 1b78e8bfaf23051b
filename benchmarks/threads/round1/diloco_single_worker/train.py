"""DiLoCo worker: momentum-SGD inner steps on an FSDP2 model, Nesterov outer step every H steps.

One worker spans all ranks of the job; without peers the outer gradient is its own.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, DIM = 40, 20, 32


class CausalBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.w1 = nn.Linear(DIM, 2 * DIM)
        self.w2 = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, DIM // 2)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.w2(F.silu(self.w1(self.norm2(x))))


class TinyLlama(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(0.02 * torch.randn(SEQ, DIM))
        self.blocks = nn.ModuleList(CausalBlock() for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OuterOptimizer:
    """Nesterov SGD on the movement of the weights over a round of inner steps."""

    def __init__(self, params, lr, momentum):
        self.params = list(params)
        self.anchor = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(p) for p in self.anchor]
        self.lr, self.momentum = lr, momentum

    @torch.no_grad()
    def step(self):
        for p, anchor, velocity in zip(self.params, self.anchor, self.velocity):
            pseudo_grad = anchor - p
            velocity.mul_(self.momentum).add_(pseudo_grad)
            anchor.sub_(self.lr * (pseudo_grad + self.momentum * velocity))
            p.copy_(anchor)


@torch.no_grad()
def clip_gradients(model, max_norm):
    # works on the shards directly: one fused norm and one fused scaling per step
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    grads = [g for g in grads if g.numel()]
    norm = nn.utils.get_total_norm(grads)
    square = norm.square()
    dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def tokens(step, batch):
    g = torch.Generator().manual_seed(600_000 + step)
    a = torch.randint(1, 4, (batch, 1), generator=g)
    start = torch.randint(VOCAB, (batch, 1), generator=g)
    noise = (torch.rand(batch, SEQ + 1, generator=g) < 0.05).long()
    return (start + a * torch.arange(SEQ + 1) + noise) % VOCAB


def lr_at(step, args):
    warm = min(1.0, (step + 1) / args.warmup)
    return args.lr * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--local-steps", type=int, default=8)
    ap.add_argument("--total-batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--warmup", type=int, default=3)
    ap.add_argument("--outer-lr", type=float, default=0.7)
    ap.add_argument("--max-norm", type=float, default=0.25)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(42)
    model = TinyLlama().to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    outer = OuterOptimizer(model.parameters(), lr=args.outer_lr, momentum=0.9)

    n = args.total_batch_size // world
    for step in range(args.steps):
        for group in inner.param_groups:
            group["lr"] = lr_at(step, args)
        ids = tokens(step, args.total_batch_size)[rank * n : (rank + 1) * n].to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = clip_gradients(model, args.max_norm)
        inner.step()
        inner.zero_grad()
        if (step + 1) % args.local_steps == 0:
            outer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} ppl {math.exp(mean.item()):.3f} norm {norm.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
