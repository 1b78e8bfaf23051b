import torch

from walk import HORIZON


@torch.no_grad()
def collect(policy, env, gamma=0.9):
    obs, actions, rewards = [], [], []
    o = env.reset()
    for _ in range(HORIZON):
        a = env.choose(policy(o))
        obs.append(o)
        actions.append(a)
        o, r = env.step(a)
        rewards.append(r)
    ret, returns = torch.zeros(env.n), []
    for r in reversed(rewards):
        ret = r + gamma * ret
        returns.insert(0, ret)
    return torch.stack(obs), torch.stack(actions), torch.stack(returns), torch.stack(rewards)
