"""Text embeddings from (query, positive, negative) triplets.

The encoder is sharded by FSDP2. The projection on top is small and replicated with DDP.
Every other step the negatives are mined in a pool before the triplet loss.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, TOPICS = 60, 10, 6


class EncoderBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Encoder(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(EncoderBlock(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.mean(1))


class Projection(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, out))

    def forward(self, h):
        return F.normalize(self.net(h), dim=-1)


class Embedder:
    """Sharded encoder and replicated projection."""

    def __init__(self, args, mesh, device):
        self.encoder = Encoder(args.dim, args.layers).to(device)
        for block in self.encoder.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.encoder, mesh=mesh)
        self.project = DistributedDataParallel(Projection(args.dim, args.out).to(device))

    def parameters(self):
        return [*self.encoder.parameters(), *self.project.parameters()]

    def encode(self, ids):
        return self.project(self.encoder(ids))

    @torch.no_grad()
    def embed(self, ids):
        return self.project.module(self.encoder(ids))


def texts(topic, g):
    """Tokens of a text come from its topic's stretch of the vocabulary or from everywhere."""
    own = topic.unsqueeze(1) * (VOCAB // TOPICS) + torch.randint(0, VOCAB // TOPICS, (len(topic), LENGTH), generator=g)
    other = torch.randint(0, VOCAB, own.shape, generator=g)
    return torch.where(torch.rand(own.shape, generator=g) < 0.35, own, other)


def triplets(step, batch, pool, seed=0):
    g = torch.Generator().manual_seed(6_600 + seed + step)
    topic = torch.randint(0, TOPICS, (batch,), generator=g)
    different = (topic.unsqueeze(1) + torch.randint(1, TOPICS, (batch, pool), generator=g)) % TOPICS
    negatives = texts(different.flatten(), g).view(batch, pool, LENGTH)
    return texts(topic, g), texts(topic, g), negatives


def triplet_loss(model, query, positive, negative, margin):
    n = len(query)
    z = model.encode(torch.cat([query, positive, negative]))
    near = (z[:n] * z[n:2 * n]).sum(-1)
    far = (z[:n] * z[2 * n:]).sum(-1)
    return F.softplus((far - near + margin) * 5).mean()


def mined_triplet_loss(model, query, positive, pool, margin):
    """The negative that is closest to the query."""
    n = len(query)
    h = model.encoder(torch.cat([query, positive, pool.flatten(0, 1)]))
    z = model.project(h)
    near = (z[:n] * z[n:2 * n]).sum(-1)
    far = torch.einsum("nd,npd->np", z[:n], z[2 * n:].view(n, -1, z.shape[-1])).amax(1)
    return F.softplus((far - near + margin) * 5).mean()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--out", type=int, default=16)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--pool", type=int, default=3)
    p.add_argument("--margin", type=float, default=0.2)
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--lr", type=float, default=3e-3)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(12)
    model = Embedder(args, mesh, device)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, foreach=False)
    n = args.batch // world
    own = slice(rank * n, (rank + 1) * n)

    def retrieval(batches=3):
        """Share of queries that are closer to the positive than to each negative."""
        hits = torch.zeros((), device=device)
        for i in range(batches):
            q, pos, neg = (t[own].to(device) for t in triplets(i, args.batch, args.pool, seed=80_000))
            zq, zp = model.embed(q), model.embed(pos)
            zn = model.embed(neg.flatten(0, 1)).view(n, args.pool, -1)
            far = torch.einsum("nd,npd->np", zq, zn).amax(1)
            hits += ((zq * zp).sum(-1) > far).sum()
        dist.all_reduce(hits)
        return hits.item() / (batches * args.batch)

    for step in range(1, args.steps + 1):
        q, pos, neg = (t[own].to(device) for t in triplets(step, args.batch, args.pool))
        if step % 2 == 0:
            loss = mined_triplet_loss(model, q, pos, neg, args.margin)
        else:
            loss = triplet_loss(model, q, pos, neg[:, 0], args.margin)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 12 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            found = retrieval()
            if rank == 0:
                print(f"step {step:3d} loss {shown.item() / world:.5f} retrieval {found:.3f}", flush=True)

    if rank == 0:
        print(f"projection norm {model.project.module.net[2].weight.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
