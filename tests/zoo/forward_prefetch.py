"""Explicit prefetching of the next layers in forward and of the previous ones in backward."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEQ, GLOBAL_BATCH, SAMPLES, STEPS = 16, 16, 512, 20


@dataclass
class Config:
    vocab: int = 48
    width: int = 32
    heads: int = 4
    layers: int = 2
    hidden: int = 64


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.wq = nn.Linear(cfg.width, cfg.width, bias=False)
        self.wk = nn.Linear(cfg.width, cfg.width, bias=False)
        self.wv = nn.Linear(cfg.width, cfg.width, bias=False)
        self.wo = nn.Linear(cfg.width, cfg.width, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.width, cfg.hidden, bias=False)
        self.up = nn.Linear(cfg.width, cfg.hidden, bias=False)
        self.down = nn.Linear(cfg.hidden, cfg.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_norm = nn.RMSNorm(cfg.width)
        self.attention = Attention(cfg)
        self.post_norm = nn.RMSNorm(cfg.width)
        self.mlp = SwiGLU(cfg)

    def forward(self, x):
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.width)
        self.layers = nn.ModuleList([DecoderLayer(cfg) for _ in range(cfg.layers)])
        self.norm = nn.RMSNorm(cfg.width)
        self.lm_head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build_dataset(num_samples, vocab, length, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.empty(num_samples, length + 1, dtype=torch.long)
    x[:, 0] = torch.randint(vocab, (num_samples,), generator=g)
    jump = torch.randint(0, 2, (num_samples, length), generator=g)
    for t in range(length):
        x[:, t + 1] = (x[:, t] * 7 + 1 + jump[:, t]) % vocab
    return x


def set_prefetching(layers, distance=1):
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + distance])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - distance) : i][::-1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(42)
    cfg = Config(layers=3)
    model = Decoder(cfg)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_prefetching(list(model.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    data = build_dataset(SAMPLES, cfg.vocab, SEQ, seed=1)
    per_rank = GLOBAL_BATCH // world
    for step in range(STEPS):
        model.unshard()
        offset = (step * GLOBAL_BATCH) % SAMPLES + rank * per_rank
        batch = data[offset : offset + per_rank]
        loss = F.cross_entropy(model(batch[:, :-1]).reshape(-1, cfg.vocab), batch[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1:3d} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
