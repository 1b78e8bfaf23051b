from dataclasses import dataclass

import torch

from policy import logp_of, sample
from task import LENGTH, TOKENS


@dataclass
class Rollout:
    prompt: torch.Tensor
    answer: torch.Tensor
    old_logp: torch.Tensor
    advantage: torch.Tensor
    reward: torch.Tensor


def group_advantage(reward, group):
    r = reward.view(-1, group)
    centred = r - r.mean(dim=1, keepdim=True)
    return (centred / (r.std(dim=1, keepdim=True) + 1e-4)).flatten()


@torch.no_grad()
def collect(policy, task, round_, n_prompts, group, rank, world):
    prompts = task.prompts(n_prompts, round_).repeat_interleave(group, dim=0)
    g = torch.Generator().manual_seed(900001 + round_)
    noise = torch.rand(len(prompts), LENGTH, TOKENS, generator=g)

    mine = torch.arange(len(prompts)).view(world, -1)[rank]
    prompt, noise = prompts[mine], noise[mine]

    logits = policy(prompt)
    answer = sample(logits, noise)
    reward = task.reward(prompt, answer)
    return Rollout(prompt, answer, logp_of(logits, answer), group_advantage(reward, group), reward)
