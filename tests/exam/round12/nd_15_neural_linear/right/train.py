"""Neural-linear bandit with Thompson sampling.

The features are learned by gradient descent in bursts; the last layer never sees a gradient, it is the mean of a
Bayesian linear regression for each arm and is written into the sharded weight after every round.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

ARMS, CONTEXT, FEATURES = 4, 10, 16


class FeatureNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(CONTEXT, hidden), nn.Tanh(), nn.Linear(hidden, FEATURES), nn.Tanh())
        self.last = nn.Linear(FEATURES, ARMS, bias=False)
        self.last.weight.requires_grad_(False)

    def forward(self, x):
        phi = self.features(x)
        return phi, self.last(phi)


class Posterior:
    """Sufficient statistics of the arms; the same on all ranks."""

    def __init__(self, ridge=1.0, forget=0.9, noise=0.1):
        self.ridge, self.forget, self.noise = ridge, forget, noise
        self.gram = torch.zeros(ARMS, FEATURES, FEATURES, dtype=torch.float64)
        self.xty = torch.zeros(ARMS, FEATURES, dtype=torch.float64)

    def update(self, phi, arm, reward):
        phi, reward = phi.double(), reward.double()
        hot = nn.functional.one_hot(arm, ARMS).double()
        gram = torch.einsum("na,nf,ng->afg", hot, phi, phi)
        xty = torch.einsum("na,nf,n->af", hot, phi, reward)
        dist.all_reduce(gram)
        dist.all_reduce(xty)
        self.gram.mul_(self.forget).add_(gram)
        self.xty.mul_(self.forget).add_(xty)

    def precision(self):
        return self.gram + self.ridge * torch.eye(FEATURES, dtype=torch.float64)

    def mean(self):
        return torch.linalg.solve(self.precision(), self.xty)

    def draw(self, seed):
        z = torch.randn(ARMS, FEATURES, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        chol = torch.linalg.cholesky(self.precision())
        return (self.mean() + self.noise * torch.linalg.solve_triangular(chol.mT, z, upper=True)[..., 0]).float()


class World:
    def __init__(self):
        g = torch.Generator().manual_seed(19)
        self.w = 1.5 * torch.randn(CONTEXT, ARMS, generator=g) / CONTEXT ** 0.5

    def contexts(self, step, n):
        return torch.randn(n, CONTEXT, generator=torch.Generator().manual_seed(100 + step))

    def reward(self, x, arm):
        return torch.sin(x @ self.w).gather(1, arm[:, None])[:, 0]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=18)
    ap.add_argument("--burst", type=int, default=4, help="gradient steps in a learning round")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-round", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(44)
    net = fully_shard(FeatureNet(), reshard_after_forward=True)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    post, bandit, first = Posterior(), World(), 0
    if args.resume:
        blob = torch.load(os.path.join(args.resume, "bandit.pt"))
        set_model_state_dict(net, blob["net"], options=StateDictOptions(full_state_dict=True))
        post.gram, post.xty, first = blob["gram"], blob["xty"], blob["round"]

    for r in range(first, args.rounds):
        x = bandit.contexts(r, args.batch).chunk(world)[rank]
        with torch.no_grad():
            phi, _ = net(x)
        arm = (phi @ post.draw(r).T).argmax(-1)
        reward = bandit.reward(x, arm)
        if r % 2 == 0:
            for _ in range(args.burst):
                _, value = net(x)
                loss = (value.gather(1, arm[:, None])[:, 0] - reward).pow(2).mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
        with torch.no_grad():
            phi, _ = net(x)
            post.update(phi, arm, reward)
            mine = net.last.weight.to_local()
            mine.copy_(post.mean().chunk(world)[rank])
            _, value = net(x)
            score = torch.stack([(value.gather(1, arm[:, None])[:, 0] - reward).pow(2).mean(), reward.mean()])
        dist.all_reduce(score)
        if rank == 0:
            print(f"round {r + 1} loss {score[0].item() / world:.5f} reward {score[1].item() / world:.4f}", flush=True)
        if args.save_round == r + 1:
            state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"net": state, "gram": post.gram, "xty": post.xty, "round": r + 1}, os.path.join(args.out, "bandit.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
