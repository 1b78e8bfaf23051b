"""Train a tiny encoder-decoder translator with Adafactor on sharded parameters."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from adafactor import ShardedAdafactor
from model import Translator

SRC, TGT, LEN = 30, 34, 8
BOS = 0


def sentence_pairs(step, batch):
    """The target is the reversed source through a fixed dictionary; words are Zipf distributed."""
    g = torch.Generator().manual_seed(90 + step)
    probs = 1.0 / torch.arange(1, SRC + 1).float()
    src = torch.multinomial(probs.expand(batch, -1), LEN, replacement=True, generator=g)
    dictionary = 1 + torch.randperm(TGT - 1, generator=torch.Generator().manual_seed(1))[:SRC]
    tgt = dictionary[src.flip(1)]
    return src, torch.cat([torch.full((batch, 1), BOS), tgt], 1)


class Checkpointer:
    def __init__(self, root, rank):
        self.root, self.rank = pathlib.Path(root), rank

    def save(self, step, model, opt):
        folder = self.root / f"{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, folder / f"shard{self.rank}.pt")

    def load_latest(self, model, opt):
        folder = max(self.root.iterdir())
        blob = torch.load(folder / f"shard{self.rank}.pt", weights_only=False)
        model.load_state_dict(blob["model"])
        opt.load_state_dict(blob["opt"])
        return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="run")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = Translator(SRC, TGT)
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    opt = ShardedAdafactor(model.parameters(), lr=args.lr)
    step = Checkpointer(args.resume, rank).load_latest(model, opt) if args.resume else 0

    for step in range(step, args.steps):
        src, tgt = (t[rank::world] for t in sentence_pairs(step, args.batch))
        logits = model(src, tgt[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            Checkpointer(args.out, rank).save(step + 1, model, opt)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
