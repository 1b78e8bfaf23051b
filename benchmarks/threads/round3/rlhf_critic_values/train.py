# Critic warm-up for a PPO pipeline: a small causal transformer predicts the
# return of every response token. Rollouts come from a scripted environment with
# responses of very different length; micro-batches are accumulated to one update.
#
#   torchrun --standalone --nproc_per_node 2 train.py
import argparse
import dataclasses
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclasses.dataclass
class CriticConfig:
    vocab: int = 48
    dim: int = 48
    heads: int = 4
    layers: int = 2
    prompt_len: int = 6
    max_response: int = 26
    mini_batch: int = 32
    micro_batch_per_rank: int = 4
    updates: int = 24
    lr: float = 0.08
    momentum: float = 0.9
    max_grad_norm: float = 10.0
    cliprange_value: float = 0.5
    gamma: float = 0.95
    seed: int = 3


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Critic(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.prompt_len + cfg.max_response, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg.dim, cfg.heads) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.value = nn.Linear(cfg.dim, 1)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.value(self.norm(x))


def rollouts(cfg, update):
    """One global mini-batch: token ids, returns, old values and the response mask."""
    g = torch.Generator().manual_seed(cfg.seed * 7919 + update)
    n, total = cfg.mini_batch, cfg.prompt_len + cfg.max_response
    ids = torch.randint(1, cfg.vocab, (n, total), generator=g)
    short = torch.randint(3, 9, (n,), generator=g)
    long = torch.randint(18, cfg.max_response + 1, (n,), generator=g)
    length = torch.where(torch.rand(n, generator=g) < 0.5, short, long)
    step = torch.arange(total) - cfg.prompt_len
    mask = ((step >= 0) & (step < length[:, None])).float()
    reward = (torch.sin(ids * 0.37) + 0.02 * length[:, None]) * mask
    returns = torch.zeros(n, total)
    running = torch.zeros(n)
    for t in reversed(range(total)):
        running = reward[:, t] + cfg.gamma * running
        returns[:, t] = running
    returns = returns * mask * 0.5
    old = returns + 0.6 * torch.randn(n, total, generator=g)
    return {"ids": ids * ((step < 0) | (mask > 0)), "returns": returns, "old": old * mask, "mask": mask}


def masked_aggregate(values, mask, batch_tokens, dp_size):
    return (values * mask).sum() / batch_tokens * dp_size


def value_loss(pred, micro, cfg, batch_tokens, dp_size):
    clipped = torch.clamp(pred, micro["old"] - cfg.cliprange_value, micro["old"] + cfg.cliprange_value)
    losses = torch.maximum((pred - micro["returns"]) ** 2, (clipped - micro["returns"]) ** 2)
    return 0.5 * masked_aggregate(losses, micro["mask"], batch_tokens, dp_size)


class CriticWorker:
    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = Critic(cfg).to(device)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=cfg.momentum)

    def shard(self, batch):
        rows = self.cfg.mini_batch // self.dp_size
        lo = self.rank * rows
        return {k: v[lo:lo + rows].to(self.device) for k, v in batch.items()}

    def split(self, batch):
        size = self.cfg.micro_batch_per_rank
        rows = batch["ids"].shape[0]
        return [{k: v[i:i + size] for k, v in batch.items()} for i in range(0, rows, size)]

    def update(self, batch):
        batch = self.shard(batch)
        batch_tokens = batch["mask"].sum()
        dist.all_reduce(batch_tokens)

        micros = self.split(batch)
        squared_error = torch.zeros((), device=self.device)
        for i, micro in enumerate(micros):
            self.model.set_requires_gradient_sync(i == len(micros) - 1)
            pred = self.model(micro["ids"]).squeeze(-1)
            loss = value_loss(pred, micro, self.cfg, batch_tokens, self.dp_size)
            loss.backward()
            with torch.no_grad():
                squared_error += ((pred - micro["returns"]) ** 2 * micro["mask"]).sum()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        self.optim.step()
        self.optim.zero_grad()
        dist.all_reduce(squared_error)
        return {"mse": (squared_error / batch_tokens).item(), "grad_norm": norm.full_tensor().item()}


def main():
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(CriticConfig):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    cfg = CriticConfig(**vars(parser.parse_args()))

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    worker = CriticWorker(cfg, device)
    for update in range(cfg.updates):
        stats = worker.update(rollouts(cfg, update))
        if worker.rank == 0:
            print(f"update {update:2d} value_mse {stats['mse']:.6f} grad_norm {stats['grad_norm']:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
