"""Random network distillation: the predictor learns a fixed random network on visited states;
its remaining error is the novelty bonus."""
import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STATE, FEATURES = 8, 16


def make_net(width):
    return nn.Sequential(
        nn.Linear(STATE, width),
        nn.ELU(),
        nn.Linear(width, width),
        nn.ELU(),
        nn.Linear(width, FEATURES),
    )


class Walkers:
    """Random walks; a walker's own generator makes it independent of where it is simulated."""

    def __init__(self, ids, seed):
        self.gens = [torch.Generator().manual_seed(seed * 7919 + i) for i in ids]
        self.state = torch.stack([torch.randn(STATE, generator=g) * 0.3 for g in self.gens])

    def advance(self):
        kick = torch.stack([torch.randn(STATE, generator=g) for g in self.gens])
        self.state = 0.9 * self.state + 0.3 * kick
        return self.state

    def state_dict(self):
        return {"state": self.state, "gens": [g.get_state() for g in self.gens]}

    def load_state_dict(self, d):
        self.state = d["state"]
        for g, s in zip(self.gens, d["gens"]):
            g.set_state(s)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.predictor = make_net(48)
        self.target = make_net(24).requires_grad_(False)
        # the observation noise is drawn on each rank
        torch.manual_seed(args.seed + 1 + self.rank)
        for layer in self.predictor:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(self.predictor)
        self.opt = torch.optim.Adam(self.predictor.parameters(), lr=args.lr)
        n = args.walkers // self.world
        self.walkers = Walkers(range(self.rank * n, (self.rank + 1) * n), args.seed)
        self.step = 0

    def train_step(self):
        states = self.walkers.advance()
        states = states + self.args.noise * torch.randn_like(states)
        error = (self.predictor(states) - self.target(states)).pow(2).mean(dim=1)
        loss = error.mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.step += 1
        return loss.detach()

    def _file(self, folder):
        return os.path.join(folder, f"rank{self.rank}.pt")

    def save(self):
        folder = os.path.join(self.args.out, str(self.step))
        os.makedirs(folder, exist_ok=True)
        torch.save(
            {
                "predictor": self.predictor.state_dict(),
                "opt": self.opt.state_dict(),
                "walkers": self.walkers.state_dict(),
                "rng": torch.get_rng_state(),
                "step": self.step,
            },
            self._file(folder),
        )
        dist.barrier()
        if self.rank == 0:
            with open(os.path.join(self.args.out, "latest.json"), "w") as f:
                json.dump({"folder": str(self.step)}, f)

    def resume(self, root):
        with open(os.path.join(root, "latest.json")) as f:
            folder = os.path.join(root, json.load(f)["folder"])
        d = torch.load(self._file(folder), weights_only=False)
        self.predictor.load_state_dict(d["predictor"])
        self.opt.load_state_dict(d["opt"])
        self.walkers.load_state_dict(d["walkers"])
        torch.set_rng_state(d["rng"])
        self.step = d["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--walkers", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--noise", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="rnd")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.resume(args.resume)
    while trainer.step < args.steps:
        loss = trainer.train_step()
        if trainer.step % 20 == 0:
            dist.all_reduce(loss)
            if trainer.rank == 0:
                print(f"step {trainer.step} novelty {loss.item() / trainer.world:.6f}", flush=True)
        if args.save_every and trainer.step % args.save_every == 0:
            trainer.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
