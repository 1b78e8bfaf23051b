"""Segmentation of noisy discs. The weights of the best validation loss are restored at the end."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from best import BestKeeper
from data import block_share, discs, share, validation_set
from net import TinyUNet


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model = TinyUNet()
        for part in (self.model.enc1, self.model.enc2, self.model.dec1):
            fully_shard(part)
        fully_shard(self.model, reshard_after_forward=True)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-2)
        self.best = BestKeeper(self.model)
        self.images, self.masks = discs(16, seed=1, noise=0.8)
        self.val_images, self.val_masks = validation_set(16, seed=2)
        self.order = torch.Generator().manual_seed(9)
        self.step = 0

    def train_step(self):
        pick = share(torch.randperm(16, generator=self.order)[:8], self.rank, self.world)
        loss = F.binary_cross_entropy_with_logits(self.model(self.images[pick]), self.masks[pick])
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        logits = self.model(block_share(self.val_images, self.rank, self.world))
        loss = F.binary_cross_entropy_with_logits(logits, block_share(self.val_masks, self.rank, self.world))
        dist.all_reduce(loss)
        loss /= self.world
        self.model.train()
        return loss.item()

    def file(self, step):
        return pathlib.Path(self.args.out) / f"{step:05d}" / f"rank{self.rank}.pt"

    def save(self):
        path = self.file(self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({
            "step": self.step,
            "params": [p.detach().to_local() for p in self.model.parameters()],
            "moments": [{k: v if k == "step" else v.to_local() for k, v in self.opt.state[p].items()}
                        for p in self.model.parameters()],
            "order": self.order.get_state(),
            "best": self.best.state_dict(),
        }, path)
        dist.barrier()

    def resume(self):
        folder = max(pathlib.Path(self.args.resume).iterdir())
        state = torch.load(folder / f"rank{self.rank}.pt")
        self.step = state["step"]
        self.order.set_state(state["order"])
        self.best.load_state_dict(state["best"])
        for p, saved, moments in zip(self.model.parameters(), state["params"], state["moments"]):
            with torch.no_grad():
                p.to_local().copy_(saved)
            entry = {"step": moments["step"]}
            for k in ("exp_avg", "exp_avg_sq"):
                entry[k] = torch.zeros_like(p)
                entry[k].to_local().copy_(moments[k])
            self.opt.state[p] = entry

    def run(self):
        if self.args.resume:
            self.resume()
        while self.step < self.args.steps:
            loss = self.train_step()
            value = self.validate()
            self.best.offer(value, self.step)
            if self.rank == 0:
                print(f"step {self.step} loss {loss:.4f} val {value:.4f} best {self.best.value:.4f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
        self.best.restore()
        final = self.validate()
        if self.rank == 0:
            print(f"restored step {self.best.step}: val {final:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--out")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).run()
    dist.destroy_process_group()
