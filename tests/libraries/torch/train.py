"""A GPT on plain torch, with what changed between two versions of torch as options.

--tied split: embedding and head share their weight and are groups of their own; root: both are left
to the root's group --clip item: `.item()` on what clip_grad_norm_ returns, as a log does; whole:
`.full_tensor()` before it --checkpoint: bf16 policy, and each sharded block is called through
torch.utils.checkpoint --record: bf16 policy, and a block takes its float32 input in a dataclass
"""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

VOCAB, SEQ, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 2
GLOBAL_BATCH, SAMPLES, STEPS, SEED = 16, 512, 20, 0


@dataclass
class Stream:
    """What a block takes where the options ask for a record."""

    x: torch.Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x.x if isinstance(x, Stream) else x
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if args.tied:
            self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.2)
        nn.init.normal_(self.positions.weight, std=0.2)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.args.checkpoint:
                x = checkpoint(block, x.float(), use_reentrant=False)
            else:
                x = block(Stream(x.float()) if self.args.record else x)
        return self.head(self.norm(x))


def make_sequences(samples, seed=0):
    """Token sequences where the next token is 5 * token + 3 plus one random bit, modulo the
    vocabulary.
    """
    gen = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        bit = torch.randint(0, 2, (samples,), generator=gen)
        tokens.append((5 * tokens[-1] + 3 + bit) % VOCAB)
    return torch.stack(tokens, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tied", choices=("split", "root"))
    parser.add_argument("--clip", choices=("item", "whole"))
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(SEED)
    model = GPT(args)
    low = torch.bfloat16 if args.checkpoint or args.record else None
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    if args.tied == "split":
        fully_shard(model.tokens, **options)
        fully_shard(model.head, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    tokens = make_sequences(SAMPLES)
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        batch = tokens[start : start + local]
        loss = F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = 0.0
        if args.clip:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if args.clip == "whole" and isinstance(total, DTensor):
                total = total.full_tensor()
            norm = total.item()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
