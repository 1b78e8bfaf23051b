import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from envs import TrackingEnvs
from stats import RunningScale, global_moments


class ActorCritic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3))
        self.v = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, obs):
        return torch.log_softmax(self.pi(obs), dim=-1), self.v(obs)


class PPO:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.net = ActorCritic()
        fully_shard(self.net.pi)
        fully_shard(self.net.v)
        fully_shard(self.net)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=args.lr)
        n = args.envs // self.world
        self.envs = TrackingEnvs(range(self.rank * n, (self.rank + 1) * n), args.seed)
        self.scale = RunningScale()
        self.discounted = torch.zeros(n)
        self.iteration = 0
        self.lr = args.lr

    @torch.no_grad()
    def rollout(self):
        obs, act, logp, val, rew, acc = [], [], [], [], [], []
        for _ in range(self.args.horizon):
            o = self.envs.observe()
            lp, v = self.net(o)
            a = (self.envs.uniforms().unsqueeze(1) > lp.exp().cumsum(1)[:, :-1]).sum(1)
            r = self.envs.step(a)
            self.discounted = 0.97 * self.discounted + r
            obs.append(o), act.append(a), val.append(v[:, 0]), rew.append(r), acc.append(self.discounted)
            logp.append(lp.gather(1, a.unsqueeze(1))[:, 0])
        self.scale.update(torch.stack(acc))
        last = self.net(self.envs.observe())[1][:, 0]
        rewards = torch.stack(rew)
        scaled = rewards / self.scale.std
        adv, running = [], torch.zeros_like(last)
        values = val + [last]
        for t in reversed(range(self.args.horizon)):
            delta = scaled[t] + 0.97 * values[t + 1] - values[t]
            running = delta + 0.97 * 0.9 * running
            adv.insert(0, running)
        adv = torch.stack(adv)
        batch = [torch.stack(b).flatten(0, 1) for b in (obs, act, logp)]
        returns = (adv + torch.stack(val)).flatten()
        mean, std, _ = global_moments(adv)
        adv = ((adv - mean.float()) / (std.float() + 1e-6)).flatten()
        return (*batch, adv, returns), rewards.mean()

    def losses(self, obs, act, old, adv, returns):
        lp, v = self.net(obs)
        chosen = lp.gather(1, act.unsqueeze(1))[:, 0]
        ratio = (chosen - old).exp()
        surrogate = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        value = (v[:, 0] - returns).pow(2).mean()
        entropy = -(lp.exp() * lp).sum(1).mean()
        kl = (ratio.detach() - 1 - (chosen - old).detach()).mean()
        return -surrogate + 0.5 * value - 0.005 * entropy, kl

    def learn(self, batch):
        """Whole-batch epochs until the policy has moved far enough; the decision is one for all ranks."""
        for epoch in range(self.args.epochs):
            loss, kl = self.losses(*batch)
            dist.all_reduce(kl)
            kl = kl.item() / self.world
            if epoch and kl > 1.5 * self.args.target_kl:
                break
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.opt.step()
        # adaptive learning rate after the last KL seen
        if kl > 2 * self.args.target_kl:
            self.lr = max(self.lr / 1.5, 1e-4)
        elif kl < 0.5 * self.args.target_kl:
            self.lr = min(self.lr * 1.5, 2e-2)
        for group in self.opt.param_groups:
            group["lr"] = self.lr
        return epoch, kl

    def state_dict(self):
        return {
            "net": self.net.state_dict(),
            "opt": self.opt.state_dict(),
            "envs": self.envs.state_dict(),
            "scale": vars(self.scale),
            "discounted": self.discounted,
            "iteration": self.iteration,
            "lr": self.lr,
        }

    def load_state_dict(self, s):
        self.net.load_state_dict(s["net"])
        self.opt.load_state_dict(s["opt"])
        self.envs.load_state_dict(s["envs"])
        self.scale.__dict__.update(s["scale"])
        self.discounted, self.iteration, self.lr = s["discounted"], s["iteration"], s["lr"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=14)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--horizon", type=int, default=12)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--target-kl", type=float, default=0.01)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ppo")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    ppo = PPO(args)
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        ppo.load_state_dict(torch.load(os.path.join(args.resume, newest, f"{ppo.rank}.pt"), weights_only=False))
    while ppo.iteration < args.iterations:
        batch, reward = ppo.rollout()
        epochs, kl = ppo.learn(batch)
        ppo.iteration += 1
        dist.all_reduce(reward)
        if ppo.rank == 0:
            print(
                f"iteration {ppo.iteration} reward {reward.item() / ppo.world:.3f} "
                f"last epoch {epochs} kl {kl:.4f} lr {ppo.lr:.5f}",
                flush=True,
            )
        if args.save_every and ppo.iteration % args.save_every == 0:
            folder = os.path.join(args.out, str(ppo.iteration))
            os.makedirs(folder, exist_ok=True)
            torch.save(ppo.state_dict(), os.path.join(folder, f"{ppo.rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
