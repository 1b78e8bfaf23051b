import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from callbacks import BestModel, Checkpointer, EarlyStopping
from series import Forecaster, make_series


class Trainer:
    def __init__(self, epochs=40, batch=32, lr=3e-3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.model = Forecaster()
        mesh = init_device_mesh("cpu", (self.world,))
        fully_shard(self.model.body, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.RMSprop(self.model.parameters(), lr=lr, alpha=0.95, eps=1e-4)
        self.epochs, self.batch, self.epoch, self.stop = epochs, batch, 0, False
        self.train = make_series(96, seed=10)
        self.val = make_series(200, seed=11)
        self.test = make_series(400, seed=12)
        self.callbacks = []

    def init_opt_state(self):
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.opt.step()
        self.opt.zero_grad()

    def opt_state(self):
        return {name: self.opt.state[p] for name, p in self.model.named_parameters()}

    def train_epoch(self):
        order = torch.randperm(len(self.train[0]), generator=torch.Generator().manual_seed(100 + self.epoch))
        for idx in order.split(self.batch):
            mine = idx.chunk(self.world)[self.rank]
            loss = F.mse_loss(self.model(self.train[0][mine]), self.train[1][mine])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def evaluate(self, data):
        x, y = (t.chunk(self.world)[self.rank] for t in data)
        total = torch.stack([F.mse_loss(self.model(x), y, reduction="sum"), torch.tensor(float(len(x)))])
        dist.all_reduce(total)
        self.model.reshard()
        return (total[0] / total[1]).item()

    def fit(self):
        while self.epoch < self.epochs and not self.stop:
            self.train_epoch()
            self.epoch += 1
            train_loss, val_loss = self.evaluate(self.train), self.evaluate(self.val)
            if self.rank == 0:
                print(f"epoch {self.epoch} train {train_loss:.4f} val {val_loss:.4f}", flush=True)
            for c in self.callbacks:
                c.on_eval(self, val_loss)
        for c in self.callbacks:
            c.on_fit_end(self)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=5)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer()
    best, stopper = BestModel(trainer.model), EarlyStopping(patience=8)
    keeper = Checkpointer(args.out, args.save_every, best, stopper)
    trainer.callbacks = [best, stopper, keeper]
    if args.resume:
        keeper.restore(trainer, args.resume)
    trainer.fit()
    final_val, final_test = trainer.evaluate(trainer.val), trainer.evaluate(trainer.test)
    if trainer.rank == 0:
        print(f"best val {best.score:.4f}; val of the kept model {final_val:.4f}, test {final_test:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
