"""Federated averaging over simulated clients; all ranks work together on one client at a time."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from outer import OuterNesterov

SIZES = (48, 96, 64)  # rows that each client owns


def make_clients(seed=31):
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(16, 5, generator=g)
    clients = []
    for size in SIZES:
        shift = 0.7 * torch.randn(16, generator=g)
        x = torch.randn(size, 16, generator=g) + shift
        clients.append((x, (torch.tanh(x) @ teacher).argmax(1)))
    return clients


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU())
        self.head = nn.Linear(40, 5)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--local-steps", type=int, default=4)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0, help="in local steps")
    ap.add_argument("--out", default="fed")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = Net()
    fully_shard(model.body)
    fully_shard(model)
    clients = make_clients()
    inner = torch.optim.SGD(model.parameters(), lr=0.15)
    outer = OuterNesterov(model.named_parameters())

    done = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda name: int(name.split("-")[1]))
        state = {"model": get_model_state_dict(model), "outer": outer.state_dict(), "done": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_model_state_dict(model, state["model"])
        outer.load_state_dict(state["outer"])
        done = state["done"]

    per_round = len(clients) * args.local_steps
    while done < args.rounds * per_round:
        rnd, within = divmod(done, per_round)
        client, k = divmod(within, args.local_steps)
        x, y = clients[client]
        g = torch.Generator().manual_seed(done)
        rows = torch.randperm(len(x), generator=g)[:args.batch].chunk(world)[rank]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        inner.step()
        inner.zero_grad()
        if k + 1 == args.local_steps:
            outer.collect(SIZES[client] / sum(SIZES))
            if client + 1 == len(clients):
                outer.finish_round()
        done += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and k == 0:
            print(f"round {rnd} client {client} loss {shown / world:.4f}")
        if args.save_every and done % args.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), "outer": outer.state_dict(), "done": done},
                     checkpoint_id=os.path.join(args.out, f"local-{done}"))

    if args.export:
        full = {n: t.full_tensor() for n, t in outer.anchor.items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
