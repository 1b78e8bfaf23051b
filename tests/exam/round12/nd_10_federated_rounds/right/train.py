"""Federated averaging with a server optimizer (FedAdam), simulated on a sharded model.

The clients of a round are trained one after the other; all ranks work on the same client and hold a part of its
batch. The server turns the weighted client drift into a gradient and makes one Adam step on the global weights.
"""
import argparse
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass
class Settings:
    rounds: int = 8
    clients_per_round: int = 3
    local_steps: int = 2
    local_lr: float = 0.1
    server_lr: float = 0.02
    batch: int = 32
    clients: int = 7
    dim: int = 16
    hidden: int = 32
    classes: int = 8


class Clients:
    """Non-iid clients of different size: each prefers some classes."""

    def __init__(self, cfg):
        g = torch.Generator().manual_seed(40)
        centre = 1.5 * torch.randn(cfg.classes, cfg.dim, generator=g)
        self.data = []
        for c in range(cfg.clients):
            n = 64 + 40 * c
            p = torch.ones(cfg.classes)
            p[c % cfg.classes] = 6.0
            y = torch.multinomial(p, n, replacement=True, generator=g)
            self.data.append((centre[y] + torch.randn(n, cfg.dim, generator=g), y))

    def batch(self, client, seed, size):
        x, y = self.data[client]
        idx = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:size]
        return x[idx], y[idx]


class Server:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(9)
        self.model = nn.Sequential(nn.Linear(cfg.dim, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, cfg.classes))
        fully_shard(self.model)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.server_lr, betas=(0.9, 0.99), eps=1e-3)
        self.clients = Clients(cfg)
        self.round = 0

    def local(self):
        return [p.detach().to_local() for p in self.model.parameters()]

    def train_client(self, client):
        sgd = torch.optim.SGD(self.model.parameters(), lr=self.cfg.local_lr, momentum=0.5)
        total = 0.0
        for k in range(self.cfg.local_steps):
            x, y = self.clients.batch(client, 1000 * self.round + 10 * client + k, self.cfg.batch)
            x, y = x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]
            loss = nn.functional.cross_entropy(self.model(x), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            total += loss.item() / self.cfg.local_steps
        sgd.zero_grad()
        return total

    def run_round(self):
        g = torch.Generator().manual_seed(500 + self.round)
        chosen = torch.randperm(self.cfg.clients, generator=g)[:self.cfg.clients_per_round].tolist()
        sizes = [len(self.clients.data[c][1]) for c in chosen]
        anchor = [w.clone() for w in self.local()]
        drift = [torch.zeros_like(w) for w in anchor]
        loss = 0.0
        for client, size in zip(chosen, sizes):
            for w, a in zip(self.local(), anchor):
                w.copy_(a)
            loss += self.train_client(client) / len(chosen)
            for d, w, a in zip(drift, self.local(), anchor):
                d.add_(w - a, alpha=size / sum(sizes))
        for p, w, a, d in zip(self.model.parameters(), self.local(), anchor, drift):
            w.copy_(a)
            p.grad = torch.zeros_like(p)
            p.grad.to_local().sub_(d)
        self.opt.step()
        self.opt.zero_grad()
        self.round += 1
        shown = torch.tensor(loss)
        dist.all_reduce(shown)
        return shown.item() / self.world

    def save(self, out):
        m, o = get_state_dict(self.model, self.opt)
        dcp.save({"model": m, "server_opt": o}, checkpoint_id=os.path.join(out, f"round{self.round}"))
        if self.rank == 0:
            json.dump({"round": self.round}, open(os.path.join(out, "last.json"), "w"))
        dist.barrier()

    def load(self, out):
        self.round = json.load(open(os.path.join(out, "last.json")))["round"]
        m, o = get_state_dict(self.model, self.opt)
        state = {"model": m, "server_opt": o}
        dcp.load(state, checkpoint_id=os.path.join(out, f"round{self.round}"))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["server_opt"])


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-rounds", type=int, default=0)
    ap.add_argument("--out", default="fed")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    server = Server(Settings())
    if args.resume:
        server.load(args.resume)
    while server.round < server.cfg.rounds:
        loss = server.run_round()
        if server.rank == 0:
            print(f"round {server.round} client loss {loss:.4f}", flush=True)
        if args.save_rounds and server.round % args.save_rounds == 0 and server.round < server.cfg.rounds:
            server.save(args.out)
    dist.destroy_process_group()
