"""Pretrain a tiny GPT with hybrid sharding: replicated over nodes, sharded over the devices of a node."""
import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class TrainArgs:
    global_batch_size: int = 32
    micro_batch_size: int = 4
    max_tokens: int = 32 * 32 * 24
    lr_warmup_steps: int = 4
    max_norm: float = 1.0
    lr: float = 6e-3
    min_lr: float = 6e-4

    def gradient_accumulation_iters(self, devices, num_nodes):
        """Number of iterations between optimizer steps"""
        iters = self.batch_size(devices, num_nodes) // self.micro_batch_size
        assert iters > 0
        return iters

    def batch_size(self, devices, num_nodes):
        """Number of samples between optimizer steps per data-parallel rank"""
        batch_size = self.global_batch_size // (devices * num_nodes)
        assert batch_size > 0
        return batch_size


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.RMSNorm(dim)
        self.attn = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.norm_2 = nn.RMSNorm(dim)
        self.fc = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.attn(self.norm_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.silu(self.fc(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=48, dim=32, layers=2, heads=4, max_seq_length=32):
        super().__init__()
        self.max_seq_length = max_seq_length
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(max_seq_length, dim)
        self.h = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln_f = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.06)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class TokenStream:
    """Sequences of a noisy second-order Markov source, numbered from ``start``."""

    def __init__(self, vocab, length, seed):
        self.vocab, self.length, self.seed = vocab, length, seed
        g = torch.Generator().manual_seed(7)
        self.table = torch.randint(vocab, (vocab, 4), generator=g)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
        noise = torch.rand(self.length + 1, generator=g).tolist()
        rand = torch.randint(self.vocab, (self.length + 1,), generator=g).tolist()
        seq = rand[:2]
        while len(seq) <= self.length:
            t = len(seq)
            seq.append(rand[t] if noise[t] < 0.05 else int(self.table[seq[-1], seq[-2] % 4]))
        return torch.tensor(seq)


def loader(stream, micro_batch_size, rank, world_size):
    pos = 0
    while True:
        rows = [stream[pos + i * world_size + rank] for i in range(micro_batch_size)]
        pos += micro_batch_size * world_size
        yield torch.stack(rows)


def get_lr(train, it, warmup_iters, max_iters):
    if it < warmup_iters:
        return train.lr * it / warmup_iters
    ratio = min(1.0, (it - warmup_iters) / max(1, max_iters - warmup_iters))
    return train.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (train.lr - train.min_lr)


@torch.no_grad()
def validate(model, stream, rank, world_size, samples=32):
    model.eval()
    data = torch.stack([stream[i] for i in range(rank, samples, world_size)])
    loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    dist.all_reduce(loss)
    model.train()
    return loss.item() / world_size


def fit(model, optimizer, train, devices, num_nodes, rank, world_size, seed, log_interval):
    vocab = model.lm_head.out_features
    train_data = loader(TokenStream(vocab, model.max_seq_length, seed), train.micro_batch_size, rank, world_size)
    val_stream = TokenStream(vocab, model.max_seq_length, seed + 1)

    accumulate = train.gradient_accumulation_iters(devices, num_nodes)
    tokens_per_iter = train.micro_batch_size * model.max_seq_length
    max_iters = train.max_tokens // world_size // tokens_per_iter
    warmup_iters = min(max_iters, train.lr_warmup_steps * accumulate)

    iter_num = step_count = 0
    running = torch.zeros(())
    while iter_num < max_iters:
        batch = next(train_data)
        iter_num += 1
        is_accumulating = iter_num % accumulate != 0
        model.set_requires_gradient_sync(not is_accumulating)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        (loss / accumulate).backward()
        running += loss.detach() / accumulate

        if not is_accumulating:
            lr = get_lr(train, iter_num, warmup_iters, max_iters)
            for group in optimizer.param_groups:
                group["lr"] = lr
            nn.utils.clip_grad_norm_(model.parameters(), train.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            step_count += 1
            if step_count % log_interval == 0:
                dist.all_reduce(running)
                if rank == 0:
                    print(f"iter {iter_num} step {step_count} loss {running.item() / world_size:.6f} "
                          f"lr {lr:.3e} tokens {iter_num * tokens_per_iter * world_size}", flush=True)
            running.zero_()

    val_loss = validate(model, val_stream, rank, world_size)
    if rank == 0:
        print(f"final: {step_count} steps, val loss {val_loss:.6f}, val ppl {math.exp(val_loss):.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-nodes", type=int, default=None, help="nodes to replicate over (default 2 where possible)")
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_nodes = args.num_nodes or (2 if world_size % 2 == 0 else 1)
    devices = world_size // num_nodes
    mesh = init_device_mesh("cpu", (num_nodes, devices), mesh_dim_names=("node", "device"))
    train = TrainArgs(global_batch_size=args.global_batch_size, micro_batch_size=args.micro_batch_size)

    torch.manual_seed(args.seed)  # same seed for every process to init model
    model = GPT()
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    if rank == 0:
        print(f"{num_nodes} x {devices} devices, {sum(p.numel() for p in model.parameters()):,} parameters")

    fit(model, optimizer, train, devices, num_nodes, rank, world_size, args.seed, args.log_interval)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
