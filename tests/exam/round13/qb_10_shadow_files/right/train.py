import dataclasses
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import store
from model import Denoiser, clean_and_noisy
from shadow import ShardShadow


@dataclasses.dataclass
class Config:
    steps: int = 18
    batch: int = 16
    lr: float = 3e-3
    eval_every: int = 6
    save_every: int = 0
    out: str = ""
    resume: str = ""

    @classmethod
    def from_argv(cls, argv):
        """key=value pairs"""
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        pairs = dict(a.split("=", 1) for a in argv)
        return cls(**{k: kinds[k](v) for k, v in pairs.items()})


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.model = Denoiser()
        for m in self.model.mix:
            fully_shard(m, reshard_after_forward=False)
        fully_shard(self.model)
        # the model is kept gathered between forward and backward only
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.02)
        self.shadow = ShardShadow(self.model)
        self.step = store.read(cfg.resume, self.model, self.opt, self.shadow) if cfg.resume else 0

    def share(self, *tensors):
        return [t.tensor_split(self.world)[self.rank] for t in tensors]

    def mean(self, value):
        v = value.detach().clone()
        dist.all_reduce(v)
        return v.item() / self.world

    @torch.no_grad()
    def evaluate(self):
        clean, noisy = self.share(*clean_and_noisy(10_000, 32))
        error = self.mean((self.model(noisy) - clean).square().mean())
        # forward without backward leaves the groups gathered
        for m in self.model.mix:
            m.reshard()
        self.model.reshard()
        return error

    def train(self):
        while self.step < self.cfg.steps:
            clean, noisy = self.share(*clean_and_noisy(self.step, self.cfg.batch))
            loss = (self.model(noisy) - clean).square().mean()
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.shadow.update()
            self.step += 1
            shown = self.mean(loss)
            if self.step % self.cfg.eval_every == 0:
                now = self.evaluate()
                with self.shadow.applied():
                    averaged = self.evaluate()
                if self.rank == 0:
                    print(f"{self.step}: train {shown:.5f} eval {now:.5f} averaged {averaged:.5f}")
            if self.cfg.save_every and self.step % self.cfg.save_every == 0:
                store.write(self.cfg.out, self.step, self.model, self.opt, self.shadow)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(Config.from_argv(sys.argv[1:])).train()
    dist.destroy_process_group()
