"""Small LM with an exponential moving average of the weights; validation runs with the averaged weights, which are
swapped into the model and out again."""
import argparse
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ = 30, 16


class Ema:
    """Average of the (sharded) parameters, with the usual ramp of the decay."""

    def __init__(self, model, decay):
        self.model, self.decay, self.updates = model, decay, 0
        self.params = list(model.parameters())
        self.shadow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def update(self):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for s, p in zip(self.shadow, self.params):
            s.lerp_(p, 1 - d)

    @contextmanager
    def applied(self):
        backup = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            for p, s in zip(self.params, self.shadow):
                p.copy_(s)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                for p, b in zip(self.params, backup):
                    p.copy_(b)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d)
        self.ff_norm, self.w1, self.w2 = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        y = self.norm(x)
        k, v = self.kv(y).chunk(2, -1)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), k, v, is_causal=True))
        return x + self.w2(F.gelu(self.w1(self.ff_norm(x))))


class LM(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Parameter(0.1 * torch.randn(SEQ, d))
        self.layers = nn.ModuleList(Layer(d) for _ in range(2))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows(seed, n):
    g = torch.Generator().manual_seed(seed)
    start, stride = torch.randint(VOCAB, (n, 1), generator=g), torch.randint(1, 5, (n, 1), generator=g)
    return (start + stride * torch.arange(SEQ + 1)) % VOCAB


def nll(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--ema", type=float, default=0.95)
    ap.add_argument("--eval-every", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(19)
    model = LM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    ema = Ema(model, args.ema)
    held_out = rows(10**6, 32).chunk(world)[rank]

    for step in range(1, args.steps + 1):
        loss = nll(model, rows(step, args.batch).chunk(world)[rank])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        ema.update()
        if args.eval_every and step % args.eval_every == 0:
            with ema.applied() as averaged, torch.no_grad():
                val = nll(averaged, held_out)
            both = torch.stack([loss.detach(), val]) / world
            dist.all_reduce(both)
            if rank == 0 and step % 4 == 0:
                print(f"step {step} train {both[0]:.4f} valid (ema) {both[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
