import torch

from nets import kl, log_prob
from rollout import mean


def policy_phase(policy, opt, batch, epochs, target_kl, clip=0.2):
    """Clipped surrogate epochs; stops as soon as the policy has moved far enough."""
    done = 0
    for _ in range(epochs):
        m, s, _ = policy(batch["obs"])
        lp = log_prob(m, s, batch["act"])
        ratio = (lp - batch["old"]).exp()
        surrogate = torch.min(ratio * batch["adv"], ratio.clamp(1 - clip, 1 + clip) * batch["adv"])
        if mean((ratio - 1 - (lp - batch["old"])).detach()) > target_kl:
            policy.reshard()
            break
        opt.zero_grad()
        (-surrogate.mean()).backward()
        opt.step()
        done += 1
    return done


def value_phase(value, opt, batch, epochs):
    for _ in range(epochs):
        loss = (value(batch["obs"]) - batch["ret"]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return mean(loss.detach().reshape(1))


def auxiliary_phase(policy, opt, memory, epochs, keep=1.0):
    """Distil values into the policy's body and hold the action distribution where it is."""
    obs = torch.cat([b["obs"] for b in memory])
    ret = torch.cat([b["ret"] for b in memory])
    with torch.no_grad():
        m0, s0, _ = policy(obs)
    for _ in range(epochs):
        m, s, v = policy(obs, aux=True)
        loss = 0.5 * (v - ret).pow(2).mean() + keep * kl(m0, s0, m, s).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return mean(loss.detach().reshape(1))
