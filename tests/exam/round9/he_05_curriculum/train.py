"""Text classifier trained with a length curriculum (FSDP2)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from curriculum import Curriculum
from data import MAXLEN, VOCAB, make_sentences

EPOCHS, BATCH = 8, 32


class Classifier(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(MAXLEN, dim)
        self.mix = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.head = nn.Linear(dim, 2)

    def forward(self, ids, mask):
        x = self.tok(ids) * (1 + self.pos.weight)
        x = (self.mix(x) * mask[..., None]).sum(1) / MAXLEN**0.5
        return self.head(x)


def save(folder, epoch, model, opt, rank):
    os.makedirs(folder, exist_ok=True)
    torch.save({"epoch": epoch, "model": model.state_dict(), "optim": opt.state_dict()}, f"{folder}/epoch{epoch}.rank{rank}")
    dist.barrier()


def load(folder, model, opt, rank):
    epochs = [int(f.split(".")[0][5:]) for f in os.listdir(folder) if f.endswith(f".rank{rank}")]
    state = torch.load(f"{folder}/epoch{max(epochs)}.rank{rank}", weights_only=False)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optim"])
    return state["epoch"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0, help="in epochs")
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    ids, mask, label, length = make_sentences(200)
    curriculum = Curriculum(length, EPOCHS, seed=12)

    torch.manual_seed(1)
    model = Classifier()
    fully_shard(model.mix)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = load(args.resume, model, opt, rank) if args.resume else 0

    for epoch in range(first, EPOCHS):
        total, count = torch.zeros(()), 0
        for idx in curriculum.batches(epoch, BATCH, rank, world):
            loss = F.cross_entropy(model(ids[idx], mask[idx]), label[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            count += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} pool {curriculum.pool_size(epoch)} loss {total.item() / count / world:.4f}", flush=True)
        if args.save_every and (epoch + 1) % args.save_every == 0:
            save(args.out, epoch + 1, model, opt, rank)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
