import torch
import torch.distributed as dist


def gae(batch, gamma, lam):
    reward, value, done = batch["reward"], batch["value"], batch["done"]
    adv, running, following = torch.zeros_like(reward), 0.0, batch["last"]
    for t in reversed(range(len(reward))):
        alive = 1 - done[t]
        delta = reward[t] + gamma * following * alive - value[t]
        running = delta + gamma * lam * alive * running
        adv[t], following = running, value[t]
    return adv, adv + value


def standardise(x):
    """Mean and deviation over all ranks, in double precision."""
    s = torch.stack([x.double().sum(), x.double().pow(2).sum(), torch.tensor(float(x.numel()), dtype=torch.double)])
    dist.all_reduce(s)
    mean = s[0] / s[2]
    std = (s[1] / s[2] - mean**2).clamp_min(0).sqrt()
    return ((x - mean) / (std + 1e-6)).float()


def all_mean(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def ppo_epochs(agent, optim, batch, epochs, splits, clip, target_kl, seed, total_envs):
    adv, ret = gae(batch, 0.95, 0.9)
    adv = standardise(adv)
    rank, world = dist.get_rank(), dist.get_world_size()
    seen = []
    for epoch in range(epochs):
        order = torch.randperm(total_envs, generator=torch.Generator().manual_seed(seed * 100 + epoch))
        # the split is by time, with an order that every rank knows, so every minibatch is the same set of rows for any world
        times = torch.randperm(len(adv), generator=torch.Generator().manual_seed(int(order[0]) + seed)).chunk(splits)
        for t in times:
            flat = {k: batch[k][t].flatten(0, 1) for k in ("obs", "action", "logp")}
            logp, entropy, value = agent.evaluate(flat["obs"], flat["action"])
            log_ratio = logp - flat["logp"]
            ratio, a = log_ratio.exp(), adv[t].flatten()
            gain = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
            loss = -gain.mean() + 0.5 * (value - ret[t].flatten()).pow(2).mean() - 0.01 * entropy.mean()
            optim.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optim.step()
            seen.append(all_mean(torch.stack([loss.detach(), (ratio - 1 - log_ratio).mean().detach()])))
        if seen[-1][1] > target_kl:  # the same number everywhere, so all ranks leave together
            break
    return torch.stack(seen).mean(0), epoch + 1
