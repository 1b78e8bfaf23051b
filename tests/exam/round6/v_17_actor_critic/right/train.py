"""PPO with a shared sharded body. Phase one trains the critic head only, phase two everything, with two optimizers."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict

from nets import ActorCritic, shard
from rollout import Pendulums, gae


class PPO:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(12)
        self.net = shard(ActorCritic())
        body_actor = [*self.net.body.parameters(), *self.net.actor.parameters()]
        self.policy_opt = torch.optim.Adam(body_actor, lr=4e-3)
        self.value_opt = torch.optim.SGD(self.net.critic.parameters(), lr=0.02, momentum=0.9)
        self.env = Pendulums(32)
        n = self.env.count // self.world
        self.mine = slice(self.rank * n, (self.rank + 1) * n)
        self.iteration = 0

    def global_mean(self, x):
        s = x.detach().mean() / self.world
        dist.all_reduce(s)
        return s

    @torch.no_grad()
    def collect(self):
        (obs, acts, rewards, logps), last = self.env.play(self.net.logits, self.iteration, self.mine)
        adv, returns = gae(rewards, self.net.value(obs), self.net.value(last))
        mean = self.global_mean(adv)
        std = (self.global_mean((adv - mean) ** 2) + 1e-8).sqrt()
        return obs, acts, logps, (adv - mean) / std, returns, self.global_mean(rewards)

    def fit_value(self, obs, returns):
        loss = (self.net.value(obs) - returns).pow(2).mean()
        self.value_opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.critic.parameters(), 5.0)
        self.value_opt.step()
        return self.global_mean(loss)

    def fit_policy(self, obs, acts, old_logp, adv):
        logp = self.net.logits(obs).log_softmax(-1)
        ratio = (logp.gather(-1, acts[..., None]).squeeze(-1) - old_logp).exp()
        gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        self.policy_opt.zero_grad()
        (-gain - 0.01 * entropy).backward()
        self.policy_opt.step()

    def iterate(self):
        obs, acts, logps, adv, returns, reward = self.collect()
        for _ in range(4):
            value_loss = self.fit_value(obs, returns)
            if self.iteration >= self.args.critic_only:
                self.fit_policy(obs, acts, logps, adv)
        self.iteration += 1
        if self.rank == 0:
            print(f"iteration {self.iteration} value loss {value_loss:.4f} reward {reward:.4f}", flush=True)

    def state(self):
        # one call for both optimizers: together they hold each parameter once
        model, opts = get_state_dict(self.net, [self.policy_opt, self.value_opt])
        return {"net": model, "opts": opts, "iteration": self.iteration}

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        opts = [self.policy_opt, self.value_opt]
        set_state_dict(self.net, opts, model_state_dict=state["net"], optim_state_dict=state["opts"])
        self.iteration = state["iteration"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=12)
    ap.add_argument("--critic-only", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ac")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    ppo = PPO(args)
    if args.resume:
        ppo.load(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
    while ppo.iteration < args.iterations:
        ppo.iterate()
        if args.save_every and ppo.iteration % args.save_every == 0:
            dcp.save(ppo.state(), checkpoint_id=os.path.join(args.out, f"i{ppo.iteration:04d}"))
    if args.export:
        full = get_model_state_dict(ppo.net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if ppo.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
