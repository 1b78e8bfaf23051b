import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from balance import BiasBalancer
from moe import MoELM


@dataclass
class Args:
    steps: int = 30
    batch: int = 16
    seq: int = 20
    vocab: int = 40
    lr: float = 5e-3
    balance_speed: float = 0.01
    seed: int = 0


def make_batch(cfg, step, rank, world):
    """Two dialects with different transition rules; the rows of a batch are sorted by dialect."""
    g = torch.Generator().manual_seed(31 * cfg.seed + step)
    dialect = torch.arange(cfg.batch) * 2 // cfg.batch
    ids = [torch.randint(cfg.vocab, (cfg.batch,), generator=g)]
    for _ in range(cfg.seq):
        jump = torch.randint(3, (cfg.batch,), generator=g)
        ids.append((ids[-1] * (1 + 2 * dialect) + 1 + jump + 5 * dialect) % cfg.vocab)
    ids = torch.stack(ids, dim=1).chunk(world)[rank]
    return ids[:, :-1], ids[:, 1:]


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = MoELM(cfg.vocab)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.balancer = BiasBalancer(self.model, cfg.balance_speed)
        self.step = 0

    def loss(self, ids, targets):
        return F.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())

    def train_step(self):
        loss = self.loss(*make_batch(self.cfg, self.step, self.rank, self.world))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.balancer.step()
        self.step += 1
        return self.mean(loss.detach().clone())

    def mean(self, value):
        dist.all_reduce(value)
        return value.item() / self.world

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        loss = self.mean(self.loss(*make_batch(self.cfg, 1_000_000, self.rank, self.world)))
        self.model.train()
        return loss

    def save(self, folder):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model_sd, "optim": optim_sd, "step": self.step}, checkpoint_id=os.path.join(folder, f"{self.step:06d}"))

    def load(self, folder):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        state = {"model": model_sd, "optim": optim_sd, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    run = Experiment(Args())
    if args.resume:
        run.load(args.resume)
    while run.step < run.cfg.steps:
        loss = run.train_step()
        if run.rank == 0 and run.step % 5 == 0:
            print(f"step {run.step} loss {loss:.5f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            run.save(args.out)
    final = run.evaluate()
    if run.rank == 0:
        print(f"evaluation loss {final:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
