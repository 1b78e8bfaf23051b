"""Translation of number words, with a loss-driven curriculum, Lookahead and a final mean of the slow weights."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from averaging import Lookahead, RunningMean
from curriculum import LossTable

SRC, TGT, LEN, CORPUS = 20, 22, 6, 96


class Seq2Seq(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.src, self.tgt = nn.Embedding(SRC, dim), nn.Embedding(TGT, dim)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.join = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU())
        self.out = nn.Linear(dim, TGT, bias=False)

    def forward(self, src, tgt):
        memory, last = self.enc(self.src(src))
        h, _ = self.dec(self.tgt(tgt), last)
        weights = (h @ memory.transpose(1, 2) / h.shape[-1] ** 0.5).softmax(-1)
        return self.out(self.join(torch.cat([h, weights @ memory], -1)))


def corpus():
    g = torch.Generator().manual_seed(12)
    src = torch.randint(0, SRC, (CORPUS, LEN), generator=g)
    tgt = 2 + src.roll(1, dims=1)
    return src, torch.cat([torch.zeros(CORPUS, 1, dtype=torch.long), tgt], 1)


class Run:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(23)
        self.model = Seq2Seq()
        fully_shard(self.model.join)
        fully_shard(self.model)
        self.opt = torch.optim.NAdam(self.model.parameters(), lr=8e-3)
        self.lookahead = Lookahead(self.model.parameters())
        self.mean = RunningMean(self.model.parameters())
        self.table = LossTable(CORPUS, seed=3)
        self.src, self.tgt = corpus()
        self.step = 0

    def sentence_losses(self, idx):
        logits = self.model(self.src[idx], self.tgt[idx, :-1])
        return F.cross_entropy(logits.transpose(1, 2), self.tgt[idx, 1:], reduction="none").mean(1)

    def train(self):
        while self.step < self.args.steps:
            idx = self.table.draw(self.args.batch)[self.rank::self.world]
            losses = self.sentence_losses(idx)
            losses.mean().backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.table.record(idx, losses.detach())
            if self.lookahead.after_step(self.step):
                self.mean.add()
            if self.rank == 0:
                print(f"step {self.step} table mean {self.table.loss.mean():.4f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
        self.mean.finish()
        with torch.no_grad():
            total = self.sentence_losses(torch.arange(self.rank, CORPUS, self.world)).sum()
        dist.all_reduce(total)
        if self.rank == 0:
            print(f"mean of {self.mean.n} slow weights: corpus loss {total.item() / CORPUS:.4f}", flush=True)

    def save(self):
        folder = pathlib.Path(self.args.out) / f"{self.step:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"step": self.step, "model": self.model.state_dict(), "opt": self.opt.state_dict(),
                    "slow": self.lookahead.slow, "mean": (self.mean.n, self.mean.mean),
                    "table": self.table.state_dict()}, folder / f"{self.rank}of{self.world}.pt")

    def load(self, root):
        folder = max(pathlib.Path(root).iterdir())
        s = torch.load(folder / f"{self.rank}of{self.world}.pt", weights_only=False)
        self.step = s["step"]
        self.model.load_state_dict(s["model"])
        self.opt.load_state_dict(s["opt"])
        self.lookahead.slow = s["slow"]
        self.mean.n, self.mean.mean = s["mean"]
        self.table.load_state_dict(s["table"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="run")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.load(args.resume)
    run.train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
