import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from callbacks import Checkpointer, Evaluate, Logger
from data import Shapes


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(), nn.MaxPool2d(2))


def build_model(mesh, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(conv_block(1, 16), conv_block(16, 32), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Trainer:
    def __init__(self, steps, accumulate, micro_batch, callbacks):
        rank, world = dist.get_rank(), dist.get_world_size()
        replicas = 2 if world % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
        self.model = build_model(mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
        self.data = Shapes(rank, world, micro_batch)
        self.steps, self.accumulate, self.callbacks = steps, accumulate, callbacks
        self.step = 0

    def optimizer_step(self):
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for i, (x, y) in enumerate(self.data.micro_batches(self.step, self.accumulate)):
            # reduce-scatter inside a node for every micro-batch, all-reduce between nodes only once
            self.model.set_requires_all_reduce((i + 1) % self.accumulate == 0)
            loss = F.cross_entropy(self.model(x), y) / self.accumulate
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.step += 1
        return total

    def fit(self):
        while self.step < self.steps:
            loss = self.optimizer_step()
            for callback in self.callbacks:
                callback.on_step_end(self, loss)
        for callback in self.callbacks:
            callback.on_train_end(self)

    def local_state(self):
        params = {n: p.to_local().detach().clone() for n, p in self.model.named_parameters()}
        momentum = {n: self.optimizer.state[p]["momentum_buffer"].to_local().clone() for n, p in self.model.named_parameters()}
        return {"params": params, "momentum": momentum, "step": self.step}

    @torch.no_grad()
    def load_local_state(self, state):
        for name, p in self.model.named_parameters():
            p.to_local().copy_(state["params"][name])
            buffer = torch.zeros_like(p)
            buffer.to_local().copy_(state["momentum"][name])
            self.optimizer.state[p]["momentum_buffer"] = buffer
        self.step = state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    callbacks = [Logger(5), Checkpointer(args.out, args.save_every), Evaluate()]
    trainer = Trainer(args.steps, args.accumulate, micro_batch=32, callbacks=callbacks)
    if args.resume:
        trainer.load_local_state(Checkpointer.latest(args.resume))
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
