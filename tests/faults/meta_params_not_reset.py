"""GPT with gated attention (the gates start closed), built on the meta device and initialised after sharding.

rule: meta-params-not-reset
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

VOCAB, SEQ, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 2
GLOBAL_BATCH, SAMPLES, STEPS, SEED = 16, 512, 20, 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.tanh(self.gate) * self.proj(y.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def fill(param, value):
    if isinstance(param, DTensor):
        value = distribute_tensor(value, param.device_mesh, param.placements)
    param.copy_(value)


def reset_parameters(model, seed):
    gen = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fill(module.weight, torch.empty(module.weight.shape).normal_(std=0.1, generator=gen))
            if module.bias is not None:
                fill(module.bias, torch.zeros(module.bias.shape))
        elif isinstance(module, nn.Embedding):
            fill(module.weight, torch.empty(module.weight.shape).normal_(std=0.5, generator=gen))
        elif isinstance(module, nn.LayerNorm):
            fill(module.weight, torch.ones(module.weight.shape))
            fill(module.bias, torch.zeros(module.bias.shape))


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
        model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    reset_parameters(model, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)

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
