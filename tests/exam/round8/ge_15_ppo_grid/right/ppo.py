import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class ActorCritic(nn.Module):
    def __init__(self, inputs=8, width=48, actions=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy = nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.policy(h), self.value(h)


def global_moments(x):
    stats = torch.stack([x.double().sum(), x.double().square().sum(), torch.tensor(float(x.numel()), dtype=torch.float64)])
    dist.all_reduce(stats)
    mean = stats[0] / stats[2]
    return mean.float(), (stats[1] / stats[2] - mean.square()).clamp(min=0).sqrt().float()


class ObservationNorm:
    """Running mean and variance of the observations of all ranks, in float64."""

    def __init__(self, width):
        self.sums = torch.zeros(2 * width + 1, dtype=torch.float64)
        self.sums[-1] = 1e-4

    def update(self, obs):
        flat = obs.flatten(0, -2).double()
        new = torch.cat([flat.sum(0), flat.square().sum(0), torch.tensor([float(len(flat))], dtype=torch.float64)])
        dist.all_reduce(new)
        self.sums += new

    def __call__(self, obs):
        w = obs.shape[-1]
        mean = self.sums[:w] / self.sums[-1]
        std = (self.sums[w:2 * w] / self.sums[-1] - mean.square()).clamp(min=1e-4).sqrt()
        return ((obs.double() - mean) / std).float().clamp(-5, 5)


@torch.no_grad()
def rollout(model, envs, norm, length):
    """Returns obs, actions, log-probs, values, rewards, dones as [time, env] and the value after the last step."""
    rows = []
    for _ in range(length):
        obs = norm(envs.observe())
        logits, value = model(obs)
        value = value.squeeze(1)
        action = (logits + envs.draws.gumbel(logits.shape[1])).argmax(1)
        logp = logits.log_softmax(1).gather(1, action.unsqueeze(1)).squeeze(1)
        raw = envs.observe()
        reward, done = envs.step(action)
        rows.append((obs, action, logp, value, reward, done.float(), raw))
    last = model(norm(envs.observe()))[1].squeeze(1)
    return [torch.stack(c) for c in zip(*rows)], last


def advantages(reward, value, done, last, gamma=0.95, lam=0.9):
    out, running, following = torch.zeros_like(reward), torch.zeros_like(last), last
    for t in reversed(range(len(reward))):
        alive = 1 - done[t]
        delta = reward[t] + gamma * following * alive - value[t]
        running = delta + gamma * lam * alive * running
        out[t], following = running, value[t]
    return out, out + value


def ppo_loss(model, obs, action, old_logp, advantage, target, clip=0.2):
    logits, value = model(obs.flatten(0, 1))
    logp_all = logits.log_softmax(1)
    logp = logp_all.gather(1, action.flatten().unsqueeze(1)).squeeze(1)
    ratio = (logp - old_logp.flatten()).exp()
    a = advantage.flatten()
    policy = -torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).mean()
    entropy = -(logp_all.exp() * logp_all).sum(1).mean()
    kl = (old_logp.flatten() - logp).mean().detach()
    return policy + 0.5 * F.mse_loss(value.squeeze(1), target.flatten()) - 0.01 * entropy, kl
