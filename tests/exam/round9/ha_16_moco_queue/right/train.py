"""Momentum contrast for graphs: a trained query encoder, a momentum encoder and a queue of keys."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, get_model_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from encoder import GraphEncoder
from graphs import FEATURES, augment, graphs
from queue_loss import KeyQueue, gather_in_order


class Moco(Stateful):
    def __init__(self, args):
        self.args, self.step = args, 0
        self.query, self.key = self.encoder(), self.encoder()
        self.key.requires_grad_(False)
        self.queue = KeyQueue(args.queue, 16, seed=99)
        # follows the query encoder after each optimizer step
        self.optimizer = torch.optim.SGD(self.query.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.optimizer.register_step_post_hook(lambda *_: self.follow())

    def encoder(self):
        torch.manual_seed(self.args.seed)
        net = GraphEncoder(FEATURES)
        for conv in net.convs:
            fully_shard(conv)
        return fully_shard(net, reshard_after_forward=True)

    def momentum(self):
        """From the base value to 1 along a cosine."""
        done = self.step / self.args.steps
        return 1 - (1 - self.args.momentum) * 0.5 * (1 + math.cos(math.pi * done))

    @torch.no_grad()
    def follow(self):
        m = self.momentum()
        for k, q in zip(self.key.parameters(), self.query.parameters()):
            k.lerp_(q.detach(), 1 - m)

    def train_step(self, rank, world):
        x, adj, _ = graphs(self.step, self.args.batch)
        one, two = (tuple(t[rank::world] for t in augment(x, adj, self.step, view)) for view in (1, 2))
        q = self.query(*one)
        with torch.no_grad():
            k = self.key(*two)
        loss = self.queue.loss(q, k, self.args.temperature)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.queue.push(k)
        self.step += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        return mean.item()

    @torch.no_grad()
    def neighbour_accuracy(self, rank, world, n=64):
        """Share of graphs whose nearest other graph is of the same family."""
        x, adj, family = graphs(0, n, seed=555_555)
        z = gather_in_order(self.key(x[rank::world], adj[rank::world]))
        nearest = (z @ z.T - 2 * torch.eye(n)).argmax(1)
        return (family[nearest] == family).float().mean().item()

    def state_dict(self):
        weights, optim = get_state_dict(self.query, self.optimizer)
        return {"query": weights, "optim": optim, "key": get_model_state_dict(self.key),
                "queue": self.queue.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.query, self.optimizer, model_state_dict=state["query"], optim_state_dict=state["optim"])
        set_model_state_dict(self.key, state["key"])
        self.queue.load_state_dict(state["queue"])
        self.step = state["step"]


def resume(moco, folder):
    newest = max((n for n in os.listdir(folder) if n.startswith("moco-")), key=lambda n: int(n[5:]))
    dcp.load({"moco": moco}, checkpoint_id=os.path.join(folder, newest))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--queue", type=int, default=72)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--momentum", type=float, default=0.9)
    p.add_argument("--temperature", type=float, default=0.2)
    p.add_argument("--seed", type=int, default=14)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out")
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    moco = Moco(args)
    if args.resume:
        resume(moco, args.resume)
    while moco.step < args.steps:
        loss = moco.train_step(rank, world)
        if rank == 0:
            print(f"step {moco.step:2d} loss {loss:.5f} queue head {int(moco.queue.head)}")
        if moco.step % 8 == 0:
            accuracy = moco.neighbour_accuracy(rank, world)
            if rank == 0:
                print(f"   nearest neighbour of the same family: {accuracy:.3f}")
        if args.save_every and moco.step % args.save_every == 0 and moco.step < args.steps:
            dcp.save({"moco": moco}, checkpoint_id=os.path.join(args.out, f"moco-{moco.step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
