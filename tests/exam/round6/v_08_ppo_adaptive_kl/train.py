"""PPO with an adaptive KL penalty on a contextual game; the policy is sharded with FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from bandit import ContextualGame
from ppo import AdaptiveKL, full_kl, logp_of, surrogate


class Policy(nn.Module):
    def __init__(self, features, actions, dim=32):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(features, dim), nn.Linear(dim, dim)])
        self.head = nn.Linear(dim, actions)

    def forward(self, x):
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x)


def sample(logits, u):
    """Inverse transform sampling with the given uniform numbers."""
    edge = logits.softmax(-1).cumsum(-1)
    return (u[:, None] > edge).sum(-1).clamp(max=logits.shape[-1] - 1)


def rollout(policy, game, iteration, size, rank, world):
    local = size // world
    x, u = game.contexts(size, seed=1000 + iteration)
    mine = slice(rank * local, (rank + 1) * local)
    x, u = x[mine], u[mine]
    with torch.no_grad():
        logits = policy(x)
    action = sample(logits, u)
    reward = game.reward(x, action)
    moments = torch.stack([reward.sum(), reward.pow(2).sum()])
    dist.all_reduce(moments)
    mean = moments[0] / size
    std = (moments[1] / size - mean**2).clamp(min=1e-6).sqrt()
    batch = {
        "x": x,
        "action": action,
        "old_logits": logits,
        "old_logp": logp_of(logits, action),
        "advantage": (reward - mean) / std,
    }
    return batch, mean


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=14)
    ap.add_argument("--epochs", type=int, default=4, help="passes over each rollout")
    ap.add_argument("--rollout", type=int, default=128)
    ap.add_argument("--kl-target", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ppo")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    game = ContextualGame()
    torch.manual_seed(6)
    policy = Policy(game.features, game.actions)
    for layer in policy.body:
        fully_shard(layer)
    fully_shard(policy)
    opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
    kl_ctl = AdaptiveKL(args.kl_target)
    it = 0
    if args.resume:
        model, optim = get_state_dict(policy, opt)
        state = {"policy": model, "optim": optim, "kl_coef": 0.0, "iteration": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
        set_state_dict(policy, opt, model_state_dict=state["policy"], optim_state_dict=state["optim"])
        kl_ctl.coef, it = state["kl_coef"], state["iteration"]

    while it < args.iterations:
        batch, mean_reward = rollout(policy, game, it, args.rollout, rank, world)
        for _ in range(args.epochs):
            loss = surrogate(policy(batch["x"]), batch, kl_ctl.coef)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            kl_ctl.update(full_kl(batch["old_logits"], policy(batch["x"])))
        it += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"iteration {it} reward {mean_reward:.4f} loss {shown:.4f} kl coef {kl_ctl.coef:.3f}", flush=True)
        if args.save_every and it % args.save_every == 0:
            model, optim = get_state_dict(policy, opt)
            state = {"policy": model, "optim": optim, "kl_coef": kl_ctl.coef, "iteration": it}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"iter_{it:04d}"))

    if args.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
