"""GRPO on a copy task: the policy answers a prompt token with a sequence and is paid for repeating it.

Responses end with EOS and have different lengths. The update packs them into micro batches of at most
``max_token_len`` tokens (use_dynamic_bsz) or of a fixed number of sequences.
"""
import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, EOS, BOS, PAD = 12, 9, 10, 11


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = 16  # global, normalized to a rank's share below
    ppo_micro_batch_size: int = 4
    use_dynamic_bsz: bool = True
    ppo_max_token_len: int = 40
    ppo_epochs: int = 1
    clip_ratio: float = 0.2
    entropy_coeff: float = 0.003
    grad_clip: float = 1.0
    lr: float = 4e-3


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class Policy(nn.Module):
    def __init__(self, dim=24, layers=2, length=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, EOS + 1)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


@torch.no_grad()
def generate(model, prompts, uniforms):
    """Sample with given uniform numbers; every row takes the same number of forward passes."""
    ids = torch.stack([torch.full_like(prompts, BOS), prompts], dim=1)
    ended = torch.zeros_like(prompts, dtype=torch.bool)
    for t in range(uniforms.size(1)):
        cdf = model(ids)[:, -1].softmax(-1).cumsum(-1)
        token = (uniforms[:, t:t + 1] > cdf).sum(-1).clamp(max=EOS)
        token = torch.where(ended, torch.full_like(token, PAD), token)
        ids = torch.cat([ids, token[:, None]], dim=1)
        ended |= token == EOS
    responses = ids[:, 2:]
    return ids, responses.ne(PAD).float()


def reward_fn(prompts, responses, mask):
    hit = (responses == prompts[:, None]).float().sum(-1)
    return hit - 0.05 * (mask.sum(-1) - hit)


def group_advantages(rewards, n):
    r = rewards.view(-1, n)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()


def log_probs_and_entropy(model, ids, mask):
    logits = model(ids[:, :-1])[:, 1:]
    target = ids[:, 2:].clamp(max=EOS)
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, target[..., None]).squeeze(-1) * mask, entropy * mask


def seq_mean(values, mask):
    """Mean over the tokens of a sequence, then over sequences."""
    return ((values * mask).sum(-1) / mask.sum(-1)).mean()


def rearrange_micro_batches(batch, max_token_len):
    """Split into micro batches with balanced token counts; their number is the same on all ranks."""
    lengths = batch["mask"].sum(-1) + 2
    num = torch.tensor(min(len(lengths), int(-(-lengths.sum() // max_token_len))))
    dist.all_reduce(num, op=dist.ReduceOp.MAX)
    bins, load = [[] for _ in range(int(num))], [0.0] * int(num)
    for i in lengths.argsort(descending=True, stable=True).tolist():
        k = min(range(int(num)), key=lambda j: (len(bins[j]) > 0, load[j]) if min(map(len, bins)) == 0 else (False, load[j]))
        bins[k].append(i)
        load[k] += float(lengths[i])
    return [{key: value[idx] for key, value in batch.items()} for idx in bins]


def split(batch, size):
    parts = {k: v.split(size) for k, v in batch.items()}
    return [{k: v[i] for k, v in parts.items()} for i in range(len(parts["ids"]))]


class Actor:
    def __init__(self, model, config):
        self.model, self.config = model, config
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, eps=1e-5)

    @torch.no_grad()
    def compute_log_prob(self, batch):
        return log_probs_and_entropy(self.model, batch["ids"], batch["mask"])[0]

    def update_policy(self, batch):
        cfg = self.config
        metrics = {"pg_loss": 0.0, "entropy": 0.0, "grad_norm": 0.0, "micro_batches": 0}
        for _ in range(cfg.ppo_epochs):
            for mini in split(batch, cfg.ppo_mini_batch_size):
                if cfg.use_dynamic_bsz:
                    micro_batches = rearrange_micro_batches(mini, cfg.ppo_max_token_len)
                else:
                    micro_batches = split(mini, cfg.ppo_micro_batch_size)
                gradient_accumulation = max(1, cfg.ppo_mini_batch_size // cfg.ppo_micro_batch_size)

                self.optimizer.zero_grad()
                for data in micro_batches:
                    logp, entropy = log_probs_and_entropy(self.model, data["ids"], data["mask"])
                    ratio = (logp - data["old_log_probs"]).exp()
                    adv = data["advantages"][:, None]
                    clipped = ratio.clamp(1 - cfg.clip_ratio, 1 + cfg.clip_ratio)
                    pg_loss = seq_mean(-torch.min(ratio * adv, clipped * adv), data["mask"])
                    entropy_loss = seq_mean(entropy, data["mask"])
                    policy_loss = pg_loss - cfg.entropy_coeff * entropy_loss
                    if cfg.use_dynamic_bsz:
                        # relative to the dynamic bsz
                        loss = policy_loss * (len(data["ids"]) / cfg.ppo_mini_batch_size)
                    else:
                        loss = policy_loss / gradient_accumulation
                    loss.backward()
                    share = len(data["ids"]) / len(batch["ids"])
                    metrics["pg_loss"] += pg_loss.item() * share
                    metrics["entropy"] += entropy_loss.item() * share
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), cfg.grad_clip).full_tensor()
                self.optimizer.step()
                metrics["grad_norm"] = norm.item()
                metrics["micro_batches"] += len(micro_batches)
        return metrics


def mean(value):
    t = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=14)
    ap.add_argument("--prompts", type=int, default=8)
    ap.add_argument("--n", type=int, default=4, help="responses per prompt")
    ap.add_argument("--response-length", type=int, default=10)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Policy()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    config = ActorConfig()
    config.ppo_mini_batch_size //= world_size
    actor = Actor(model, config)

    def rollout(iteration):
        g = torch.Generator().manual_seed(args.seed + 1000 + iteration)
        prompts = torch.randint(0, EOS, (args.prompts,), generator=g)[rank::world_size].repeat_interleave(args.n)
        u = torch.rand(args.prompts, args.n, args.response_length, generator=g)[rank::world_size].flatten(0, 1)
        ids, mask = generate(model, prompts, u)
        return {"ids": ids, "mask": mask}, reward_fn(prompts, ids[:, 2:], mask)

    for iteration in range(args.iterations):
        batch, rewards = rollout(iteration)
        batch["advantages"] = group_advantages(rewards, args.n)
        batch["old_log_probs"] = actor.compute_log_prob(batch)
        m = actor.update_policy(batch)
        line = [mean(rewards.mean()), mean(batch["mask"].sum(-1).mean()), mean(m["pg_loss"]), mean(m["entropy"])]
        if rank == 0:
            print(f"iter {iteration:2d} reward {line[0]:.5f} length {line[1]:.3f} pg_loss {line[2]:.6f} "
                  f"entropy {line[3]:.5f} grad_norm {m['grad_norm']:.5f} micro_batches {m['micro_batches']}", flush=True)

    score = mean(torch.stack([rollout(10_000 + i)[1].mean() for i in range(2)]).mean())
    if rank == 0:
        print(f"test reward {score:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
