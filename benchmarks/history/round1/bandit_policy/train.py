"""Policy gradient on a contextual bandit, several episodes over a prompt pool.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 2 train.py --save-dir /tmp/bandit --save-interval 4
    torchrun --nproc-per-node 2 train.py --save-dir /tmp/bandit --resume

Snapshots are scored on held-out contexts; the best one is loaded at the end.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

CONTEXT, WIDTH, ACTIONS = 12, 32, 6
UPDATES_PER_EPISODE = 8
BATCH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, ACTIONS)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Environment:
    """Linear rewards; the logged ones of the training pool are noisy."""

    def __init__(self):
        g = torch.Generator().manual_seed(90)
        self.payoff = torch.randn(CONTEXT, ACTIONS, generator=g) / CONTEXT**0.5

    def contexts(self, seed, noise=0.0):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(BATCH, CONTEXT, generator=g)
        return x, x @ self.payoff + noise * torch.randn(BATCH, ACTIONS, generator=g)

    def share(self, pair, rank, world, device):
        own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        return [t[own].to(device) for t in pair]


class Consumer:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.env = Environment()
        torch.manual_seed(2)
        self.policy = Actor().to(device)
        for block in self.policy.blocks:
            fully_shard(block)
        fully_shard(self.policy)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr)
        self.best = {"score": float("-inf"), "path": ""}
        self.episode, self.step = 0, 0

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def average(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    # -- snapshots ----------------------------------------------------

    def state(self):
        model_sd, optim_sd = get_state_dict(self.policy, self.optimizer)
        progress = {"episode": self.episode, "step": self.step, "best": dict(self.best)}
        return {"policy": model_sd, "optimizer": optim_sd, "progress": progress}

    def save(self):
        name = f"policy-episode-{self.episode}-step-{self.step}"
        score = self.evaluate()
        if score > self.best["score"]:
            self.best = {"score": score, "path": name}
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.save_dir, name))
        if self.rank == 0:
            with open(os.path.join(self.args.save_dir, "latest.json"), "w") as f:
                json.dump({"path": name}, f)
        dist.barrier()
        self.say(f"saved {name}, held-out reward {score:.6f}")

    def load(self, name):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(self.args.save_dir, name))
        set_state_dict(
            self.policy, self.optimizer, model_state_dict=state["policy"], optim_state_dict=state["optimizer"]
        )
        return state["progress"]

    def resume(self):
        with open(os.path.join(self.args.save_dir, "latest.json")) as f:
            progress = self.load(json.load(f)["path"])
        self.episode, self.step, self.best = progress["episode"], progress["step"], progress["best"]
        self.say(f"resumed in episode {self.episode} after step {self.step}")

    # -- training -----------------------------------------------------

    @torch.no_grad()
    def evaluate(self):
        total = 0.0
        for i in range(4):
            x, reward = self.env.share(self.env.contexts(5000 + i), self.rank, self.world, self.device)
            total += self.average((self.policy(x).softmax(-1) * reward).sum(-1).mean())
        return total / 4

    def update(self):
        # the pool is the same in every episode
        x, reward = self.env.share(
            self.env.contexts(100 + self.step, noise=2.0), self.rank, self.world, self.device
        )
        logp = self.policy(x).log_softmax(-1)
        baseline = reward.mean(-1, keepdim=True)
        value = (logp.exp() * (reward - baseline)).sum(-1).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        loss = -value - self.args.entropy * entropy
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.say(f"episode {self.episode} step {self.step} loss {self.average(loss):.6f}")

    def run(self):
        while self.episode < self.args.episodes:
            while self.step < UPDATES_PER_EPISODE:
                self.update()
                if self.args.save_dir and self.args.save_interval:
                    if self.step % self.args.save_interval == 0 or self.step == UPDATES_PER_EPISODE:
                        self.save()
            self.episode, self.step = self.episode + 1, 0

        self.say(f"last policy: held-out reward {self.evaluate():.6f}")
        if self.best["path"]:
            self.load(self.best["path"])
            self.say(f"best policy: held-out reward {self.evaluate():.6f} ({self.best['path']})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--save-dir", default=None)
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if args.save_dir:
        os.makedirs(args.save_dir, exist_ok=True)

    consumer = Consumer(args, device)
    if args.resume:
        consumer.resume()
    consumer.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
