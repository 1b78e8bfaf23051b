"""PPO: every rank steps all (cheap) environments in the same way and learns from its own slice of them."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from agent import RunningScale, build_agent
from env import GridWorlds

ENVS, HORIZON, PPO_EPOCHS, MINIBATCHES, UPDATES = 64, 12, 2, 2, 8
GAMMA, LAMBDA, CLIP = 0.95, 0.9, 0.2


def global_moments(x):
    """Count, mean and sum of squared deviations over all ranks."""
    total = torch.stack([torch.tensor(float(x.numel()), dtype=torch.float64), x.double().sum()])
    dist.all_reduce(total)
    mean = total[1] / total[0]
    m2 = (x.double() - mean).square().sum()
    dist.all_reduce(m2)
    return total[0].item(), mean.item(), m2.item()


@torch.no_grad()
def rollout(agent, envs):
    obs, act, logp, val, rew, end = ([] for _ in range(6))
    for _ in range(HORIZON):
        o = envs.observe()
        lp, v = agent(o)
        # inverse CDF with the shared uniforms, in double so that all ranks and world sizes choose alike
        cdf = lp.double().exp().cumsum(1)
        a = (envs.uniform().double()[:, None] * cdf[:, -1:] > cdf).sum(1)
        r, done = envs.step(a)
        for store, item in zip((obs, act, logp, val, rew, end), (o, a, lp.gather(1, a[:, None]).squeeze(1), v, r, done.float())):
            store.append(item)
    _, last = agent(envs.observe())
    return tuple(torch.stack(s) for s in (obs, act, logp, val, rew, end)), last


def gae(val, rew, end, last):
    adv, run = torch.zeros_like(rew), torch.zeros_like(last)
    nxt = last
    for t in reversed(range(HORIZON)):
        alive = 1 - end[t]
        run = rew[t] + GAMMA * nxt * alive - val[t] + GAMMA * LAMBDA * alive * run
        adv[t], nxt = run, val[t]
    return adv


class PPO:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.agent = build_agent(0)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=3e-3, eps=1e-5)
        self.envs = GridWorlds(ENVS, seed=8)
        self.scale = RunningScale()
        self.update = 0

    def learn(self):
        (obs, act, logp, val, rew, end), last = rollout(self.agent, self.envs)
        mean_reward = rew.mean().item()
        std = self.scale.std
        adv = gae(val * std, rew, end, last * std)
        returns = adv + val * std
        self.scale.update(*global_moments(returns.chunk(self.world, dim=1)[self.rank]))
        target = returns / self.scale.std
        for epoch in range(PPO_EPOCHS):
            g = torch.Generator().manual_seed(1000 * self.update + epoch)
            for columns in torch.randperm(ENVS, generator=g).chunk(MINIBATCHES):
                mine = columns.chunk(self.world)[self.rank]
                self.minibatch(*(t[:, mine].flatten(0, 1) for t in (obs, act, logp, adv, target)))
        self.update += 1
        return mean_reward

    def minibatch(self, obs, act, old_logp, adv, target):
        count, mean, m2 = global_moments(adv)
        adv = (adv - mean) / ((m2 / count) ** 0.5 + 1e-6)
        logp_all, value = self.agent(obs)
        ratio = (logp_all.gather(1, act[:, None]).squeeze(1) - old_logp).exp()
        policy = -torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
        entropy = -(logp_all.exp() * logp_all).sum(1).mean()
        loss = policy + 0.5 * (value - target).square().mean() - 0.01 * entropy
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
        self.optimizer.step()

    def state(self):
        model_sd, optim_sd = get_state_dict(self.agent, self.optimizer)
        return {"agent": model_sd, "optim": optim_sd, "envs": self.envs.state_dict(), "scale": vars(self.scale).copy(), "update": self.update}

    def restore(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.agent, self.optimizer, model_state_dict=state["agent"], optim_state_dict=state["optim"])
        self.envs.load_state_dict(state["envs"])
        vars(self.scale).update(state["scale"])
        self.update = state["update"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    ppo = PPO()
    if args.resume:
        ppo.restore(os.path.join(args.resume, max(os.listdir(args.resume))))
    while ppo.update < UPDATES:
        reward = ppo.learn()
        if ppo.rank == 0 and ppo.update % 2 == 0:
            print(f"update {ppo.update} reward per step {reward:.5f} return std {ppo.scale.std:.5f}", flush=True)
        if args.save_every and ppo.update % args.save_every == 0:
            dcp.save(ppo.state(), checkpoint_id=os.path.join(args.out, f"update_{ppo.update:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
