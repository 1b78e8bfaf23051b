"""GRPO on a toy task: groups of answers per prompt, clipped updates against a frozen reference."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, get_model_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from policy import PROMPT, VOCAB, Policy, answer_log_probs, reward, sample


class RunningBaseline:
    """Mean and variance of all rewards so far, merged over the ranks."""

    def __init__(self):
        self.count, self.total, self.square = 0, 0.0, 0.0

    def update(self, rewards):
        sums = torch.stack([torch.tensor(float(len(rewards))), rewards.sum(), rewards.square().sum()]).double()
        dist.all_reduce(sums)
        self.count += int(sums[0])
        self.total += sums[1].item()
        self.square += sums[2].item()
        return (sums[1] / sums[0]).item()

    @property
    def std(self):
        mean = self.total / self.count
        return max(self.square / self.count - mean ** 2, 1e-4) ** 0.5


class Grpo:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.policy, self.reference = self.build(), self.build()
        self.reference.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr, eps=1e-5)
        self.baseline = RunningBaseline()
        self.round = 0

    def build(self):
        torch.manual_seed(self.args.seed)
        net = Policy()
        fully_shard(net.mlp)
        return fully_shard(net)

    def rollout(self):
        """Every rank answers its own prompts; a group stays on one rank."""
        a = self.args
        g = torch.Generator().manual_seed(a.seed * 7_777 + self.round)
        prompts = torch.randint(0, VOCAB, (a.prompts, PROMPT), generator=g)
        own = torch.arange(self.rank, a.prompts, self.world)
        rows = own.repeat_interleave(a.group)
        keys = (self.round * a.prompts + rows) * a.group + torch.arange(a.group).repeat(len(own))
        sequences = sample(self.policy, prompts[rows], keys)
        rewards = reward(sequences)
        mean = self.baseline.update(rewards)
        grouped = rewards.view(-1, a.group)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / self.baseline.std).flatten()
        with torch.no_grad():
            old = answer_log_probs(self.policy, sequences)
            ref = answer_log_probs(self.reference, sequences)
        return sequences, advantage, old, ref, mean

    def update(self, sequences, advantage, old, ref):
        a = self.args
        for _ in range(a.inner):
            new = answer_log_probs(self.policy, sequences)
            ratio = (new - old).exp()
            clipped = ratio.clamp(1 - a.clip, 1 + a.clip)
            gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
            kl = (ref - new).exp() - (ref - new) - 1
            loss = (a.kl * kl - gain).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        shown = kl.detach().mean() / self.world
        dist.all_reduce(shown)
        return shown.item()

    def refresh_reference(self):
        set_model_state_dict(self.reference, {k: v.clone() for k, v in get_model_state_dict(self.policy).items()})

    def state(self):
        weights, optim = get_state_dict(self.policy, self.optimizer)
        return {"policy": weights, "optim": optim, "reference": get_model_state_dict(self.reference)}

    def save(self):
        path = os.path.join(self.args.out, f"round{self.round}")
        dcp.save(self.state(), checkpoint_id=path)
        if self.rank == 0:
            with open(os.path.join(path, "meta.json"), "w") as f:
                json.dump({"round": self.round, **vars(self.baseline)}, f)
        dist.barrier()

    def resume(self, folder):
        path = os.path.join(folder, max(os.listdir(folder), key=lambda n: int(n[5:])))
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.policy, self.optimizer, model_state_dict=state["policy"], optim_state_dict=state["optim"])
        set_model_state_dict(self.reference, state["reference"])
        with open(os.path.join(path, "meta.json")) as f:
            meta = json.load(f)
        self.round = meta.pop("round")
        vars(self.baseline).update(meta)

    def train(self):
        while self.round < self.args.rounds:
            sequences, advantage, old, ref, mean = self.rollout()
            kl = self.update(sequences, advantage, old, ref)
            self.round += 1
            if self.round % self.args.refresh == 0:
                self.refresh_reference()
            if self.rank == 0:
                print(f"round {self.round:2d} reward {mean:.4f} kl {kl:.5f} baseline std {self.baseline.std:.4f}")
            if self.args.save_every and self.round % self.args.save_every == 0 and self.round < self.args.rounds:
                self.save()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--inner", type=int, default=2)
    ap.add_argument("--prompts", type=int, default=8)
    ap.add_argument("--group", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--kl", type=float, default=0.02)
    ap.add_argument("--refresh", type=int, default=5)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Grpo(args)
    if args.resume:
        trainer.resume(args.resume)
    trainer.train()
    dist.destroy_process_group()
