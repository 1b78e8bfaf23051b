"""Online DPO of a tiny token policy against a programmatic reward.

Every update samples two completions per prompt from the current policy, ranks them with
the reward and takes DPO steps on minibatches of the (chosen, rejected) pairs.

    torchrun --nproc-per-node 2 train.py --save-every 6 --ckpt runs/dpo
    torchrun --nproc-per-node 2 train.py --resume --ckpt runs/dpo
"""
import argparse
import copy
import json
import os
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, PROMPT_LEN, RESPONSE_LEN = 20, 4, 6


@dataclass
class TrainerState:
    global_step: int = 0
    episode: int = 0
    best_reward: float = float("-inf")


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(PROMPT_LEN + RESPONSE_LEN, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def prompt_batches(prompts, batch_size, seed):
    """Endless batches of prompts, reshuffled every pass."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(prompts))
        for i in range(0, len(order) - batch_size + 1, batch_size):
            yield prompts[order[i : i + batch_size]]


def reward_fn(prompts, responses):
    """Tokens above the prompt's mean score, repeated neighbours cost."""
    level = prompts.float().mean(1, keepdim=True)
    above = torch.tanh((responses.float() - level) / VOCAB).mean(1)
    repeats = (responses[:, 1:] == responses[:, :-1]).float().mean(1)
    return above - 0.5 * repeats


@torch.no_grad()
def generate(model, prompts, noise):
    ids = prompts
    for t in range(RESPONSE_LEN):
        logits = model(ids)[:, -1]
        ids = torch.cat([ids, (logits + noise[:, t]).argmax(-1, keepdim=True)], 1)
    return ids


def sequence_logprobs(model, ids):
    logits = model(ids[:, :-1])[:, PROMPT_LEN - 1 :]
    logps = F.log_softmax(logits, -1).gather(2, ids[:, PROMPT_LEN:].unsqueeze(-1)).squeeze(-1)
    return logps.sum(1)


class OnlineDPO:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = Policy()
        self.ref_model = copy.deepcopy(self.model).requires_grad_(False).eval()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0, eps=1e-6)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.2, total_iters=args.updates)
        self.state = TrainerState()
        prompts = torch.from_numpy(np.random.default_rng(args.seed).integers(0, VOCAB, (256, PROMPT_LEN)))
        self.stream = prompt_batches(prompts, args.batch_size, args.seed + 1)

    def local_rows(self, x):
        """This rank's rows of each minibatch of a global batch, minibatch after minibatch."""
        x = x.unflatten(0, (self.args.minibatches, -1))
        return x[:, self.rank :: self.world].flatten(0, 1)

    def gather_mean(self, values):
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t)
        return (t / self.world).tolist()

    def rollout(self, update):
        prompts = self.local_rows(next(self.stream))
        gen = torch.Generator().manual_seed(self.args.seed * 10007 + update)
        u = torch.rand(self.args.batch_size, 2, RESPONSE_LEN, VOCAB, generator=gen)
        noise = self.local_rows(-torch.log(-torch.log(u.clamp(1e-9, 1 - 1e-7))))
        first = generate(self.model, prompts, noise[:, 0])
        second = generate(self.model, prompts, noise[:, 1])
        scores = torch.stack([reward_fn(prompts, ids[:, PROMPT_LEN:]) for ids in (first, second)])
        swap = (scores[0] < scores[1]).unsqueeze(1)
        chosen, rejected = torch.where(swap, second, first), torch.where(swap, first, second)
        with torch.no_grad():
            ref = sequence_logprobs(self.ref_model, torch.cat([chosen, rejected]))
        return chosen, rejected, ref.view(2, -1), scores

    def train(self):
        args, state = self.args, self.state
        for update in range(state.global_step + 1, args.updates + 1):
            state.episode += args.batch_size
            chosen, rejected, ref, scores = self.rollout(update)
            size = len(chosen) // args.minibatches
            losses, margins = [], []
            for mb in range(args.minibatches):
                rows = slice(mb * size, (mb + 1) * size)
                logps = sequence_logprobs(self.model, torch.cat([chosen[rows], rejected[rows]])).view(2, -1)
                ratio = logps - ref[:, rows]
                loss = -F.logsigmoid(args.beta * (ratio[0] - ratio[1])).mean()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
                margins.append(args.beta * (ratio[0] - ratio[1]).mean().item())

            loss, margin, score = self.gather_mean([np.mean(losses), np.mean(margins), scores.mean().item()])
            state.best_reward = max(state.best_reward, score)
            lr = self.scheduler.get_last_lr()[0]
            self.scheduler.step()
            state.global_step += 1
            if self.rank == 0:
                print(f"update {update} loss {loss:.6f} margin {margin:.5f} reward {score:.5f} "
                      f"lr {lr:.2e} episode {state.episode}", flush=True)
            if args.save_every and state.global_step % args.save_every == 0:
                self.save()

    def save(self):
        path = os.path.join(self.args.ckpt, f"checkpoint-{self.state.global_step}")
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=path)
        if self.rank == 0:
            with open(os.path.join(path, "trainer_state.json"), "w") as f:
                json.dump({"state": asdict(self.state), "scheduler": self.scheduler.state_dict()}, f)
        dist.barrier()

    def load(self):
        found = [d for d in os.listdir(self.args.ckpt) if d.startswith("checkpoint-")]
        path = os.path.join(self.args.ckpt, max(found, key=lambda d: int(d.split("-")[1])))
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model_sd, "optim": optim_sd}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model_sd, optim_state_dict=optim_sd)
        with open(os.path.join(path, "trainer_state.json")) as f:
            saved = json.load(f)
        self.state = TrainerState(**saved["state"])
        self.scheduler.load_state_dict(saved["scheduler"])
        for _ in range(self.state.global_step):
            next(self.stream)
        if self.rank == 0:
            print(f"resumed from {path}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--updates", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--minibatches", type=int, default=2)
    p.add_argument("--beta", type=float, default=0.2)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--ckpt", default=None)
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    trainer = OnlineDPO(args)
    if args.resume:
        trainer.load()
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
