"""GRPO fine-tuning: a language model learns by reward to repeat its prompt backwards."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from policy import RecurrentLM
from rollout import Sampler, reward

VOCAB, WIDTH, GROUP, PROMPTS = 6, 2, 16, 12


class GRPOTrainer:
    def __init__(self, steps):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(21)
        self.model = RecurrentLM(VOCAB, 24)
        fully_shard(self.model.head)
        fully_shard(self.model)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=8e-3)
        self.sampler = Sampler(GROUP, WIDTH, VOCAB, self.rank, self.world)
        self.steps, self.step = steps, 0

    def advantages(self, rewards):
        """Rewards are normalised over the whole group of a prompt, which is spread over the ranks."""
        parts = [torch.empty_like(rewards) for _ in range(self.world)]
        dist.all_gather(parts, rewards)
        group = torch.cat([p.view(-1, PROMPTS) for p in parts])
        adv = (rewards.view(-1, PROMPTS) - group.mean(0)) / (group.std(0) + 1e-2)
        return adv.flatten(), group.mean().item()

    def train_step(self):
        gen = torch.Generator().manual_seed(300 + self.step)
        prompts = torch.randint(0, VOCAB, (PROMPTS, WIDTH), generator=gen)
        completions = self.sampler.sample(self.model, prompts, self.step)
        adv, mean_reward = self.advantages(reward(prompts, completions))

        ids = torch.cat([prompts.repeat(len(self.sampler.members), 1), completions], 1)
        logits = self.model(ids[:, :-1])[:, WIDTH - 1 :]
        logp = F.log_softmax(logits, -1)
        chosen = logp.gather(-1, completions[..., None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        loss = -(adv[:, None] * chosen).mean() - 0.01 * entropy
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.step += 1
        return mean_reward

    def state(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "step": self.step}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=os.path.join(folder, f"iter{self.step:05d}"))

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.step = state["step"]

    def fit(self, save_every, folder):
        window = []
        while self.step < self.steps:
            window.append(self.train_step())
            if self.rank == 0 and self.step % 5 == 0:
                print(f"iteration {self.step} reward {sum(window) / len(window):.4f}", flush=True)
                window = []
            if save_every and self.step % save_every == 0 and self.step < self.steps:
                self.save(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--folder", default="")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = GRPOTrainer(args.steps)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit(args.save_every, args.folder)
    dist.destroy_process_group()
