"""Hybrid sharding with gradient accumulation: every micro-batch is reduced in its replica, the last one over the replicas.

nproc: 4
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

VOCAB, SEQ, WIDTH, LAYERS = 32, 12, 32, 3
GLOBAL_BATCH, SAMPLES, STEPS, ACCUMULATION = 24, 768, 20, 3


class ResidualMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TokenMLP(nn.Module):
    def __init__(self, vocab=VOCAB, width=WIDTH, layers=LAYERS):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([ResidualMLP(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_sequences(samples, seed=0):
    """Token sequences where the next token is 5 * token + 3 plus one random bit, modulo the vocabulary."""
    gen = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        bit = torch.randint(0, 2, (samples,), generator=gen)
        tokens.append((5 * tokens[-1] + 3 + bit) % VOCAB)
    return torch.stack(tokens, dim=1)


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(1)
    model = TokenMLP()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    tokens = make_sequences(SAMPLES)
    rows = GLOBAL_BATCH // (world * ACCUMULATION)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for index in range(ACCUMULATION):
            model.set_requires_all_reduce(index == ACCUMULATION - 1)
            start = step * GLOBAL_BATCH % SAMPLES + (index * world + rank) * rows
            batch = tokens[start : start + rows]
            part = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / ACCUMULATION
            part.backward()
            loss += part.detach()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        shown = mean_over_ranks(loss)
        if rank == 0:
            print(f"step {step + 1} loss {shown:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
