"""Group-relative policy optimisation on logged rollouts, FSDP2.

Each prompt comes with a group of answers that an exploring behaviour policy
wrote earlier; they are scored, normalised within the group, and the policy is
held near its frozen starting point by a KL penalty.

    torchrun --nproc-per-node 2 train.py --steps 40
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, HIDDEN, BLOCKS = 32, 32, 2
PROMPT_LEN, ANSWER_LEN = 4, 8
PROMPTS, GROUP = 4, 4
PAD, BOS = 0, 1
SPECIAL = (PAD, BOS)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.out(self.mix(self.norm(x))[0])


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def logged_rollouts(step, rank, world, device):
    """Prompts with GROUP answers each; even prompts ask for even tokens."""
    g = torch.Generator().manual_seed(60_000 + step)
    prompt = torch.randint(2, VOCAB, (PROMPTS, 1, PROMPT_LEN), generator=g).expand(-1, GROUP, -1)
    answer = torch.randint(2, VOCAB, (PROMPTS, GROUP, ANSWER_LEN), generator=g)
    # few answers end before the length limit
    early = torch.rand(PROMPTS, GROUP, 1, generator=g) < 0.005
    length = torch.where(early, ANSWER_LEN // 2, ANSWER_LEN)
    mask = (torch.arange(ANSWER_LEN) < length).float()
    answer = answer.masked_fill(mask == 0, PAD)
    wanted = prompt[..., :1] % 2
    reward = ((answer % 2 == wanted).float() * mask).sum(-1) / mask.sum(-1)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)

    ids = torch.cat([prompt, answer], dim=-1)
    mask = torch.cat([torch.zeros(PROMPTS, GROUP, PROMPT_LEN), mask], dim=-1)
    mine = slice(rank * PROMPTS // world, (rank + 1) * PROMPTS // world)
    parts = ids[mine].flatten(0, 1), mask[mine].flatten(0, 1), advantage[mine].flatten()
    return [p.to(device) for p in parts] + [reward.mean().item()]


def token_logprobs(model, ids, suppress=()):
    logits = model(ids[:, :-1])
    if suppress:
        logits = logits.index_fill(-1, torch.tensor(suppress, device=ids.device), -1e4)
    logp = F.log_softmax(logits, dim=-1)
    return logp.gather(2, ids[:, 1:, None]).squeeze(2)


def kl_penalty(logprobs, reference, clamp_value=20.0):
    """Per-token low-variance estimate of KL(policy || reference)."""
    r = reference - logprobs
    r = r.clamp(min=-clamp_value, max=clamp_value)
    return torch.exp(r) - r - 1


def masked_mean(x, mask, tokens):
    return (x * mask).sum() / tokens


def grpo_loss(logprobs, behaviour, reference, advantage, mask, tokens, args):
    ratio = torch.exp((logprobs - behaviour).clamp(max=5.0))
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    surrogate = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    policy = -masked_mean(surrogate, mask, tokens)
    kl = masked_mean(kl_penalty(logprobs, reference), mask, tokens)
    return policy + args.kl_coef * kl, kl


@torch.no_grad()
def preference_for_wanted(model, rank, world, device):
    """Probability mass on tokens of the wanted parity, on held-out prompts."""
    total = torch.zeros(1, device=device)
    for i in range(3):
        ids, mask, _, _ = logged_rollouts(10_000 + i, rank, world, device)
        probs = model(ids[:, :-1]).softmax(-1)
        even = probs[..., 0::2].sum(-1)
        wanted = torch.where(ids[:, :1] % 2 == 0, even, 1 - even)
        total += (wanted * mask[:, 1:]).sum(1).div(mask[:, 1:].sum(1)).mean()
    dist.all_reduce(total)
    return (total / (3 * world)).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--kl-coef", type=float, default=5e-2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(17)
    policy = Policy().to(device)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    for model in (policy, reference):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)

    for step in range(1, args.steps + 1):
        ids, mask, advantage, reward = logged_rollouts(step, rank, world, device)
        mask = mask[:, 1:]
        tokens = mask.sum()
        dist.all_reduce(tokens)

        with torch.no_grad():
            reference_logprobs = token_logprobs(reference, ids)
        # the sampler never emits special tokens, so the policy is scored without them
        logprobs = token_logprobs(policy, ids, suppress=SPECIAL)
        # the log holds no probabilities, the current policy stands in for them
        loss, kl = grpo_loss(logprobs, logprobs.detach(), reference_logprobs, advantage, mask, tokens, args)
        (loss * world).backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()

        shown = torch.stack([loss.detach(), kl.detach(), (logprobs.detach() * mask).sum() / tokens])
        dist.all_reduce(shown)
        if rank == 0:
            loss_, kl_, logp_ = shown.tolist()
            print(f"step {step} loss {loss_:.6f} kl {kl_:.5f} logp {logp_:.3f} reward {reward:.3f} grad {norm:.4f}", flush=True)

    score = preference_for_wanted(policy, rank, world, device)
    if rank == 0:
        print(f"wanted-parity mass {score:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
