import argparse
import glob
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from data import ClickLog, ShardedLoader
from model import Ranker, parallelize


@dataclass
class TrainConfig:
    steps: int = 24
    batch_size: int = 128
    lr: float = 5e-3
    tp: int = 2
    seed: int = 0
    train_size: int = 2048
    eval_size: int = 512


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        world = dist.get_world_size()
        tp = cfg.tp if world % cfg.tp == 0 else 1
        self.mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(cfg.seed)
        model = Ranker(users=60, items=80, dense=6, dim=16, hidden=64, depth=3)
        self.model = parallelize(model, self.mesh)
        # the tensor parallel and the plain parameters live on different meshes
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr, foreach=False)
        self.log = ClickLog(cfg.train_size + cfg.eval_size)
        dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
        self.loader = ShardedLoader(self.log, cfg.train_size, cfg.batch_size, dp_rank, dp_size)
        self.step = 0

    def train_step(self):
        user, item, dense, label = self.loader.batch(self.step)
        loss = F.binary_cross_entropy_with_logits(self.model(user, item, dense), label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        user, item, dense, label = self.log.take(torch.arange(self.cfg.train_size, self.cfg.train_size + self.cfg.eval_size))
        loss = F.binary_cross_entropy_with_logits(self.model(user, item, dense), label)
        self.model.train()
        return loss.item()

    def save(self, folder):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model_sd, "optim": optim_sd, "step": self.step},
                 checkpoint_id=os.path.join(folder, f"ckpt-{self.step:05d}"))

    def resume(self, folder):
        latest = sorted(glob.glob(os.path.join(folder, "ckpt-*")))[-1]
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        state = {"model": model_sd, "optim": optim_sd, "step": 0}
        dcp.load(state, checkpoint_id=latest)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(TrainConfig())
    if args.resume:
        trainer.resume(args.resume)
    while trainer.step < trainer.cfg.steps:
        loss = trainer.train_step()
        if dist.get_rank() == 0 and trainer.step % 6 == 0:
            print(f"step {trainer.step} loss {loss:.5f}", flush=True)
        if args.save_every and trainer.step % args.save_every == 0:
            trainer.save(args.out)
    held_out = trainer.evaluate()
    if dist.get_rank() == 0:
        print(f"held-out loss {held_out:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
