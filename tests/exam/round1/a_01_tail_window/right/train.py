"""Small decoder-only LM, trained by a Trainer class with token-weighted gradient accumulation.

torchrun --standalone --nproc-per-node 2 train.py --epochs 8 --accum 4
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PAD = 0
IGNORE = -100


@dataclass
class Config:
    vocab: int = 32
    dim: int = 32
    heads: int = 2
    layers: int = 2
    max_len: int = 20
    n_docs: int = 88
    micro_batch: int = 8  # sequences per micro-batch, over all ranks
    accum: int = 4
    epochs: int = 8
    lr: float = 3e-3
    clip: float = 1.0
    seed: int = 1234


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.max_len, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg.dim, cfg.heads) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x))


def make_corpus(cfg):
    """Arithmetic progressions mod (vocab - 1) with different strides and lengths."""
    g = torch.Generator().manual_seed(cfg.seed)
    ids = torch.full((cfg.n_docs, cfg.max_len + 1), PAD)
    for i in range(cfg.n_docs):
        n = int(torch.randint(6, cfg.max_len + 2, (1,), generator=g))
        start, stride = torch.randint(1, 8, (2,), generator=g).tolist()
        ids[i, :n] = (start + stride * torch.arange(n)) % (cfg.vocab - 1) + 1
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, IGNORE)
    return ids[:, :-1], labels


class Trainer:
    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        assert cfg.micro_batch % world == 0
        self.inputs, self.labels = make_corpus(cfg)
        self.n_micro = cfg.n_docs // cfg.micro_batch
        self.steps_per_epoch = math.ceil(self.n_micro / cfg.accum)
        total = self.steps_per_epoch * cfg.epochs

        torch.manual_seed(cfg.seed)
        self.model = LM(cfg)
        mesh = init_device_mesh("cpu", (world,))
        for blk in self.model.blocks:
            fully_shard(blk, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.01)
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda s: min(1.0, (s + 1) / 4) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / total)))
        )
        self.step = 0

    def micro_batches(self, epoch):
        g = torch.Generator().manual_seed(self.cfg.seed + 1000 + epoch)
        order = torch.randperm(self.cfg.n_docs, generator=g)
        return list(order[: self.n_micro * self.cfg.micro_batch].split(self.cfg.micro_batch))

    def run_epoch(self, epoch):
        micro = self.micro_batches(epoch)
        per_rank = self.cfg.micro_batch // self.world
        tokens = [int((self.labels[idx] != IGNORE).sum()) for idx in micro]
        window_loss = torch.zeros(())
        for i, idx in enumerate(micro):
            first = i // self.cfg.accum * self.cfg.accum
            window_tokens = sum(tokens[first : first + self.cfg.accum])
            last_of_window = (i + 1) % self.cfg.accum == 0 or i + 1 == len(micro)
            self.model.set_requires_gradient_sync(last_of_window)
            mine = idx[self.rank * per_rank : (self.rank + 1) * per_rank]
            logits = self.model(self.inputs[mine])
            nll = F.cross_entropy(
                logits.flatten(0, 1), self.labels[mine].flatten(), ignore_index=IGNORE, reduction="sum"
            )
            # gradients are averaged over the ranks, so multiply by the number of ranks
            (nll * self.world / window_tokens).backward()
            window_loss += nll.detach() / window_tokens
            if last_of_window:
                self.optimizer_step(epoch, window_loss)
                window_loss = torch.zeros(())

    def optimizer_step(self, epoch, window_loss):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.opt.step()
        self.sched.step()
        self.opt.zero_grad()
        self.step += 1
        dist.all_reduce(window_loss)
        if self.rank == 0:
            print(
                f"epoch {epoch} step {self.step} loss {window_loss.item():.4f} lr {self.sched.get_last_lr()[0]:.2e}",
                flush=True,
            )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trainer = Trainer(Config(epochs=args.epochs, accum=args.accum), dist.get_rank(), dist.get_world_size())
    for epoch in range(args.epochs):
        trainer.run_epoch(epoch)
    if args.export:
        full = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
