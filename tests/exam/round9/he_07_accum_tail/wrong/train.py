"""Character language model (GRU-free, gated convolutions) with gradient accumulation over each epoch."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TEXT = (
    "the cat sat on the mat and the dog ran to the log while a bird sang in the tall green tree "
    "and the old man told a long tale of the sea and the ship that came home late in the rain "
) * 12
CHARS = sorted(set(TEXT))
CTX, MICRO, ACCUM, EPOCHS = 32, 4, 4, 6


class GatedConv(nn.Module):
    def __init__(self, dim, width=4):
        super().__init__()
        self.width = width
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, width)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (self.width - 1, 0))
        a, b = self.conv(h).chunk(2, dim=1)
        return x + self.out((a * torch.sigmoid(b)).transpose(1, 2))


class CharLM(nn.Module):
    def __init__(self, vocab, dim=40, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GatedConv(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def micro_batches(epoch, ids):
    """Global micro-batches of one epoch; there are 10 of them, so the last group is shorter."""
    g = torch.Generator().manual_seed(60 + epoch)
    starts = torch.randperm(len(ids) - CTX - 1, generator=g)[: 10 * MICRO]
    rows = torch.stack([ids[s : s + CTX + 1] for s in starts.tolist()])
    return rows.split(MICRO)


def save(args, epoch, model, opt, rank):
    name = f"e{epoch:03d}"
    folder = os.path.join(args.out, name)
    os.makedirs(folder, exist_ok=True)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, os.path.join(folder, f"shard{rank}.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(args.out, "latest.json"), "w") as f:
            json.dump({"folder": name, "epoch": epoch}, f)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0, help="in epochs")
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    ids = torch.tensor([CHARS.index(c) for c in TEXT])
    torch.manual_seed(9)
    model = CharLM(len(CHARS))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))

    first = 0
    if args.resume:
        with open(os.path.join(args.resume, "latest.json")) as f:
            latest = json.load(f)
        state = torch.load(os.path.join(args.resume, latest["folder"], f"shard{rank}.pt"), weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        first = latest["epoch"]

    for epoch in range(first, EPOCHS):
        micros = micro_batches(epoch, ids)
        epoch_loss = torch.zeros(())
        for i, rows in enumerate(micros):
            group_start = i - i % ACCUM
            group_size = min(ACCUM, len(micros) - group_start)
            last = i == group_start + group_size - 1
            model.set_requires_gradient_sync((i + 1) % ACCUM == 0)
            rows = rows[rank::world]
            loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
            (loss / group_size).backward()
            epoch_loss += loss.detach() / len(micros)
            if last:
                opt.step()
                opt.zero_grad()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch} loss {epoch_loss.item() / world:.4f}", flush=True)
        if args.save_every and (epoch + 1) % args.save_every == 0:
            save(args, epoch + 1, model, opt, rank)

    if args.export:
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
