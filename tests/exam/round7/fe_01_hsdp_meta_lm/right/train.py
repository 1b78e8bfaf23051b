import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoint import CheckpointManager
from config import Config
from data import MarkovText
from model import TinyLM
from parallel import build_mesh, materialize, shard_model


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.mesh = build_mesh()
        with torch.device("meta"):
            model = TinyLM(cfg)
        self.model = shard_model(model, self.mesh)
        materialize(self.model, cfg.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.steps, eta_min=cfg.lr * 0.1)
        self.data = MarkovText(cfg, dist.get_rank(), dist.get_world_size())
        self.ckpt = CheckpointManager(self.model, self.optimizer, self.scheduler)
        self.step = 0

    def train_step(self):
        inputs, targets = self.data.batch(self.step)
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        return loss.item()

    def fit(self, save_every=0, out=None):
        while self.step < self.cfg.steps:
            loss = self.train_step()
            if dist.get_rank() == 0 and (self.step % 4 == 0 or self.step == 1):
                print(f"step {self.step:3d} loss {loss:.6f}", flush=True)
            if save_every and self.step % save_every == 0:
                self.ckpt.save(out, self.step)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    if args.resume:
        trainer.step = trainer.ckpt.load_latest(args.resume)
    trainer.fit(args.save_every, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
