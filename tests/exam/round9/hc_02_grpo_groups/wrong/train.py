"""GRPO: several sampled answers per prompt, advantages relative to the prompt's own group."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from policy import GRUPolicy
from tasks import ANSWER, VOCAB, prompts_for, reward

PROMPTS, GROUP, INNER, CLIP = 16, 8, 2, 0.2


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.policy = GRUPolicy(VOCAB)
        fully_shard(self.policy)
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=args.lr)
        self.iteration = 0

    def rollout(self):
        prompts, g = prompts_for(self.iteration, PROMPTS)
        prompts = prompts.repeat_interleave(GROUP, 0)
        uniforms = torch.rand(len(prompts), ANSWER, generator=g)
        rows = torch.arange(len(prompts))[self.rank::self.world]
        prompts, uniforms = prompts[rows], uniforms[rows]
        with torch.no_grad():
            actions, logp = self.policy(prompts, uniforms=uniforms)
        r = reward(prompts, actions)
        groups = r.view(-1, GROUP)
        adv = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-2)
        return prompts, actions, logp, adv.flatten(), r

    def update(self, prompts, actions, old_logp, adv):
        for _ in range(INNER):
            _, logp = self.policy(prompts, actions=actions)
            ratio = (logp - old_logp).exp()
            a = adv[:, None]
            loss = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
            self.opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.opt.step()

    def fit(self):
        while self.iteration < self.args.iterations:
            prompts, actions, logp, adv, r = self.rollout()
            self.update(prompts, actions, logp, adv)
            self.iteration += 1
            mean = r.mean() / self.world
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"iteration {self.iteration} reward {mean:.5f} loss {-mean:.5f}", flush=True)
            if self.args.out and self.iteration % self.args.save_every == 0:
                self.save()

    def _state(self):
        model, optim = get_state_dict(self.policy, self.opt)
        return {"model": model, "optim": optim, "iteration": self.iteration}

    def save(self):
        dcp.save(self._state(), checkpoint_id=f"{self.args.out}/it{self.iteration:04d}")

    def load(self, folder):
        state = self._state()
        dcp.load(state, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
        set_state_dict(self.policy, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.iteration = state["iteration"]


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--iterations", type=int, default=20)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--save-every", type=int, default=8)
    p.add_argument("--out")
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit()
    dist.destroy_process_group()
