"""Pre-train a causal LM on packed documents; the learning rate follows the number of tokens seen."""
import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    vocab: int = 32
    dim: int = 32
    heads: int = 4
    layers: int = 2
    row_len: int = 24
    rows: int = 8
    steps: int = 16
    peak_lr: float = 1e-2
    warmup_tokens: int = 500
    total_tokens: int = 2600
    seed: int = 5


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.n1, self.n2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim, bias=False)
        self.o = nn.Linear(cfg.dim, cfg.dim)
        self.ff = nn.Sequential(nn.Linear(cfg.dim, 2 * cfg.dim), nn.SiLU(), nn.Linear(2 * cfg.dim, cfg.dim))

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class PackedLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.row_len, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, ids, doc, pos):
        t = ids.shape[1]
        mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(pos)
        for layer in self.layers:
            x = layer(x, mask[:, None])
        return self.head(self.norm(x))


def packed_batch(cfg, step):
    """Fill every row with documents; document 0 is padding. Labels are -100 at document ends."""
    g = torch.Generator().manual_seed(cfg.seed * 10_000 + step)
    ids = torch.zeros(cfg.rows, cfg.row_len, dtype=torch.long)
    doc, pos = torch.zeros_like(ids), torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for r in range(cfg.rows):
        at, n = 0, 0
        while True:
            length = int(torch.randint(4, 17, (1,), generator=g))
            if at + length > cfg.row_len:
                break
            n += 1
            start, stride = (int(v) for v in torch.randint(1, 6, (2,), generator=g))
            text = (start + stride * torch.arange(length)) % cfg.vocab
            ids[r, at:at + length] = text
            doc[r, at:at + length] = n
            pos[r, at:at + length] = torch.arange(length)
            labels[r, at:at + length - 1] = text[1:]
            at += length
    return ids, doc, pos, labels


def lr_at(cfg, tokens):
    if tokens < cfg.warmup_tokens:
        return cfg.peak_lr * (tokens + 1) / cfg.warmup_tokens
    done = min(1.0, (tokens - cfg.warmup_tokens) / (cfg.total_tokens - cfg.warmup_tokens))
    return cfg.peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=Config.steps)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    cfg = Config(steps=args.steps)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    model = PackedLM(cfg)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.peak_lr, betas=(0.9, 0.95), weight_decay=0.1)

    step, tokens_seen = 0, 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.rsplit("_", 1)[1]))
        state = torch.load(os.path.join(args.resume, newest, f"rank{rank}.pt"), weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        step, tokens_seen = state["step"], state["tokens_seen"]

    while step < cfg.steps:
        ids, doc, pos, labels = (t[rank::world] for t in packed_batch(cfg, step))
        lr = lr_at(cfg, tokens_seen)
        for group in opt.param_groups:
            group["lr"] = lr

        targets = (labels != -100).sum()
        dist.all_reduce(targets)
        logits = model(ids, doc, pos)
        loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        # gradients are averaged over the ranks, so scale back to a mean over all target tokens
        (loss_sum * world / targets).backward()
        opt.step()
        opt.zero_grad()

        real = (doc != 0).sum()
        tokens_seen += int(real)
        step += 1

        total = loss_sum.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total / targets:.4f} lr {lr:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            folder = os.path.join(args.out, f"step_{step}")
            os.makedirs(folder, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step,
                        "tokens_seen": tokens_seen}, os.path.join(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
