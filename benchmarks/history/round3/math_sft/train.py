"""Supervised fine-tuning of a tiny decoder on modular additions, with micro batches and a token-weighted loss."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MOD, EQ, PLUS, PAD = 11, 11, 12, 13
VOCAB, MAX_LEN = 14, 12


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--total-train-steps", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--micro-batch-size", type=int, default=4)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--warmup-proportion", type=float, default=0.1)
    p.add_argument("--gradient-clipping", type=float, default=0.3)
    p.add_argument("--seed", type=int, default=5)
    return p.parse_args()


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.input_norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attn.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.silu(self.up(self.post_norm(x))))


class Decoder(nn.Module):
    def __init__(self, dim=24, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Embedding(MAX_LEN, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make_sample(seed, index):
    """a + b + ... = s (mod 11) followed by a repetition of the last term; only the answer is trained."""
    g = torch.Generator().manual_seed(seed * 1_000_003 + index)
    terms = torch.randint(MOD, (int(torch.randint(2, 5, (1,), generator=g)),), generator=g).tolist()
    prompt = [tok for t in terms for tok in (t, PLUS)][:-1] + [EQ]
    answer = [sum(terms) % MOD] + terms[: len(terms) - 1]
    ids = (prompt + answer)[:MAX_LEN]
    labels = [-100] * len(prompt) + answer
    pad = MAX_LEN - len(ids)
    return torch.tensor(ids + [PAD] * pad), torch.tensor(labels[:MAX_LEN] + [-100] * pad)


def make_batch(seed, step, batch_size, rank, world):
    rows = [make_sample(seed, step * batch_size + i) for i in range(rank, batch_size, world)]
    return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])


def token_loss(model, ids, labels):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")


@torch.no_grad()
def fsdp_clip_grad_norm(parameters, max_norm):
    """Global gradient norm over sharded and plain parameters; gradients are scaled in place."""
    grads = [p.grad for p in parameters if p.grad is not None]
    total_norm = torch.nn.utils.get_total_norm(grads, norm_type=2.0)
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


class Engine:
    def __init__(self, args, device, mesh):
        self.args, self.device, self.world = args, device, mesh.size()
        torch.manual_seed(args.seed)
        self.model = Decoder().to(device)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
        warmup = max(1, int(args.warmup_proportion * args.total_train_steps))

        def schedule(step):
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.total_train_steps - warmup)))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def train_batch(self, ids, labels):
        self.optimizer.zero_grad()
        total_weight = (labels[:, 1:] != -100).sum().float()
        dist.all_reduce(total_weight)
        losses = []
        for i in range(0, len(ids), self.args.micro_batch_size):
            mb = slice(i, i + self.args.micro_batch_size)
            loss = token_loss(self.model, ids[mb], labels[mb])
            # gradients are averaged over the ranks
            (loss * self.world / total_weight).backward()
            losses.append(loss.detach())
        grad_norm = fsdp_clip_grad_norm(
            list(self.model.parameters()),
            max_norm=self.args.gradient_clipping,
        )
        self.optimizer.step()
        total_loss = torch.stack(losses).sum()
        dist.all_reduce(total_loss)
        return {
            "loss": (total_loss / total_weight).item(),
            "grad_norm": grad_norm.item(),
            "lr": self.lr_scheduler.get_last_lr()[0],
        }

    @torch.no_grad()
    def evaluate(self, ids, labels):
        stats = torch.stack([token_loss(self.model, ids, labels), (labels[:, 1:] != -100).sum().float()])
        dist.all_reduce(stats)
        return (stats[0] / stats[1]).item()


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    engine = Engine(args, device, init_device_mesh(device.type, (world,)))

    for step in range(args.total_train_steps):
        ids, labels = make_batch(args.seed, step, args.batch_size, rank, world)
        stats = engine.train_batch(ids.to(device), labels.to(device))
        engine.lr_scheduler.step()
        if rank == 0 and (step % 5 == 0 or step == args.total_train_steps - 1):
            print(f"step {step:3d} " + " ".join(f"{k} {v:.6f}" for k, v in stats.items()), flush=True)

    weight = sum(p.full_tensor().double().abs().sum() for p in engine.model.parameters()).item()
    ids, labels = make_batch(args.seed + 1, 0, 64, rank, world)
    valid = engine.evaluate(ids.to(device), labels.to(device))
    if rank == 0:
        print(f"valid loss {valid:.6f} |w| {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
