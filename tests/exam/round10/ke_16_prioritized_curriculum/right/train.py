"""Sequence tagging with a curriculum that follows the losses of the single samples."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from config import Config
from loop import Loop
from optim import NormalizedMomentum
from sampler import LossSampler


class Tagger(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, cfg.dim)
        self.left = nn.GRU(cfg.dim, cfg.dim, batch_first=True)
        self.right = nn.GRU(cfg.dim, cfg.dim, batch_first=True)
        self.out = nn.Linear(2 * cfg.dim, 3, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        back = self.right(x.flip(1))[0].flip(1)
        return self.out(torch.cat([self.left(x)[0], back], -1))


def corpus(cfg):
    """The tag says whether the neighbour on the right is smaller, equal in parity or larger; some samples are harder."""
    g = torch.Generator().manual_seed(cfg.seed + 1)
    ids = torch.randint(0, cfg.vocab, (cfg.samples, cfg.length), generator=g)
    easy = torch.arange(cfg.samples) % 3 > 0
    ids[easy] = ids[easy] // 4
    nxt = ids.roll(-1, 1)
    tags = torch.where(nxt < ids, 0, torch.where((nxt - ids) % 2 == 0, 1, 2))
    return ids, tags


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    cfg = Config()
    torch.manual_seed(cfg.seed)
    model = Tagger(cfg)
    for part in (model.left, model.right):
        fully_shard(part)
    fully_shard(model, reshard_after_forward=True)
    optim = NormalizedMomentum(model.named_parameters(), cfg.lr, cfg.momentum)
    data = corpus(cfg)
    loop = Loop(cfg, model, optim, LossSampler(cfg), data)

    @loop.on("step", every=8)
    @torch.no_grad()
    def refresh(lp):
        """The whole table anew from time to time, each rank a part of the samples."""
        x, y = (t.chunk(lp.world)[lp.rank] for t in data)
        losses = F.cross_entropy(lp.model(x).transpose(1, 2), y, reduction="none").mean(1)
        lp.sampler.update(torch.arange(cfg.samples), losses)
        if lp.rank == 0:
            hard, easy = lp.sampler.table[::3].mean().item(), lp.sampler.table[1::3].mean().item()
            print(f"step {lp.step} norm {lp.metrics['norm']:.4f} table: hard {hard:.4f} easy {easy:.4f}", flush=True)

    if args.save_every:
        loop.on("step", every=args.save_every)(lambda lp: lp.save(args.out))

    @loop.on("end", every=1)
    def export(lp):
        if args.export:
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if lp.rank == 0:
                torch.save({**full, "loss_table": lp.sampler.table}, args.export)

    if args.resume:
        loop.load(args.resume)
    loop.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
