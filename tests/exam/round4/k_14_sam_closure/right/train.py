"""Sharpness-aware minimisation (SAM) of a small convolutional language model, written with a closure.
Both passes see the same dropout masks: they come from a generator keyed by step, layer and global row."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, DIM = 28, 18, 20


class SAM(torch.optim.Optimizer):
    def __init__(self, params, inner, rho=0.05):
        params = list(params)
        super().__init__(params, dict(rho=rho))
        self.inner = inner

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        params = [p for g in self.param_groups for p in g["params"]]
        loss = closure()
        # DTensor norms are norms of the whole tensor, on every rank the same
        norms = [p.grad.norm().full_tensor() for p in params]
        total = torch.stack(norms).norm() + 1e-12
        moves = [p.grad * (self.param_groups[0]["rho"] / total.item()) for p in params]
        saved = [p.detach().clone() for p in params]
        for p, m in zip(params, moves):
            p.add_(m)
        self.inner.zero_grad()
        closure()
        for p, s in zip(params, saved):
            p.copy_(s)
        self.inner.step()
        self.inner.zero_grad()
        return loss


class KeyedDropout(nn.Module):
    def __init__(self, p, layer):
        super().__init__()
        self.p, self.layer, self.key = p, layer, None

    def forward(self, x):
        if not self.training:
            return x
        step, rows = self.key
        keep = []
        for r in rows:
            g = torch.Generator().manual_seed((step * 1009 + self.layer) * 4099 + r)
            keep.append(torch.rand(x.shape[1:], generator=g) >= self.p)
        return x * torch.stack(keep) / (1 - self.p)


class ConvBlock(nn.Module):
    def __init__(self, dim, dilation, layer):
        super().__init__()
        self.pad = 2 * dilation
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 3, dilation=dilation)
        self.out = nn.Linear(dim, dim)
        self.drop = KeyedDropout(0.1, layer)

    def forward(self, x):
        y = F.pad(self.norm(x).transpose(1, 2), (self.pad, 0))
        a, b = self.conv(y).transpose(1, 2).chunk(2, -1)
        return x + self.drop(self.out(a * torch.sigmoid(b)))


class ConvLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(ConvBlock(DIM, d, i) for i, d in enumerate((1, 2, 4)))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def data(step, n):
    g = torch.Generator().manual_seed(step)
    x = torch.randint(VOCAB, (n, 2), generator=g)
    while x.shape[1] <= SEQ:
        flip = (torch.rand(n, 1, generator=g) < 0.05).long()
        x = torch.cat([x, (x[:, -1:] + 2 * x[:, -2:-1] + 1 + flip) % VOCAB], 1)
    return x


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--rho", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(6)
    model = ConvLM()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    sam = SAM(model.parameters(), inner, rho=args.rho)

    for step in range(args.steps):
        mine = range(args.batch)[rank::world]
        rows = data(step, args.batch)[list(mine)]
        for b in model.blocks:
            b.drop.key = (step, list(mine))

        def closure():
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            return loss.detach()

        loss = sam.step(closure)
        dist.all_reduce(loss)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {loss.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
