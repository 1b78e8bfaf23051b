"""Sequence tagging with gradient accumulation; an epoch's last window may be shorter than the others."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

VOCAB, TAGS, T = 18, 4, 10


class Tagging(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randint(0, VOCAB, (n, T), generator=g)
        prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), self.x[:, :-1]], 1)
        self.y = (self.x + 2 * prev) // 3 % TAGS

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class RankBatches:
    """Batch sampler: same permutation on all ranks, every rank takes its slice of each global batch."""

    def __init__(self, n, batch, rank, world, seed):
        self.n, self.batch, self.rank, self.world, self.seed, self.epoch = n, batch, rank, world, seed, 0

    def __len__(self):
        return self.n // self.batch

    def __iter__(self):
        perm = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        per = self.batch // self.world
        for b in range(len(self)):
            lo = b * self.batch + self.rank * per
            yield perm[lo:lo + per]


class Tagger(nn.Module):
    def __init__(self, d=20, h=40):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.conv = nn.Sequential(nn.ConstantPad1d((1, 0), 0.0), nn.Conv1d(d, h, 2), nn.GELU())
        self.mlp = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.GELU())
        self.out = nn.Linear(h, TAGS)

    def forward(self, x):
        h = self.conv(self.emb(x).transpose(1, 2)).transpose(1, 2)
        return self.out(h + self.mlp(h))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=7)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0, help="in optimizer steps, rounded up to the end of the epoch")
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Tagging(112, 5)
    sampler = RankBatches(len(data), a.batch, rank, world, 13)
    loader = DataLoader(data, batch_sampler=sampler)
    torch.manual_seed(21)
    model = Tagger()
    fully_shard([model.conv, model.mlp])
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    first, step, saved = 0, 0, 0
    if a.resume:
        path = max(glob.glob(os.path.join(a.resume, "step_*")))
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "opt": o, "epoch": 0, "step": 0}
        dcp.load(sd, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        first, step = sd["epoch"], sd["step"]
        saved = step

    n = len(loader)
    for epoch in range(first, a.epochs):
        sampler.epoch = epoch
        run, seen = torch.zeros(()), 0
        for i, (x, y) in enumerate(loader):
            window = min(a.accum, n - i // a.accum * a.accum)
            last = (i + 1) % a.accum == 0 or i + 1 == n
            model.set_requires_gradient_sync(last)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / window).backward()
            run += loss.detach()
            seen += 1
            if (i + 1) % a.accum == 0 or i + 1 == n:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                step += 1
                shown = run.clone()
                dist.all_reduce(shown)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {shown.item() / world / seen:.4f}", flush=True)
                run.zero_()
                seen = 0
        if a.save_every and step - saved >= a.save_every:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "epoch": epoch + 1, "step": step}, checkpoint_id=os.path.join(a.out, f"step_{step:05d}"))
            saved = step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
