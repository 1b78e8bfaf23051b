"""Federated training with SCAFFOLD on clients whose label distributions differ.

The clients of a round are simulated one after the other, each of them by all ranks together.
"""
import argparse
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from scaffold import Scaffold

CLASSES = 6


class ConvNet(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.c1 = nn.Conv2d(1, ch, 3, padding=1)
        self.c2 = nn.Conv2d(ch, ch, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, ch)
        self.fc = nn.Linear(ch * 16, CLASSES)

    def forward(self, x):
        x = F.gelu(self.c1(x))
        x = F.gelu(self.norm(self.c2(x)))
        return self.fc(x.flatten(1))


def make_federation(num_clients, seed=12):
    g = torch.Generator().manual_seed(seed)
    shapes = torch.randn(CLASSES, 1, 8, 8, generator=g)

    def draw(n, probs):
        y = torch.multinomial(probs, n, replacement=True, generator=g)
        return shapes[y] + 0.8 * torch.randn(n, 1, 8, 8, generator=g), y

    clients = []
    for k in range(num_clients):
        probs = torch.full((CLASSES,), 0.04)
        probs[k % CLASSES] += 0.5
        probs[(k + 1) % CLASSES] += 0.3
        clients.append(draw(32 + 8 * k, probs))
    return clients, draw(101, torch.ones(CLASSES) / CLASSES)


@torch.no_grad()
def accuracy(model, test, rank, world):
    """The test set does not divide evenly: count on every rank, then add up."""
    x, y = test[0][rank::world], test[1][rank::world]
    counts = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--clients", type=int, default=4)
    ap.add_argument("--per-round", type=int, default=2)
    ap.add_argument("--local-steps", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path, default=Path("scaffold"))
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = ConvNet()
    fully_shard(model.c2)
    fully_shard(model)
    clients, test = make_federation(args.clients)
    fed = Scaffold(model, args.clients, local_lr=0.1)
    picker = random.Random(55)

    rnd = 0
    if args.resume:
        newest = max(args.resume.iterdir(), key=lambda d: int(d.name.removeprefix("round")))
        state = {"fed": fed.state_dict(), "picker": None, "round": 0}
        dcp.load(state, checkpoint_id=str(newest))  # fills the tensors of `fed` in place
        picker.setstate(state["picker"])
        rnd = state["round"]

    while rnd < args.rounds:
        inbox, shown = {}, torch.zeros(())
        for client in picker.sample(range(args.clients), args.per_round):
            fed.send()
            x, y = clients[client]
            for k in range(args.local_steps):
                g = torch.Generator().manual_seed((rnd * 100 + client) * 100 + k)
                rows = torch.randperm(len(x), generator=g)[:args.batch].chunk(world)[rank]
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                fed.local_step(client)
                shown += loss.detach() / (args.per_round * args.local_steps)
            fed.receive(client, args.local_steps, inbox)
        fed.end_round(inbox, args.per_round)
        rnd += 1

        fed.send()
        acc = accuracy(model, test, rank, world)
        dist.all_reduce(shown)
        if rank == 0:
            print(f"round {rnd} local loss {shown / world:.4f} server accuracy {acc:.3f}")
        if args.save_every and rnd % args.save_every == 0:
            dcp.save({"fed": fed.state_dict(), "picker": picker.getstate(), "round": rnd},
                     checkpoint_id=str(args.out / f"round{rnd}"))

    fed.send()
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
