#!/usr/bin/env python3
"""Variable sequence length training of a patch transformer on drawn shapes.

Each rank draws the sequence length of its next batch on its own and fills the
batch up to the token budget. Images are patchified, padded to the sequence length
and masked. The gradient can be scaled with the batch size (--loss-scale), relative to
the batch size at the longest sequence.
"""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--updates-per-epoch", type=int, default=12)
    p.add_argument("--seq-lens", type=int, nargs="+", default=[9, 16, 25, 36])
    p.add_argument("--batch-size", type=int, default=4, help="samples at the longest sequence, per stream")
    p.add_argument("--streams", type=int, default=4, help="independent sample streams, shared out to the ranks")
    p.add_argument("--loss-scale", choices=("none", "sqrt", "linear"), default="none")
    p.add_argument("--lr", type=float, default=0.08)
    p.add_argument("--momentum", type=float, default=0.9)
    p.add_argument("--clip-grad", type=float, default=5.0)
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--log-interval", type=int, default=4)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


PATCH = 3
CLASSES = ("bar_h", "bar_v", "ring", "cross", "disc")


def draw(g, side):
    """One grey image of side x side pixels with one shape in it."""
    target = int(torch.randint(len(CLASSES), (1,), generator=g))
    y, x = torch.meshgrid(torch.linspace(-1, 1, side), torch.linspace(-1, 1, side), indexing="ij")
    cy, cx = (torch.rand(2, generator=g) - 0.5).tolist()
    y, x = y - 0.6 * cy, x - 0.6 * cx
    r = (x * x + y * y).sqrt()
    mask = (y.abs() < 0.3, x.abs() < 0.3, (r - 0.6).abs() < 0.2,
            (y.abs() < 0.2) | (x.abs() < 0.2), r < 0.6)[target]
    image = mask.float() * (0.8 + 0.4 * torch.rand((), generator=g))
    return image + 0.15 * torch.randn(side, side, generator=g), target


def patchify(image):
    n = image.shape[0] // PATCH
    patches = image.view(n, PATCH, n, PATCH).transpose(1, 2).reshape(n * n, PATCH * PATCH)
    coord = torch.stack(torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"), -1).view(-1, 2)
    return patches, coord


class VariableSeqStream:
    """An endless stream of batches, each with a sequence length of its own."""

    def __init__(self, index, args, seed):
        self.g = torch.Generator().manual_seed(seed * 9973 + index)
        self.seq_lens = args.seq_lens
        self.budget = args.batch_size * max(args.seq_lens)

    def next(self):
        seq_len = self.seq_lens[int(torch.randint(len(self.seq_lens), (1,), generator=self.g))]
        batch = []
        for _ in range(self.budget // seq_len):
            image, target = draw(self.g, math.isqrt(seq_len) * PATCH)
            batch.append((*patchify(image), target))
        return batch


def collate(samples):
    length = max(len(s[0]) for s in samples)
    patches = torch.zeros(len(samples), length, PATCH * PATCH)
    coord = torch.zeros(len(samples), length, 2, dtype=torch.long)
    valid = torch.zeros(len(samples), length, dtype=torch.bool)
    for i, (p, c, _) in enumerate(samples):
        patches[i, :len(p)], coord[i, :len(p)], valid[i, :len(p)] = p, c, True
    return {"patches": patches, "coord": coord, "valid": valid}, torch.tensor([s[2] for s in samples])


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.norm2(x))


class FlexTransformer(nn.Module):
    def __init__(self, dim, depth, num_classes):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, dim)
        self.pos = nn.Parameter(torch.randn(2, 8, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, patches, coord, valid):
        x = self.embed(patches) + self.pos[0, coord[..., 0]] + self.pos[1, coord[..., 1]]
        mask = valid[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x) * valid.unsqueeze(-1)
        return self.head(x.sum(1) / valid.sum(1, keepdim=True))


def all_sum(value):
    t = torch.as_tensor(value, dtype=torch.float64).clone()
    dist.all_reduce(t)
    return t.item()


def train_one_epoch(epoch, model, optimizer, streams, args, world_size, primary):
    model.train()
    total = args.epochs * args.updates_per_epoch
    for i in range(args.updates_per_epoch):
        update = epoch * args.updates_per_epoch + i
        lr = args.lr * min(1.0, (update + 1) / 5) * (1 - update / total)
        for group in optimizer.param_groups:
            group["lr"] = lr

        inputs, target = collate([s for stream in streams for s in stream.next()])
        batch_size = target.shape[0]
        global_batch_size = all_sum(batch_size)

        output = model(**inputs)
        loss = F.cross_entropy(output, target)

        # scale gradient vs the minimum batch size (for max seq len)
        scale = 1.0
        if args.loss_scale != "none":
            scale = global_batch_size / (args.batch_size * args.streams)
            if args.loss_scale == "sqrt":
                scale = scale ** 0.5
        scale *= world_size * batch_size / global_batch_size
        (loss * scale).backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

        if update % args.log_interval == 0 or update == total - 1:
            loss_avg = all_sum(loss.item() * batch_size) / global_batch_size
            norm = grad_norm.full_tensor().item()
            if primary:
                print(f"Train: {epoch} [{i:>3d}/{args.updates_per_epoch}] loss {loss_avg:.6f} "
                      f"grad {norm:.5f} lr {lr:.4f} samples {int(global_batch_size)}", flush=True)


@torch.no_grad()
def evaluate(model, streams, num_batches=4):
    model.eval()
    loss = correct = count = 0.0
    for _ in range(num_batches):
        inputs, target = collate([s for stream in streams for s in stream.next()])
        output = model(**inputs)
        loss += F.cross_entropy(output, target, reduction="sum").item()
        correct += (output.argmax(1) == target).sum().item()
        count += len(target)
    count = all_sum(count)
    return all_sum(loss) / count, 100 * all_sum(correct) / count


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert args.streams % world_size == 0
    torch.manual_seed(args.seed)

    model = FlexTransformer(args.dim, args.depth, len(CLASSES))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, nesterov=True)

    mine = range(rank, args.streams, world_size)
    streams = [VariableSeqStream(i, args, args.seed) for i in mine]
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, optimizer, streams, args, world_size, rank == 0)
        val = evaluate(model, [VariableSeqStream(i, args, args.seed + 1) for i in mine])
        if rank == 0:
            print(f"Test: {epoch} loss {val[0]:.6f} acc {val[1]:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
