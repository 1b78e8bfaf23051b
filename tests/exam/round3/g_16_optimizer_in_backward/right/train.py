"""One small optimizer per parameter, stepped from a hook as soon as its gradient is reduced: no gradient outlives the backward pass."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, DIM, T, BATCH = 32, 24, 14, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.kv, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.ff = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 48), nn.Tanh(), nn.Linear(48, DIM))

    def forward(self, x):
        h = self.norm(x)
        k, v = self.kv(h).chunk(2, -1)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), k, v, is_causal=True))
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(T, DIM)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.blocks(self.tok(ids) + self.pos(torch.arange(ids.shape[1]))))


class BackwardAdamW:
    """the same as AdamW without clipping, but each parameter is updated inside backward()"""

    def __init__(self, model, lr):
        self.base_lr, self.updates = lr, 0
        self.named = dict(model.named_parameters())
        self.optimizers = {
            n: torch.optim.AdamW([p], lr=lr, weight_decay=0.05, foreach=False) for n, p in self.named.items()
        }
        for name, p in self.named.items():
            p.register_post_accumulate_grad_hook(self.hook_for(name))

    def hook_for(self, name):
        optimizer = self.optimizers[name]

        def hook(_):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.updates += 1

        return hook

    def set_factor(self, factor):
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = self.base_lr * factor

    def prepare_state(self):
        """moments exist before the first step, so that a checkpoint can be read into them"""
        for name, p in self.named.items():
            self.optimizers[name].state[p] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def state(self):
        return {name: dict(self.optimizers[name].state[p]) for name, p in self.named.items()}


def rows(step):
    g = torch.Generator().manual_seed(step)
    a = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    x = (a * 1 + (2 + a % 2) * torch.arange(T + 1)) % VOCAB
    return torch.where(torch.rand(x.shape, generator=g) < 0.05, torch.randint(0, VOCAB, x.shape, generator=g), x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    model = LM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    update = BackwardAdamW(model, lr=4e-3)
    update.prepare_state()

    first = 0
    if args.resume:
        first = max(int(d) for d in os.listdir(args.resume))
        # model.state_dict() and the moments are the live tensors: dcp.load writes into them
        dcp.load(
            {"model": model.state_dict(), "moments": update.state()},
            checkpoint_id=os.path.join(args.resume, str(first)),
        )

    for step in range(first, args.steps):
        update.set_factor(min(1.0, (step + 1) / 5) * (1 - 0.9 * step / args.steps))
        x = rows(step)[rank::world]
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
        assert update.updates == len(update.named) * (step + 1 - first)
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item() / world:.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(
                {"model": model.state_dict(), "moments": update.state()},
                checkpoint_id=os.path.join(args.out, str(step + 1)),
            )

    if args.export:
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
