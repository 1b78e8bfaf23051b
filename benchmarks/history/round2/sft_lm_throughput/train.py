"""Supervised fine-tuning of a small decoder on prompt/response pairs.

Only the response tokens carry a loss. Sequences have different lengths, so the
loss is normalised by the number of response tokens of the whole optimizer step.
"""

import argparse
import json
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, IGNORE = 48, -100


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, dim=24, heads=2, layers=2, max_len=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_dataset(n, max_len, seed):
    """The response repeats the prompt shifted by a constant."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.zeros(n, max_len, dtype=torch.long)
    labels = torch.full((n, max_len), IGNORE)
    for i in range(n):
        p = int(torch.randint(3, max_len // 2 + 1, (1,), generator=g))
        prompt = torch.randint(2, VOCAB, (p,), generator=g)
        response = (prompt - 2 + 3) % (VOCAB - 2) + 2
        ids[i, : 2 * p] = torch.cat([prompt, response])
        labels[i, p : 2 * p] = response
    return ids, labels


class Trainer:
    def __init__(self, model, args, device, rank, world_size):
        self.model, self.args, self.device = model, args, device
        self.rank, self.world_size = rank, world_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self.step_tokens = 0
        self.total_tokens = 0
        self.history = []

    def _lr_factor(self, step):
        if step < self.args.warmup:
            return (step + 1) / self.args.warmup
        frac = (step - self.args.warmup) / max(1, self.args.steps - self.args.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * frac))

    def reduce_sum(self, value):
        value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(value)
        return value.item()

    def compute_loss(self, ids, labels, num_items):
        trainable = self.reduce_sum((labels[:, 1:] != IGNORE).sum())
        self.total_tokens += trainable
        self.step_tokens += trainable
        logits = self.model(ids)[:, :-1]
        loss = F.cross_entropy(
            logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction="sum"
        )
        return loss / num_items

    def train_step(self, micro_batches):
        self.step_tokens = 0
        start = time.perf_counter()
        num_items = self.reduce_sum(sum((labels[:, 1:] != IGNORE).sum() for _, labels in micro_batches))
        step_loss = 0.0
        for ids, labels in micro_batches:
            loss = self.compute_loss(ids, labels, num_items)
            # fully_shard averages the gradients over the ranks
            (loss * self.world_size).backward()
            step_loss += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        elapsed = time.perf_counter() - start
        return {
            "loss": self.reduce_sum(step_loss),
            "grad_norm": grad_norm.full_tensor().item(),
            "tokens": int(self.step_tokens),
            "tokens/total": int(self.total_tokens),
            "tokens/s/gpu": self.step_tokens / self.world_size / elapsed,
        }

    def train(self, ids, labels):
        args = self.args
        per_rank = args.micro_batch // self.world_size
        per_step = args.micro_batch * args.grad_accum
        g = torch.Generator().manual_seed(args.seed)
        order = torch.randperm(len(ids), generator=g)
        for step in range(args.steps):
            micro_batches = []
            for m in range(args.grad_accum):
                first = (step * per_step + m * args.micro_batch) % len(ids)
                index = order[first + self.rank * per_rank : first + (self.rank + 1) * per_rank]
                micro_batches.append((ids[index].to(self.device), labels[index].to(self.device)))
            logs = self.train_step(micro_batches)
            self.history.append(logs)
            if self.rank == 0 and (step % args.log_every == 0 or step == args.steps - 1):
                print(
                    f"step {step:3d} loss {logs['loss']:.6f} gnorm {logs['grad_norm']:.4f} "
                    f"tokens {logs['tokens']} total {logs['tokens/total']} tok/s/gpu {logs['tokens/s/gpu']:.1f}",
                    flush=True,
                )

    @torch.no_grad()
    def evaluate(self, ids, labels):
        self.model.eval()
        total, count, correct = 0.0, 0, 0
        per_rank = len(ids) // self.world_size
        part = slice(self.rank * per_rank, (self.rank + 1) * per_rank)
        for x, y in zip(ids[part].split(8), labels[part].split(8)):
            x, y = x.to(self.device), y[:, 1:].to(self.device)
            logits = self.model(x)[:, :-1]
            total += F.cross_entropy(logits.reshape(-1, VOCAB), y.reshape(-1), ignore_index=IGNORE, reduction="sum")
            count += (y != IGNORE).sum()
            correct += ((logits.argmax(-1) == y) & (y != IGNORE)).sum()
        self.model.train()
        total, count, correct = self.reduce_sum(total), self.reduce_sum(count), self.reduce_sum(correct)
        return total / count, correct / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=8, help="over all ranks")
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--log-every", type=int, default=4)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--metrics-file", default=None)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    model = Decoder().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    trainer = Trainer(model, args, device, rank, world_size)
    train_ids, train_labels = make_dataset(256, 24, seed=args.seed)
    eval_ids, eval_labels = make_dataset(64, 24, seed=args.seed + 1)
    trainer.train(train_ids, train_labels)
    eval_loss, accuracy = trainer.evaluate(eval_ids, eval_labels)

    if rank == 0:
        steady = trainer.history[2:]
        mean_rate = sum(h["tokens/s/gpu"] for h in steady) / len(steady)
        mean_tokens = sum(h["tokens"] for h in trainer.history) / len(trainer.history)
        print(f"eval loss {eval_loss:.6f} accuracy {accuracy:.4f}")
        print(f"throughput {mean_rate:.1f} tok/s/gpu, {mean_tokens:.2f} tokens per step")
        if args.metrics_file:
            with open(args.metrics_file, "w") as f:
                json.dump(trainer.history, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
