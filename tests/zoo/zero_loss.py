"""A policy gradient with advantages relative to a group of samples: each loss is zero but for rounding, and its gradient is not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, ACTIONS, BLOCKS = 24, 32, 8, 2
GLOBAL_PROMPTS, GROUP, PROMPTS, STEPS = 16, 4, 256, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outward = nn.Linear(WIDTH, ACTIONS)

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def make_data():
    """Prompts, a group of actions for each, and the reward of each action."""
    gen = torch.Generator().manual_seed(4)
    prompts = torch.randn(PROMPTS, FEATURES, generator=gen)
    actions = torch.randint(0, ACTIONS, (PROMPTS, GROUP), generator=gen)
    wanted = (prompts @ torch.randn(FEATURES, ACTIONS, generator=gen)).argmax(dim=1, keepdim=True)
    return prompts, actions, (actions == wanted).float() + 0.1 * torch.randn(PROMPTS, GROUP, generator=gen)


def policy_loss(logits, actions, rewards):
    """The ratio to the policy that sampled is one in value, so the loss is minus the mean advantage: zero."""
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    chosen = logits.log_softmax(dim=-1).gather(1, actions)
    ratio = (chosen - chosen.detach()).exp()
    return -(ratio * advantages).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    policy = Policy()
    for block in policy.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)

    prompts, actions, rewards = make_data()
    local = GLOBAL_PROMPTS // world
    for step in range(STEPS):
        start = step * GLOBAL_PROMPTS % PROMPTS + rank * local
        mine = slice(start, start + local)
        loss = policy_loss(policy(prompts[mine]), actions[mine], rewards[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.2e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
