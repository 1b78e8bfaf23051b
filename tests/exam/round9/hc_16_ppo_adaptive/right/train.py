"""PPO: environments divided over the ranks, minibatches of time steps, early end of the epochs and a
learning rate that follows the global KL, advantages standardised over all ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from agent import ActorCritic, log_prob
from env import ACT, Drift

ENVS, HORIZON, EPOCHS, PARTS = 16, 16, 4, 2
GAMMA, LAM, CLIP, TARGET_KL = 0.97, 0.9, 0.2, 0.012


def all_mean(*values):
    t = torch.stack([v.detach().double() for v in values]) / dist.get_world_size()
    dist.all_reduce(t)
    return t


class PPO:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(30)
        self.net = ActorCritic()
        fully_shard(self.net.pi)
        fully_shard(self.net.v)
        fully_shard(self.net)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=2e-3, eps=1e-5)
        self.random = torch.Generator().manual_seed(31)
        self.env = Drift(self.part(0.5 * torch.randn(ENVS, 4, generator=self.random)))
        self.iteration = self.updates = 0

    def part(self, t, dim=0):
        return t.chunk(self.world, dim)[self.rank]

    @torch.no_grad()
    def rollout(self):
        act_noise = self.part(torch.randn(HORIZON, ENVS, ACT, generator=self.random), 1)
        env_noise = self.part(torch.randn(HORIZON, ENVS, 2, generator=self.random), 1)
        rows = []
        for t in range(HORIZON):
            obs = self.env.observe()
            mean, std, value = self.net(obs)
            action = mean + std * act_noise[t]
            reward, done = self.env.step(action, env_noise[t])
            rows.append((obs, action, log_prob(mean, std, action), value, reward, done))
        obs, act, logp, val, rew, done = map(torch.stack, zip(*rows))
        last = self.net(self.env.observe())[2]
        adv, run = torch.zeros_like(rew), torch.zeros_like(last)
        for t in reversed(range(HORIZON)):
            nxt = val[t + 1] if t + 1 < HORIZON else last
            delta = rew[t] + GAMMA * nxt * (1 - done[t]) - val[t]
            run = delta + GAMMA * LAM * (1 - done[t]) * run
            adv[t] = run
        return obs, act, logp, adv, adv + val, rew

    def learn(self, obs, act, logp, adv, ret):
        first, second = all_mean(adv.double().mean(), adv.double().square().mean())
        adv = ((adv - first) / (second - first.square()).sqrt().clamp_min(1e-6)).float()
        for epoch in range(EPOCHS):
            kls = []
            for steps in torch.randperm(HORIZON, generator=self.random).chunk(PARTS):
                o, a, lp, ad, rt = (x[steps].flatten(0, 1) for x in (obs, act, logp, adv, ret))
                mean, std, value = self.net(o)
                log_ratio = log_prob(mean, std, a) - lp
                ratio = log_ratio.exp()
                gain = torch.minimum(ratio * ad, ratio.clamp(1 - CLIP, 1 + CLIP) * ad).mean()
                v_loss = (value - rt).square().mean()
                self.opt.zero_grad()
                (-gain + 0.5 * v_loss - 0.001 * std.log().sum(-1).mean()).backward()
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                self.opt.step()
                self.updates += 1
                kls.append((ratio.detach() - 1 - log_ratio.detach()).mean())
            kl, loss = all_mean(torch.stack(kls).mean(), v_loss).tolist()
            if kl > 2 * TARGET_KL:
                break
        # the learning rate follows the KL of the last epoch, the same on every rank
        factor = 1 / 1.5 if kl > 1.5 * TARGET_KL else 1.5 if kl < TARGET_KL / 1.5 else 1.0
        for group in self.opt.param_groups:
            group["lr"] = min(max(group["lr"] * factor, 1e-4), 8e-3)
        return kl, loss, epoch + 1

    def run_iteration(self):
        obs, act, logp, adv, ret, rew = self.rollout()
        kl, loss, epochs = self.learn(obs, act, logp, adv, ret)
        # the normaliser moves only between iterations: old and new log-probabilities see the same inputs
        self.net.observe(obs.flatten(0, 1))
        self.iteration += 1
        reward = all_mean(rew.mean()).item()
        if self.rank == 0:
            print(f"iteration {self.iteration} updates {self.updates} reward {reward:.5f} value loss {loss:.5f} "
                  f"kl {kl:.5f} epochs {epochs} lr {self.opt.param_groups[0]['lr']:.5f}", flush=True)

    def state(self):
        parts = [torch.empty_like(self.env.state) for _ in range(self.world)]
        dist.all_gather(parts, self.env.state.contiguous())
        m, o = get_state_dict(self.net, self.opt)
        return {"net": m, "opt": o, "env": torch.cat(parts), "random": self.random.get_state(),
                "iteration": self.iteration, "updates": self.updates}

    def load(self, path):
        s = self.state()
        dcp.load(s, checkpoint_id=path)
        set_state_dict(self.net, self.opt, model_state_dict=s["net"], optim_state_dict=s["opt"])
        self.env.state = self.part(s["env"]).clone()
        self.random.set_state(s["random"])
        self.iteration, self.updates = s["iteration"], s["updates"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=12)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=5)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    ppo = PPO()
    if args.resume:
        ppo.load(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
    while ppo.iteration < args.iterations:
        ppo.run_iteration()
        if args.out and ppo.iteration % args.save_every == 0:
            dcp.save(ppo.state(), checkpoint_id=os.path.join(args.out, f"iter{ppo.iteration:03d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
