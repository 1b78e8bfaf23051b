"""Contextual bandit (a recommender with four arms): rank 0 acts and holds the replay, all ranks learn."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from replay import Replay

ARMS, D = 4, 10
FULL = StateDictOptions(full_state_dict=True)


class QNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.q = nn.Linear(width, ARMS)

    def forward(self, x):
        return self.q(self.body(x))


class Shop:
    """The world outside; only rank 0 talks to it."""

    def __init__(self):
        self.g = torch.Generator().manual_seed(8)
        self.taste = torch.randn(D, ARMS, generator=self.g)

    def visit(self, n):
        return torch.randn(n, D, generator=self.g)

    def buy(self, x, arm):
        return torch.tanh(x @ self.taste).gather(1, arm[:, None])[:, 0] + 0.1 * torch.randn(len(x), generator=self.g)


def act(model, shop, rank, n=16, eps=0.2):
    """All ranks run the forward (it gathers weights); what rank 0 decides is what happens."""
    x = shop.visit(n) if rank == 0 else torch.zeros(n, D)
    with torch.no_grad():
        q = model(x)
    if rank != 0:
        return None, 0.0
    arm = q.argmax(1)
    arm = torch.where(torch.rand(n, generator=shop.g) < eps, torch.randint(ARMS, (n,), generator=shop.g), arm)
    reward = shop.buy(x, arm)
    return torch.cat([x, arm[:, None].float(), reward[:, None]], dim=1), reward.mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = QNet()
    fully_shard(model.body)
    fully_shard(model)
    optim = torch.optim.NAdam(model.parameters(), lr=4e-3)
    shop, replay = Shop(), Replay(d=D)

    step = 0
    if args.resume:
        last = max(int(f.split(".")[0]) for f in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, f"{last}.pt"))
        set_state_dict(model, optim, model_state_dict=ck["model"], optim_state_dict=ck["optim"], options=FULL)
        replay.load(ck["replay"])
        shop.g.set_state(ck["shop"])
        step = ck["step"]
    while step < args.steps:
        rows, reward = act(model, shop, rank)
        replay.add(rows)
        rows, weight = replay.sample(32)
        x, arm, r = rows[:, :D], rows[:, D].long(), rows[:, D + 1]
        error = model(x).gather(1, arm[:, None])[:, 0] - r
        loss = (weight * error.square()).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        replay.feedback(error.detach().abs())
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {mean.item() / world:.4f} reward {reward:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim, options=FULL)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": m, "optim": o, "replay": replay.state(), "shop": shop.g.get_state(), "step": step},
                           os.path.join(args.out, f"{step}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
