"""Trains a small causal language model kept in bfloat16, with accelerate's FSDP2 and mixed precision."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB, LENGTH = 64, 32


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (it.unflatten(-1, (4, -1)).transpose(1, 2) for it in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def samples(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    start = torch.randint(VOCAB, (count, 1), generator=draw)
    stride = torch.randint(1, 5, (count, 1), generator=draw)
    return TensorDataset((start + stride * torch.arange(LENGTH)) % VOCAB)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()

    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
    )
    on_cpu = not torch.cuda.is_available()
    if on_cpu:  # accelerate offers FSDP to devices that are not CPUs only
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, mixed_precision="bf16")
    model = Model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 40))
    loader = DataLoader(samples(512), batch_size=8)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    for step, (ids,) in enumerate(loader):
        if step == args.steps:
            break
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        shown = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"step {step + 1} loss {shown:.6f} lr {scheduler.get_last_lr()[0]:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
