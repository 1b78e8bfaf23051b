"""TRPO on a cart-like control task. The policy is sharded and stepped along the natural gradient; the
critic is a second sharded model with an Adam of its own. Everything is in float64, because the Fisher
products are differences of gradients."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from natural import FisherProduct, conjugate_gradient, gradient, inner, set_params

OBS, ACT = 4, 2


def mlp(inputs, outputs, width=20):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(OBS, ACT)
        self.log_std = nn.Parameter(torch.full((ACT,), -0.3))

    def forward(self, obs):
        mean = self.net(obs)
        return mean, self.log_std.expand_as(mean) + 0.0


def log_prob(mean, log_std, act):
    return (-0.5 * ((act - mean) / log_std.exp()) ** 2 - log_std).sum(-1)


@torch.no_grad()
def collect(policy, gen, episodes, horizon, rank, world):
    """Random numbers are drawn for all episodes; a rank simulates its block of them."""
    start = torch.randn(episodes, OBS, generator=gen).chunk(world)[rank]
    noise = torch.randn(horizon, episodes, ACT, generator=gen).chunk(world, dim=1)[rank]
    pull = torch.tensor([[0.2, 0.0], [0.0, 0.2], [0.3, 0.1], [-0.1, 0.3]])
    s, obs, acts, rews = start, [], [], []
    for t in range(horizon):
        mean, log_std = policy(s)
        a = mean + log_std.exp() * noise[t]
        obs.append(s)
        acts.append(a)
        s = 0.95 * s + torch.tanh(a) @ pull.t() + 0.05 * torch.sin(s.roll(1, 1))
        rews.append(-s.pow(2).mean(1) - 0.01 * a.pow(2).mean(1))
    ret, returns = torch.zeros(len(start)), []
    for r in reversed(rews):
        ret = r + 0.95 * ret
        returns.insert(0, ret)
    return torch.cat(obs), torch.cat(acts), torch.cat(returns), torch.stack(rews).sum()


def global_mean(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def trpo_step(policy, params, obs, act, adv, max_kl, cg_iters):
    with torch.no_grad():
        old_mean, old_log_std = policy(obs)
        old_logp = log_prob(old_mean, old_log_std, act)

    def surrogate():
        return -(torch.exp(log_prob(*policy(obs), act) - old_logp) * adv).mean()

    def kl():
        mean, log_std = policy(obs)
        ratio = (2 * (old_log_std - log_std)).exp()
        gap = ((mean - old_mean) / log_std.exp()) ** 2
        return (log_std - old_log_std + 0.5 * (ratio + gap) - 0.5).sum(-1).mean()

    g = gradient(params, surrogate)
    product = FisherProduct(params, kl)
    direction = conjugate_gradient(product, [-t for t in g], cg_iters)
    curvature = inner(direction, product(direction))
    full = (2 * max_kl / curvature) ** 0.5
    expected = -inner(g, direction) * full
    before = global_mean(surrogate())
    for k in range(8):
        set_params(params, product.base, direction, full * 0.5 ** k)
        with torch.no_grad():
            after, moved = global_mean(surrogate()), global_mean(kl())
        if moved <= 1.5 * max_kl and before - after > 0.1 * expected * 0.5 ** k:
            return k, moved.item()
    set_params(params, product.base)
    return -1, 0.0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=12)
    ap.add_argument("--episodes", type=int, default=16)
    ap.add_argument("--horizon", type=int, default=6)
    ap.add_argument("--max-kl", type=float, default=0.02)
    ap.add_argument("--cg", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="trpo")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    policy, critic = Gaussian(), mlp(OBS, 1)
    # the line search evaluates without a backward, so the gathered weights must be dropped after the forward
    fully_shard(policy, reshard_after_forward=True)
    fully_shard(critic)
    params = list(policy.parameters())
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(40)

    def snapshot(iteration):
        c, o = get_state_dict(critic, critic_opt)
        return {"policy": get_model_state_dict(policy), "critic": c, "critic_opt": o, "gen": gen.get_state(), "iteration": iteration}

    start = 0
    if args.resume:
        state = snapshot(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
        set_model_state_dict(policy, state["policy"])
        set_state_dict(critic, critic_opt, model_state_dict=state["critic"], optim_state_dict=state["critic_opt"])
        gen.set_state(state["gen"])
        start = state["iteration"]

    for it in range(start, args.iterations):
        obs, act, ret, reward = collect(policy, gen, args.episodes, args.horizon, rank, world)
        with torch.no_grad():
            adv = ret - critic(obs).squeeze(-1)
        mean = global_mean(adv.mean())
        std = (global_mean((adv - mean).pow(2).mean())).sqrt()
        halvings, kl = trpo_step(policy, params, obs, act, (adv - mean) / (std + 1e-8), args.max_kl, args.cg)
        for _ in range(2):
            (critic(obs).squeeze(-1) - ret).pow(2).mean().backward()
            critic_opt.step()
            critic_opt.zero_grad()
        dist.all_reduce(reward)
        if rank == 0 and it % 3 == 0:
            print(f"iteration {it} reward {reward / args.episodes:.4f} kl {kl:.5f} halvings {halvings}")
        if args.save_every and (it + 1) % args.save_every == 0:
            dcp.save(snapshot(it + 1), checkpoint_id=os.path.join(args.out, f"{it + 1:05d}"))

    if args.export:
        full = {"policy": {k: v.full_tensor() for k, v in policy.state_dict().items()},
                "critic": {k: v.full_tensor() for k, v in critic.state_dict().items()}}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
