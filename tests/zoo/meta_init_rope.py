"""Meta-device initialisation of a RoPE language model: weights and buffers are rebuilt after to_empty."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

VOCAB, SEQ, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 2
GLOBAL_BATCH, SAMPLES, STEPS, SEED = 16, 512, 20, 7


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, theta=10000.0):
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self, device=None):
        return self.theta ** (-torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim)

    def forward(self, x):
        angle = torch.outer(torch.arange(x.shape[-2]).float(), self.inv_freq)
        cos, sin = angle.cos(), angle.sin()
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rope = RotaryEmbedding(WIDTH // HEADS)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class RopeLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def fill(param, value):
    if isinstance(param, DTensor):
        value = distribute_tensor(value, param.device_mesh, param.placements)
    param.copy_(value)


@torch.no_grad()
def init_weights(model):
    """The same full tensors on every rank and at every world size; each rank keeps its shard."""
    gen = torch.Generator().manual_seed(SEED)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fill(module.weight, torch.randn(module.weight.shape, generator=gen) / math.sqrt(module.in_features))
        elif isinstance(module, nn.Embedding):
            fill(module.weight, torch.randn(module.weight.shape, generator=gen))
        elif isinstance(module, nn.RMSNorm):
            fill(module.weight, torch.ones(module.weight.shape))
        elif isinstance(module, RotaryEmbedding):
            module.inv_freq.copy_(module.frequencies(module.inv_freq.device))


def make_sequences(samples, seed=0):
    """Token sequences where the next token is 5 * token + 3 plus one random bit, modulo the vocabulary."""
    gen = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        bit = torch.randint(0, 2, (samples,), generator=gen)
        tokens.append((5 * tokens[-1] + 3 + bit) % VOCAB)
    return torch.stack(tokens, dim=1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    with torch.device("meta"):
        model = RopeLM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    tokens = make_sequences(SAMPLES)
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        batch = tokens[start : start + local]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
