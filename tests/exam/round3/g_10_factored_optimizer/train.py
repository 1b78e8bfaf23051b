"""Pre-training with an Adafactor-like optimizer: factored second moments and update clipping by RMS."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, DIM, CONTEXT = 32, 32, 16


def gathered(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


class FactoredRMS(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, decay=0.95, clip=1.0, eps=1e-12):
        super().__init__(params, dict(lr=lr, decay=decay, clip=clip, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.update(p, p.grad, self.state[p], group)

    def update(self, w, g, state, group):
        square = g * g + group["eps"]
        t = state["step"] = state.get("step", 0) + 1
        beta = min(group["decay"], 1 - 1 / (t + 1))
        if g.ndim == 2:
            # rank-one estimate of the second moment: one number per row, one per column
            row, col = gathered(square.mean(1)), gathered(square.mean(0))
            row = state["row"] = torch.lerp(row, state.get("row", row), beta)
            col = state["col"] = torch.lerp(col, state.get("col", col), beta)
            scale = (row / row.mean())[:, None] * col[None, :]
        else:
            scale = gathered(square)
            scale = state["square"] = torch.lerp(scale, state.get("square", scale), beta)
        u = gathered(g) * scale.rsqrt()
        u = u / max(1.0, (u.square().mean().sqrt() / group["clip"]).item())
        if isinstance(w, DTensor):
            u = DTensor.from_local(
                u, w.device_mesh, [torch.distributed.tensor.Replicate()], run_check=False
            ).redistribute(placements=w.placements)
        w.add_(u, alpha=-group["lr"])


class Block(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.w1, self.w2 = nn.Linear(DIM, 64, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.w2(F.gelu(self.w1(self.n2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(CONTEXT, DIM) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def batch(step, size):
    """Zipf-distributed starts, fixed successor table, 10 % random tokens"""
    table = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(step + 1)
    rows = [torch.multinomial(1.0 / torch.arange(1.0, VOCAB + 1), size, replacement=True, generator=g)]
    for _ in range(CONTEXT):
        jump = torch.rand(size, generator=g) < 0.1
        rows.append(torch.where(jump, torch.randint(0, VOCAB, (size,), generator=g), table[rows[-1]]))
    return torch.stack(rows, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = LM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = FactoredRMS(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / 5, (5 / (step + 1)) ** 0.5)
        rows = batch(step, args.batch)[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.4f}")

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
