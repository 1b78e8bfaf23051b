"""PPO on grids with FSDP2; a checkpoint holds the learner and the state of the environments."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from env import Draws, GridEnvs
from ppo import ActorCritic, ObservationNorm, advantages, global_moments, ppo_loss, rollout


def average(x):
    x = x.clone() / dist.get_world_size()
    dist.all_reduce(x)
    return x.item()


class Learner:
    def __init__(self, args):
        self.args = args
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(33)
        self.model = ActorCritic()
        fully_shard(self.model.trunk)
        fully_shard(self.model, reshard_after_forward=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, eps=1e-5)
        self.norm = ObservationNorm(8)
        self.draws = Draws(34, args.envs, rank, world)
        self.envs = GridEnvs(args.envs // world, self.draws)
        self.shuffle = torch.Generator().manual_seed(35)
        self.iteration = 0
        self.updates = 0

    def iterate(self):
        (obs, action, logp, value, reward, done, raw), last = rollout(self.model, self.envs, self.norm, self.args.length)
        advantage, target = advantages(reward, value, done, last)
        mean, std = global_moments(advantage)
        advantage = (advantage - mean) / (std + 1e-6)
        stopped = False
        for _ in range(self.args.epochs):
            # Minibatches are sets of times, so every rank has its environments in each of them.
            for times in torch.randperm(self.args.length, generator=self.shuffle).chunk(2):
                loss, kl = ppo_loss(self.model, obs[times], action[times], logp[times], advantage[times], target[times])
                if average(kl) > self.args.max_kl:
                    stopped = True
                    break
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.updates += 1
            if stopped:
                break
        self.norm.update(raw)
        self.iteration += 1
        return average(reward.mean()), average(done.mean()), average(loss.detach())

    def files(self, folder, iteration):
        return Path(folder) / str(iteration) / f"{dist.get_rank()}.pt"

    def save(self, folder):
        path = self.files(folder, self.iteration)
        path.parent.mkdir(parents=True, exist_ok=True)
        params = list(self.model.parameters())
        torch.save({
            "params": [p.to_local().detach() for p in params],
            "adam": [[self.optimizer.state[p][k].to_local() for k in ("exp_avg", "exp_avg_sq")] for p in params],
            "adam_step": [self.optimizer.state[p]["step"] for p in params],
            "norm": self.norm.sums, "agent": self.envs.agent, "goal": self.envs.goal,
            "draws": self.draws.g.get_state(), "shuffle": self.shuffle.get_state(),
            "iteration": self.iteration, "updates": self.updates,
        }, path)
        dist.barrier()

    @torch.no_grad()
    def load(self, folder):
        state = torch.load(self.files(folder, max(int(p.name) for p in Path(folder).iterdir())))
        for p, shard, (m, v), step in zip(self.model.parameters(), state["params"], state["adam"], state["adam_step"]):
            p.to_local().copy_(shard)
            moments = [torch.zeros_like(p), torch.zeros_like(p)]
            for moment, values in zip(moments, (m, v)):
                moment.to_local().copy_(values)
            self.optimizer.state[p] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        self.norm.sums = state["norm"]
        self.envs.agent, self.envs.goal = state["agent"], state["goal"]
        self.draws.g.set_state(state["draws"])
        self.shuffle.set_state(state["shuffle"])
        self.iteration, self.updates = state["iteration"], state["updates"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--max-kl", type=float, default=0.03)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    learner = Learner(args)
    if args.resume:
        learner.load(args.resume)
    while learner.iteration < args.iterations:
        reward, goals, loss = learner.iterate()
        if dist.get_rank() == 0:
            print(f"iteration {learner.iteration} updates {learner.updates} reward {reward:.4f} goals {goals:.4f} loss {loss:.5f}", flush=True)
        if args.save_every and learner.iteration % args.save_every == 0:
            learner.save(args.save_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
