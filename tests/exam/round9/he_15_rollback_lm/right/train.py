"""Language model with loss-spike rollback and tail averaging, on a callback trainer."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from callbacks import Clip, Log, Saver, SpikeGuard, TailAverage
from framework import Trainer

VOCAB, CTX, BATCH = 16, 14, 16
DAMAGED = {11, 19}  # batches whose labels got lost on the way


class LSTMLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.cell = nn.Linear(2 * dim, 2 * dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        seq = [torch.zeros_like(x[:, 0])]
        pre = self.cell(torch.cat([x, x.roll(1, dims=1)], dim=-1))
        for t in range(ids.shape[1]):  # minimal gated recurrence
            gate, cand = pre[:, t].chunk(2, dim=-1)
            gate = torch.sigmoid(gate)
            seq.append((1 - gate) * seq[-1] + gate * torch.tanh(cand))
        return self.head(torch.stack(seq[1:], dim=1))


def data(step, rank, world):
    g = torch.Generator().manual_seed(70 + step)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    stride = torch.randint(1, 3, (BATCH, 1), generator=g)
    ids = (start + stride * torch.arange(CTX + 1)) % VOCAB
    x, y = ids[:, :-1], ids[:, 1:]
    if step in DAMAGED:
        y = torch.randint(0, VOCAB, y.shape, generator=g)
    return x[rank::world], y[rank::world]


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")

    torch.manual_seed(23)
    model = LSTMLM()
    fully_shard(model.cell)
    fully_shard(model)
    opt = torch.optim.NAdam(model.parameters(), lr=2e-2)
    callbacks = [SpikeGuard(), Clip(1.0), TailAverage(14, args.export), Log(), Saver(args.out, args.save_every)]
    trainer = Trainer(model, opt, loss_fn, data, args.steps, callbacks)
    if args.resume:
        path = Saver.newest(args.resume, trainer.rank, trainer.world)
        trainer.load_state_dict(torch.load(path, weights_only=False))
    trainer.fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
