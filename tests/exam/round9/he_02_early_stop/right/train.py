"""Classifier with early stopping: the weights of the best epoch are the result."""
import argparse
import glob
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from data import epoch_batches, make_split
from stopper import EarlyStopping

DIM, CLASSES = 20, 5


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        fully_shard(self.model[2])
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-3, weight_decay=0.0)
        self.stopper = EarlyStopping(patience=args.patience)
        self.train_x, self.train_y = make_split(192, DIM, CLASSES, noise=0.3, seed=1)
        self.val_x, self.val_y = make_split(256, DIM, CLASSES, noise=0.0, seed=2)
        self.epoch = 0
        self.done = False

    def train_epoch(self):
        self.model.train()
        for idx in epoch_batches(len(self.train_x), 48, self.epoch, self.rank, self.world):
            loss = F.cross_entropy(self.model(self.train_x[idx]), self.train_y[idx])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return loss.detach()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = self.val_x[self.rank :: self.world], self.val_y[self.rank :: self.world]
        logits = self.model(x)
        sums = torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum().float()])
        dist.all_reduce(sums)
        loss, acc = (sums / len(self.val_x)).tolist()
        return loss, acc

    def fit(self):
        while self.epoch < self.args.epochs and not self.done:
            train_loss = self.train_epoch()
            dist.all_reduce(train_loss)
            val_loss, val_acc = self.validate()
            self.done = self.stopper.update(self.epoch, val_loss, self.model)
            if self.rank == 0:
                print(f"epoch {self.epoch:2d} train {train_loss.item() / self.world:.4f} val {val_loss:.4f} acc {val_acc:.3f}", flush=True)
            self.epoch += 1
            if self.args.save_every and self.epoch % self.args.save_every == 0:
                self.save()
        self.stopper.restore(self.model)
        val_loss, val_acc = self.validate()
        if self.rank == 0:
            print(f"best epoch {self.stopper.best_epoch}: val {val_loss:.4f} acc {val_acc:.3f}", flush=True)

    def save(self):
        os.makedirs(self.args.out, exist_ok=True)
        torch.save(
            {
                "model": self.model.state_dict(),
                "optim": self.opt.state_dict(),
                "stopper": self.stopper.state_dict(),
                "epoch": self.epoch,
                "done": self.done,
            },
            os.path.join(self.args.out, f"epoch{self.epoch:03d}_rank{self.rank}of{self.world}.pt"),
        )
        dist.barrier()

    def resume(self, folder):
        files = glob.glob(os.path.join(folder, f"epoch*_rank{self.rank}of{self.world}.pt"))
        newest = max(files, key=lambda f: int(re.search(r"epoch(\d+)_", f).group(1)))
        state = torch.load(newest, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["optim"])
        self.stopper.load_state_dict(state["stopper"])
        self.epoch, self.done = state["epoch"], state["done"]

    def export(self, path):
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in self.model.state_dict().items()}
        if self.rank == 0:
            torch.save(full, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--patience", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0, help="in epochs")
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit()
    if args.export:
        trainer.export(args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
