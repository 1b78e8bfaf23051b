"""Neural-linear bandit: Thompson sampling on Bayesian heads, the features are retrained in between."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from network import FeatureNet
from posterior import LinearPosterior

ARMS, CONTEXT, DIM = 4, 6, 12


class World:
    def __init__(self):
        g = torch.Generator().manual_seed(90)
        self.a = torch.randn(CONTEXT, ARMS, generator=g) / 2
        self.b = torch.randn(CONTEXT, ARMS, generator=g) / 2

    def mean(self, x):
        return torch.sin(x @ self.a * 2) + 0.5 * (x @ self.b)


class Bandit:
    def __init__(self, args):
        self.args = args
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(4)
        self.net = FeatureNet(CONTEXT, 32, DIM, ARMS)
        fully_shard(self.net.trunk)
        fully_shard(self.net)
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=2e-3)
        self.posterior = LinearPosterior(ARMS, DIM)
        self.shared = torch.Generator().manual_seed(55)  # the same stream on all ranks
        self.memory = []  # per round: contexts, arms, rewards of this rank
        self.regret = 0.0
        self.world = World()

    def play_round(self):
        n = self.args.batch
        x = torch.randn(n, CONTEXT, generator=self.shared)
        jitter = 0.2 * torch.randn(n, generator=self.shared)
        theta = self.posterior.sample_weights(torch.randn(ARMS, DIM, generator=self.shared))
        x, jitter = x.chunk(self.size)[self.rank], jitter.chunk(self.size)[self.rank]
        with torch.no_grad():
            f = self.net(x, features_only=True)
        arm = (f.double() @ theta.T).argmax(1)
        mean = self.world.mean(x)
        reward = mean.gather(1, arm[:, None])[:, 0] + jitter
        self.posterior.absorb(f, arm, reward)
        self.memory.append((x, arm, reward))
        regret = (mean.max(1).values - mean.gather(1, arm[:, None])[:, 0]).double().sum() / n
        dist.all_reduce(regret)
        self.regret += regret.item()

    def retrain(self):
        """Some updates on replayed rounds, then the posterior is rebuilt on the new features."""
        for _ in range(self.args.updates):
            rounds = torch.randint(0, len(self.memory), (3,), generator=self.shared).tolist()
            x, arm, reward = (torch.cat(t) for t in zip(*[self.memory[r] for r in rounds]))
            guess = self.net(x).gather(1, arm[:, None])[:, 0]
            loss = (guess - reward).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        self.posterior.reset()
        x, arm, reward = (torch.cat(t) for t in zip(*self.memory))
        with torch.no_grad():
            self.posterior.absorb(self.net(x, features_only=True), arm, reward)
        dist.all_reduce(loss.detach_())
        return loss.item() / self.size

    def save(self, done):
        folder = os.path.join(self.args.out, f"round_{done:04d}")
        os.makedirs(folder, exist_ok=True)
        torch.save(
            {
                "net": self.net.state_dict(),
                "opt": self.opt.state_dict(),
                "posterior": self.posterior.state_dict(),
                "shared": self.shared.get_state(),
                "memory": self.memory,
                "regret": self.regret,
                "done": done,
            },
            os.path.join(folder, f"{self.rank}.pt"),
        )

    def load(self, root):
        folder = os.path.join(root, sorted(os.listdir(root))[-1])
        d = torch.load(os.path.join(folder, f"{self.rank}.pt"), weights_only=False)
        self.net.load_state_dict(d["net"])
        self.opt.load_state_dict(d["opt"])
        self.posterior.load_state_dict(d["posterior"])
        self.shared.set_state(d["shared"])
        self.memory, self.regret = d["memory"], d["regret"]
        return d["done"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--every", type=int, default=4)
    ap.add_argument("--updates", type=int, default=6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="bandit")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    bandit = Bandit(args)
    begin = bandit.load(args.resume) if args.resume else 0
    for r in range(begin, args.rounds):
        bandit.play_round()
        if (r + 1) % args.every == 0:
            loss = bandit.retrain()
            if bandit.rank == 0:
                print(f"round {r + 1} regret so far {bandit.regret:.4f} replay loss {loss:.4f}", flush=True)
        if args.save_every and (r + 1) % args.save_every == 0:
            bandit.save(r + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
