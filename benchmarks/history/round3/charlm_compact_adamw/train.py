"""Character language model on generated arithmetic, trained with AdamW whose moments are kept in bfloat16 where they are large."""
import argparse
import math
import string

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

CHARS = string.ascii_letters + string.digits + "+-*/=() .,;"
STOI = {c: i for i, c in enumerate(CHARS)}


class CompactAdamW(Optimizer):
    """AdamW with low precision moments.

    Parameters with at least ``min_numel`` values have both moments in ``state_dtype``, the
    others in full precision. The update itself is always computed in float32.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-2,
                 state_dtype=torch.bfloat16, min_numel=8192):
        if lr < 0.0 or eps < 0.0:
            raise ValueError(f"Invalid lr {lr} or eps {eps}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.state_dtype = state_dtype
        self.min_numel = min_numel

    def _new_buffer(self, p):
        local_p = p.to_local() if isinstance(p, DTensor) else p
        dtype = self.state_dtype if p.numel() >= self.min_numel else torch.float32
        out = torch.zeros_like(local_p, dtype=dtype)
        if isinstance(p, DTensor):
            out = DTensor.from_local(out, p.device_mesh, p.placements, run_check=False,
                                     shape=p.shape, stride=p.stride())
        return out

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("Sparse gradient is not supported")
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = self._new_buffer(p)
                    state["exp_avg_sq"] = self._new_buffer(p)
                state["step"] += 1
                step = state["step"].item()
                grad = p.grad.float()

                # keep a high precision copy for the update
                exp_avg = state["exp_avg"].float().lerp(grad, 1 - beta1)
                exp_avg_sq = state["exp_avg_sq"].float().lerp(grad.square(), 1 - beta2)
                state["exp_avg"].copy_(exp_avg)
                state["exp_avg_sq"].copy_(exp_avg_sq)

                denom = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2 ** step)).add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(exp_avg, denom, value=-group["lr"] / (1 - beta1 ** step))
        return loss


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class CharLM(nn.Module):
    def __init__(self, vocab, dim=32, layers=2, heads=4, context=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.05)

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def expression(g):
    a, b = torch.randint(0, 100, (2,), generator=g).tolist()
    op = "+-*"[int(torch.randint(3, (1,), generator=g))]
    name = string.ascii_letters[int(torch.randint(52, (1,), generator=g))]
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    return f"{name} = ({a} {op} {b}) = {value}; "


def batch(step, count, rank, world_size, context, split):
    """Rows rank, rank + world_size, ... of the global batch of this step."""
    rows = []
    for i in range(rank, count, world_size):
        g = torch.Generator().manual_seed((split * 1_000_000 + step) * 1000 + i)
        text = ""
        while len(text) <= context:
            text += expression(g)
        rows.append([STOI[c] for c in text[: context + 1]])
    rows = torch.tensor(rows)
    return rows[:, :-1], rows[:, 1:]


def cosine(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    t = (step - args.warmup) / (args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * t)))


def mean_over_ranks(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return (x / dist.get_world_size()).item()


@torch.no_grad()
def evaluate(model, args, rank, world_size):
    total = torch.zeros(())
    for i in range(3):
        x, y = batch(i, args.batch_size, rank, world_size, args.context, split=1)
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    return mean_over_ranks(total / 3)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--context", type=int, default=48)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--eval-every", type=int, default=20)
    ap.add_argument("--seed", type=int, default=1234)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = CharLM(len(CHARS), context=args.context)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optim = CompactAdamW([{"params": decay}, {"params": no_decay, "weight_decay": 0.0}], lr=args.lr, eps=1e-6)
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary of {len(CHARS)}")

    for step in range(args.steps):
        for group in optim.param_groups:
            group["lr"] = cosine(step, args)
        x, y = batch(step, args.batch_size, rank, world_size, args.context, split=0)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            value = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step:3d} loss {value:.6f} lr {optim.param_groups[0]['lr']:.2e}")
        if (step + 1) % args.eval_every == 0:
            value = evaluate(model, args, rank, world_size)
            if rank == 0:
                print(f"step {step:3d} val loss {value:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
