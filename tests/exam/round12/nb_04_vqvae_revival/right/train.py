import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nets import build


def tiles(n, seed=8):
    """16x16 images assembled from a small alphabet of 4x4 tiles."""
    g = torch.Generator().manual_seed(seed)
    alphabet = torch.randn(20, 4, 4, generator=g)
    layout = torch.randint(20, (n, 4, 4), generator=g)
    return alphabet[layout].permute(0, 1, 3, 2, 4).reshape(n, 1, 16, 16)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.net = build()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.0)
        self.data = tiles(64)
        self.step = 0

    def save(self, where):
        model, optim = get_state_dict(self.net, self.opt)
        dcp.save({"model": model, "optim": optim, "step": self.step}, checkpoint_id=where)

    def load(self, where):
        model, optim = get_state_dict(self.net, self.opt)
        state = {"model": model, "optim": optim, "step": 0}
        dcp.load(state, checkpoint_id=where)
        set_state_dict(self.net, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]

    def batch(self):
        g = torch.Generator().manual_seed(self.step)
        idx = torch.randperm(len(self.data), generator=g)[:self.args.batch]
        return self.data[idx.chunk(self.world)[self.rank]]

    def fit(self):
        while self.step < self.args.steps:
            x = self.batch()
            y, commit, index = self.net(x)
            loss = (y - x).pow(2).mean() + 0.25 * commit
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            if self.step % 6 == 0:
                value = loss.detach() / self.world
                dist.all_reduce(value)
                if self.rank == 0:
                    print(f"step {self.step} loss {value.item():.5f} codes in use {index.unique().numel()}", flush=True)
            if self.args.save and self.step % self.args.every == 0:
                self.save(Path(self.args.save) / f"{self.step:04d}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--save")
    p.add_argument("--every", type=int, default=14)
    p.add_argument("--load")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.load:
        trainer.load(sorted(Path(args.load).iterdir())[-1])
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
