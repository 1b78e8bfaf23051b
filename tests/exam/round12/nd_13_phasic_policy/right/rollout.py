"""On-policy rollouts of a regulator task, and global statistics of what was collected."""
import torch
import torch.distributed as dist

from nets import log_prob

OBS, ACT, ENVS, HORIZON = 6, 4, 32, 4


def mean(x):
    s = torch.stack([x.double().sum(), torch.tensor(float(x.numel()), dtype=torch.float64)])
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


@torch.no_grad()
def collect(policy, value, iteration, gamma=0.9):
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(90)
    push = 0.5 * torch.randn(ACT, OBS, generator=g)
    g = torch.Generator().manual_seed(910 + iteration)
    state = torch.randn(ENVS, OBS, generator=g).chunk(world)[rank]
    noise = torch.randn(HORIZON, ENVS, ACT, generator=g).chunk(world, 1)[rank]
    obs, act, old, rew = [], [], [], []
    for t in range(HORIZON):
        m, s, _ = policy(state)
        a = m + s * noise[t]
        obs.append(state), act.append(a), old.append(log_prob(m, s, a))
        state = 0.95 * state + a @ push
        rew.append(-state.pow(2).mean(-1) - 0.02 * a.pow(2).mean(-1))
    ret, running = [], value(state)
    for r in reversed(rew):
        running = r + gamma * running
        ret.insert(0, running)
    batch = {"obs": torch.cat(obs), "act": torch.cat(act), "old": torch.cat(old), "ret": torch.cat(ret)}
    adv = batch["ret"] - value(batch["obs"])
    centre = mean(adv)
    batch["adv"] = (adv - centre) / (mean((adv - centre).pow(2)) ** 0.5 + 1e-6)
    return batch, mean(torch.cat(rew))
