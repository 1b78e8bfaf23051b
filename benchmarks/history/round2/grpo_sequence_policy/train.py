"""GRPO on a toy task: the policy has to answer a prompt with its sorted tokens."""

import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s")
logger = logging.getLogger("grpo")

VOCAB, PROMPT_LEN, MAX_RESPONSE = 10, 4, 6
EOS = 0


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(h.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Policy(nn.Module):
    def __init__(self, dim=24, heads=2, depth=2):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, dim)
        self.wpe = nn.Parameter(0.02 * torch.randn(PROMPT_LEN + MAX_RESPONSE, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def reward_fn(prompt, response):
    """Share of positions with the right token, and a small bonus for stopping in time."""
    target = prompt.sort().values.tolist() + [EOS]
    hits = sum(int(i < len(response) and response[i] == t) for i, t in enumerate(target))
    return hits / len(target) + (0.2 if response and response[-1] == EOS else 0.0)


class Rollout:
    """Samples the responses, every rank for its prompts, and collects those of all ranks."""

    def __init__(self, args, model, rank, world_size, device):
        self.args, self.model = args, model
        self.rank, self.world_size, self.device = rank, world_size, device

    @torch.no_grad()
    def generate(self, rollout_id):
        args = self.args
        g = torch.Generator().manual_seed(args.seed * 1000 + rollout_id)
        prompts = torch.randint(1, VOCAB, (args.rollout_batch_size, PROMPT_LEN), generator=g)
        prompts = prompts.repeat_interleave(args.n_samples_per_prompt, dim=0)
        per_rank = len(prompts) // self.world_size
        first = self.rank * per_rank
        tokens = prompts[first : first + per_rank]
        generators = [
            torch.Generator().manual_seed((args.seed * 1000 + rollout_id) * 4096 + first + i) for i in range(per_rank)
        ]
        self.model.eval()
        for _ in range(MAX_RESPONSE):
            probs = self.model(tokens.to(self.device))[:, -1].softmax(-1).cpu()
            nxt = torch.stack([torch.multinomial(p, 1, generator=gen) for p, gen in zip(probs, generators)])
            tokens = torch.cat([tokens, nxt], dim=1)
        self.model.train()
        gathered = [None] * self.world_size
        dist.all_gather_object(gathered, tokens)
        return self.to_train_data(torch.cat(gathered))

    def to_train_data(self, tokens):
        loss_masks, raw_reward = [], []
        for row in tokens:
            response = row[PROMPT_LEN:].tolist()
            length = response.index(EOS) + 1 if EOS in response else MAX_RESPONSE
            loss_masks.append(torch.arange(MAX_RESPONSE) < length)
            raw_reward.append(reward_fn(row[:PROMPT_LEN], response[:length]))
        rewards = torch.tensor(raw_reward).view(-1, self.args.n_samples_per_prompt)
        rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)
        return {
            "tokens": list(tokens),
            "loss_masks": loss_masks,
            "rewards": rewards.flatten().tolist(),
            "raw_reward": raw_reward,
        }


def process_rollout_data(data, dp_rank, dp_size):
    """This rank's part of the samples; the raw rewards stay whole, they are only logged."""
    rollout_data = {"raw_reward": data["raw_reward"]}
    per_rank = len(data["tokens"]) // dp_size
    for key in ("tokens", "loss_masks", "rewards"):
        rollout_data[key] = data[key][dp_rank * per_rank : (dp_rank + 1) * per_rank]
    return rollout_data


def pack_batches(rollout_data, micro_batch_size, device):
    batches = []
    for start in range(0, len(rollout_data["tokens"]), micro_batch_size):
        part = slice(start, start + micro_batch_size)
        loss_masks = torch.stack(rollout_data["loss_masks"][part]).to(device).float()
        batches.append(
            {
                "tokens": torch.stack(rollout_data["tokens"][part]).to(device),
                "loss_masks": loss_masks,
                "advantages": torch.tensor(rollout_data["rewards"][part], device=device)[:, None] * loss_masks,
                "raw_reward": rollout_data["raw_reward"][part],
            }
        )
    return batches


class Actor:
    def __init__(self, args):
        self.args = args
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        torch.manual_seed(args.seed)
        self.model = Policy().to(self.device)
        mesh = init_device_mesh(self.device.type, (self.dp_size,), mesh_dim_names=("dp",))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0)
        self.rollout = Rollout(args, self.model, self.rank, self.dp_size, self.device)

    def log_probs(self, tokens):
        logits = self.model(tokens)[:, PROMPT_LEN - 1 : -1]
        response = tokens[:, PROMPT_LEN:]
        return logits.log_softmax(-1).gather(-1, response[..., None]).squeeze(-1)

    def reduce_sum(self, value):
        value = torch.as_tensor(value, dtype=torch.float32, device=self.device)
        dist.all_reduce(value)
        return value.item()

    def train(self, rollout_id, data):
        args = self.args
        rollout_data = process_rollout_data(data, self.rank, self.dp_size)
        batches = pack_batches(rollout_data, args.micro_batch_size, self.device)
        with torch.no_grad():
            for batch in batches:
                batch["log_probs"] = self.log_probs(batch["tokens"])

        log_dict = {}
        if self.rank == 0:
            raw_reward_list = rollout_data["raw_reward"]
            log_dict["rollout/raw_reward"] = sum(raw_reward_list) / len(raw_reward_list)
        for key in ("log_probs", "advantages"):
            val = 0.0
            for batch in batches:
                if torch.is_tensor(batch[key]):
                    mask = batch["loss_masks"]
                    val += ((batch[key] * mask).sum(-1) / mask.sum(-1)).sum().item()
                else:
                    val += sum(batch[key])
            log_dict[f"rollout/{key}"] = self.reduce_sum(val) / (args.rollout_batch_size * args.n_samples_per_prompt)

        num_tokens = self.reduce_sum(sum(b["loss_masks"].sum() for b in batches))
        for epoch in range(args.ppo_epochs):
            loss_sum = 0.0
            for batch in batches:
                ratio = (self.log_probs(batch["tokens"]) - batch["log_probs"]).exp()
                clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
                pg = -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
                loss = (pg * batch["loss_masks"]).sum() / num_tokens
                (loss * self.dp_size).backward()
                loss_sum += loss.detach()
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        log_dict["train/pg_loss"] = self.reduce_sum(loss_sum)
        log_dict["train/grad_norm"] = grad_norm.full_tensor().item()
        if self.rank == 0 and (rollout_id % 3 == 0 or rollout_id == args.num_rollout - 1):
            logger.info("rollout %d: %s", rollout_id, {k: round(v, 6) for k, v in log_dict.items()})
        return log_dict


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-rollout", type=int, default=16)
    parser.add_argument("--rollout-batch-size", type=int, default=8, help="prompts of a rollout")
    parser.add_argument("--n-samples-per-prompt", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="on a rank")
    parser.add_argument("--ppo-epochs", type=int, default=2)
    parser.add_argument("--eps-clip", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()
    actor = Actor(args)
    for rollout_id in range(args.num_rollout):
        data = actor.rollout.generate(rollout_id)
        logs = actor.train(rollout_id, data)
    if actor.rank == 0:
        logger.info("last raw reward %.6f, log prob %.6f", logs["rollout/raw_reward"], logs["rollout/log_probs"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
