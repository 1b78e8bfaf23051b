import torch
import torch.distributed as dist


@torch.no_grad()
def collect(actor, critic, envs, horizon=16, gamma=0.97, lam=0.9):
    obs, acts, logps, vals, rews = [], [], [], [], []
    for _ in range(horizon):
        o = envs.observe()
        logp = actor(o).log_softmax(1)
        a = (logp.exp().cumsum(1) < envs.uniform()[:, None]).sum(1).clamp(max=2)  # inverse CDF
        obs.append(o), acts.append(a), vals.append(critic(o).squeeze(1))
        logps.append(logp.gather(1, a[:, None]).squeeze(1))
        rews.append(envs.act(a))
    nxt, adv, out = critic(envs.observe()).squeeze(1), 0.0, []
    for t in reversed(range(horizon)):
        adv = rews[t] + gamma * nxt - vals[t] + gamma * lam * adv
        nxt = vals[t]
        out.append(adv)
    adv = torch.stack(out[::-1])
    ret = adv + torch.stack(vals)
    # statistics over the environments of all ranks
    s = torch.stack([adv.sum(), adv.pow(2).sum(), torch.tensor(float(adv.numel())), torch.stack(rews).sum()]).double()
    dist.all_reduce(s)
    mean = s[0] / s[2]
    std = (s[1] / s[2] - mean**2).clamp(min=1e-12).sqrt()
    adv = ((adv - mean) / std).float()
    return torch.stack(obs), torch.stack(acts), torch.stack(logps), adv, ret, (s[3] / s[2]).item()
