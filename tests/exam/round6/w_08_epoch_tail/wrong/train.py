"""DLRM-style click model, several passes over a fixed log, gradients accumulated over four micro-batches."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FIELDS = (50, 40, 30, 20)


class DLRM(nn.Module):
    def __init__(self, dim=12, n_dense=6):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim) for n in FIELDS)
        self.bottom = nn.Sequential(nn.Linear(n_dense, 24), nn.ReLU(), nn.Linear(24, dim))
        self.top = nn.Sequential(nn.Linear(dim + 10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.pairs = torch.triu_indices(5, 5, 1)

    def forward(self, dense, cats):
        z = torch.stack([self.bottom(dense)] + [t(cats[:, i]) for i, t in enumerate(self.tables)], dim=1)
        inter = (z @ z.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([z[:, 0], inter], dim=1))[:, 0]


def click_log(n=640):
    g = torch.Generator().manual_seed(17)
    dense = torch.randn(n, 6, generator=g)
    cats = torch.stack([torch.randint(f, (n,), generator=g) for f in FIELDS], dim=1)
    effect = [torch.randn(f, generator=g) for f in FIELDS]
    logit = dense[:, 0] - dense[:, 1] + sum(e[cats[:, i]] for i, e in enumerate(effect))
    return dense, cats, (torch.rand(n, generator=g) < torch.sigmoid(logit)).float()


class Trainer:
    accumulate = 4
    micro = 64

    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model = DLRM()
        fully_shard(self.model.bottom)
        fully_shard(self.model.top)
        fully_shard(self.model)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.data = click_log()
        self.epoch = self.updates = 0

    def micro_batches(self):
        order = torch.randperm(len(self.data[0]), generator=torch.Generator().manual_seed(self.epoch))
        return order.split(self.micro)

    def run_epoch(self):
        batches = self.micro_batches()
        total = torch.zeros(())
        for i, index in enumerate(batches):
            window = min(self.accumulate, len(batches) - i // self.accumulate * self.accumulate)
            last = (i + 1) % self.accumulate == 0
            # communicate only in the last backward of a window
            self.model.set_requires_gradient_sync(last)
            dense, cats, label = (d[index.chunk(self.world)[self.rank]] for d in self.data)
            loss = F.binary_cross_entropy_with_logits(self.model(dense, cats), label)
            (loss / window).backward()
            total += loss.detach()
            if (i + 1) % self.accumulate == 0 or i + 1 == len(batches):
                self.optim.step()
                self.optim.zero_grad()
                self.updates += 1
        self.epoch += 1
        dist.all_reduce(total)
        return total.item() / len(batches) / self.world

    def save(self):
        # one ordinary file with full tensors, written by rank 0
        model, optim = get_state_dict(self.model, self.optim, options=StateDictOptions(full_state_dict=True))
        if self.rank == 0:
            os.makedirs(self.args.out, exist_ok=True)
            torch.save({"model": model, "optim": optim, "epoch": self.epoch, "updates": self.updates},
                       os.path.join(self.args.out, f"epoch{self.epoch:03d}.pt"))
        dist.barrier()

    def load(self, folder):
        ck = torch.load(sorted(glob.glob(os.path.join(folder, "epoch*.pt")))[-1])
        set_state_dict(self.model, self.optim, model_state_dict=ck["model"], optim_state_dict=ck["optim"],
                       options=StateDictOptions(full_state_dict=True))
        self.epoch, self.updates = ck["epoch"], ck["updates"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0, help="epochs")
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    while trainer.epoch < args.epochs:
        loss = trainer.run_epoch()
        if trainer.rank == 0:
            print(f"epoch {trainer.epoch} updates {trainer.updates} loss {loss:.4f}", flush=True)
        if args.save_every and trainer.epoch % args.save_every == 0:
            trainer.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
