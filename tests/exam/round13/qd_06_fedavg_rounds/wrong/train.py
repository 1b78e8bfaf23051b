import os
from argparse import ArgumentParser
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from clients import Client
from server import Server, restore


@dataclass
class Config:
    rounds: int = 6
    local_steps: int = 2
    local_lr: float = 0.1
    batch: int = 24
    width: int = 24
    server_lr: float = 1.0
    server_momentum: float = 0.3


def build(width):
    net = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, 1))
    fully_shard(net[2])
    return fully_shard(net)


def main():
    parser = ArgumentParser()
    parser.add_argument("--rounds", type=int, default=Config.rounds)
    parser.add_argument("--save-round", type=int, default=0, help="write a checkpoint after this round")
    parser.add_argument("--dir", default="federation")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    cfg = Config(rounds=args.rounds)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = build(cfg.width)
    clients = [Client(i, n, 10, seed=300) for i, n in enumerate((96, 48, 32))]
    server = Server(model, clients, cfg.server_lr, cfg.server_momentum)
    path = os.path.join(args.dir, "server")
    first = 0
    if args.resume:
        state = {"model": model.state_dict(), "velocity": server.velocity, "round": torch.tensor(0)}
        dcp.load(state, checkpoint_id=path)
        restore(model, state["model"])
        first = int(state["round"])
    for r in range(first, cfg.rounds):
        loss = server.round(r, cfg, rank, world)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"round {r + 1} weighted client loss {loss.item() / world:.5f}", flush=True)
        if r + 1 == args.save_round:
            dcp.save({"model": model.state_dict(), "velocity": server.velocity, "round": torch.tensor(r + 1)}, checkpoint_id=path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
