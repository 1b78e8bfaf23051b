"""A denoising autoencoder trained with a schedule-free optimizer, with evaluation in between."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from schedule_free import ScheduleFreeAdamW


class Denoiser(nn.Module):
    def __init__(self, features=24, dim=48):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(features, dim), nn.GELU(), nn.Linear(dim, 6))
        self.decode = nn.Sequential(nn.Linear(6, dim), nn.GELU(), nn.Linear(dim, features))

    def forward(self, x):
        return self.decode(self.encode(x))


def data(n, seed):
    basis = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(seed)
    clean = torch.tanh(torch.randn(n, 4, generator=g) @ basis)
    return clean + 0.3 * torch.randn(n, 24, generator=g), clean


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(19)
        self.model = Denoiser()
        fully_shard(self.model.encode)
        fully_shard(self.model.decode)
        fully_shard(self.model)
        self.opt = ScheduleFreeAdamW(self.model.parameters(), weight_decay=0.01)
        self.done = 0

    def part(self, tensors):
        n = len(tensors[0]) // self.world
        return [t[self.rank * n : (self.rank + 1) * n] for t in tensors]

    def state(self):
        params = dict(self.model.named_parameters())
        group = self.opt.param_groups[0]
        return {
            "y": {n: p.detach() for n, p in params.items()},
            "z": {n: self.opt.state[p]["z"] for n, p in params.items()},
            "v": {n: self.opt.state[p]["v"] for n, p in params.items()},
            "scalars": {"k": group["k"], "weight_sum": group["weight_sum"], "done": self.done},
        }

    def load(self, folder):
        newest = sorted(os.listdir(folder))[-1]
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))  # fills the shards in place
        s = state["scalars"]
        self.opt.param_groups[0].update(k=s["k"], weight_sum=s["weight_sum"])
        self.done = s["done"]

    def train_step(self):
        noisy, clean = self.part(data(64, seed=100 + self.done))
        loss = F.mse_loss(self.model(noisy), clean)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.done += 1
        loss = loss.detach() / self.world
        dist.all_reduce(loss)
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        noisy, clean = self.part(data(256, seed=1))
        loss = F.mse_loss(self.model(noisy), clean) / self.world
        dist.all_reduce(loss)
        return loss.item()

    def run(self):
        while self.done < self.args.steps:
            loss = self.train_step()
            if self.args.save_every and self.done % self.args.save_every == 0:
                dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"{self.done:06d}"))
            if self.rank == 0:
                print(f"step {self.done} loss {loss:.5f}", flush=True)
        # the run is evaluated and exported at the averaged point
        self.opt.eval()
        score = self.evaluate()
        if self.rank == 0:
            print(f"held-out {score:.5f}")
        if self.args.export:
            full = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if self.rank == 0:
                torch.save(full, self.args.export)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="denoiser")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.run()
    dist.destroy_process_group()
