import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from callbacks import KeepBest, Log
from data import ring_adjacency, speeds, windows
from model import TrafficNet


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(6)
        self.x, self.adj = speeds(), ring_adjacency(16)
        self.train_ids, self.val_ids = torch.arange(0, 14), torch.arange(60, 244, 4)
        self.model = TrafficNet()
        for c in self.model.convs:
            fully_shard(c)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)
        self.keep = KeepBest(patience=30)
        self.callbacks = [Log(), self.keep]
        self.step, self.last_loss, self.stop = 0, 0.0, False

    def train_step(self):
        g = torch.Generator().manual_seed(500 + self.step)
        ids = self.train_ids[torch.randperm(len(self.train_ids), generator=g)[:8]]
        x, y = windows(self.x, ids[self.rank::self.world])
        loss = F.mse_loss(self.model(x, self.adj), y)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.last_loss = mean.item() / self.world
        self.step += 1

    @torch.no_grad()
    def validate(self):
        # sums and counts: the validation windows need not divide evenly
        mine = self.val_ids[self.rank::self.world]
        total = torch.zeros(2, dtype=torch.float64)
        x, y = windows(self.x, mine)
        err = (self.model(x, self.adj) - y).abs()
        total += torch.tensor([err.double().sum().item(), err.numel()], dtype=torch.float64)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def fit(self):
        while self.step < self.args.steps and not self.stop:
            self.train_step()
            if self.step % 3 == 0:
                mae = self.validate()
                for c in self.callbacks:
                    c.after_eval(self, mae)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
        for c in self.callbacks:
            c.at_end(self)

    def save(self):
        folder = pathlib.Path(self.args.out) / f"s{self.step:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict(), "keep": self.keep.state_dict(),
                    "step": self.step, "last_loss": self.last_loss, "stop": self.stop}, folder / f"part{self.rank}.pt")
        dist.barrier()

    def resume(self, root):
        folder = max(pathlib.Path(root).glob("s????"))
        s = torch.load(folder / f"part{self.rank}.pt", weights_only=False)
        self.model.load_state_dict(s["model"])
        self.opt.load_state_dict(s["opt"])
        self.keep.load_state_dict(s["keep"])
        self.step, self.last_loss, self.stop = s["step"], s["last_loss"], s["stop"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out")
    p.add_argument("--resume")
    p.add_argument("--export")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit()
    mae = trainer.validate()
    full = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if trainer.rank == 0:
        print(f"exported model: validation MAE {mae:.4f}", flush=True)
        if args.export:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
