"""Next-token pretraining on generated documents with a replicate x shard mesh.

    torchrun --nproc-per-node 4 train.py --dp-shard 2     # 2 replicas of 2 shards
    torchrun --nproc-per-node 2 train.py                  # replicas only
"""
import argparse
import logging
import math
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

logger = logging.getLogger("pretrain")


@dataclass
class DataArgs:
    n_docs: int = 2048
    seq_len: int = 24
    vocab: int = 32
    seed: int = 42
    batch_size: int = 32  # sequences per step, over all data-parallel ranks


@dataclass
class ModelArgs:
    dim: int = 32
    n_layers: int = 2
    conv_size: int = 4


class MinGRU(nn.Module):
    """Gated linear recurrence, run as a loop over the short sequences."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.conv_size = args.conv_size
        self.norm = nn.RMSNorm(args.dim)
        self.conv = nn.Conv1d(args.dim, args.dim, args.conv_size, groups=args.dim)
        self.gate = nn.Linear(args.dim, args.dim)
        self.value = nn.Linear(args.dim, args.dim)
        self.out = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x):
        h = self.conv(F.pad(self.norm(x).transpose(1, 2), (self.conv_size - 1, 0))).transpose(1, 2)
        z, v = torch.sigmoid(self.gate(h)), torch.tanh(self.value(h))
        state, states = torch.zeros_like(v[:, 0]), []
        for t in range(x.shape[1]):
            state = (1 - z[:, t]) * state + z[:, t] * v[:, t]
            states.append(state)
        return x + self.out(torch.stack(states, 1))


class RecurrentLM(nn.Module):
    def __init__(self, args: ModelArgs, vocab: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, args.dim)
        self.layers = nn.ModuleList(MinGRU(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, vocab, bias=False)

    def forward(self, tokens, targets):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        logits = self.output(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_documents(args: DataArgs):
    """Walks on a random sparse transition graph, one per document."""
    rng = np.random.default_rng(args.seed)
    successors = rng.integers(0, args.vocab, (args.vocab, 3))
    docs = np.empty((args.n_docs, args.seq_len + 1), dtype=np.int64)
    docs[:, 0] = rng.integers(0, args.vocab, args.n_docs)
    for t in range(args.seq_len):
        pick = rng.choice(3, args.n_docs, p=[0.7, 0.2, 0.1])
        docs[:, t + 1] = successors[docs[:, t], pick]
    return docs


def read_jsonl_like(docs, offset, stride):
    """Yields (document, position): every `stride`-th line starting at `offset`, for ever."""
    line = offset
    while True:
        yield docs[line % len(docs)], line
        line += stride


def batches(docs, rank, world_size, args: DataArgs):
    lines = read_jsonl_like(docs, rank, world_size)
    while True:
        rows = [next(lines)[0] for _ in range(args.batch_size // world_size)]
        chunk = torch.from_numpy(np.stack(rows))
        yield chunk[:, :-1], chunk[:, 1:]


def get_device_mesh(dp_shard):
    world = dist.get_world_size()
    assert world % dp_shard == 0, f"world size {world} is not a multiple of dp_shard {dp_shard}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (world // dp_shard, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def get_dp_rank(mesh):
    """Position and number of the data-parallel workers over both mesh dimensions."""
    dp_rank = mesh.get_local_rank("dp_replicate")
    dp_degree = mesh["dp_replicate"].size()
    if "dp_shard" in mesh.mesh_dim_names:
        dp_rank = dp_rank * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
        dp_degree *= mesh["dp_shard"].size()
    return dp_rank, dp_degree


def dist_mean(x):
    t = x.detach().clone()
    dist.all_reduce(t)
    return (t / dist.get_world_size()).item()


def lr_cosine(step, warmup, total, min_ratio):
    if step < warmup:
        return (step + 1) / warmup
    t = (step - warmup) / (total - warmup)
    return min_ratio + 0.5 * (1 - min_ratio) * (math.cos(math.pi * t) + 1)


@torch.no_grad()
def validate(model, data_args):
    model.eval()
    held_out = make_documents(DataArgs(n_docs=2048 + 256, seed=data_args.seed))[2048:]
    held_out = torch.from_numpy(held_out)[dist.get_rank() :: dist.get_world_size()]
    loss = model(held_out[:, :-1], held_out[:, 1:])
    model.train()
    return dist_mean(loss)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--dp-shard", type=int, default=1, help="ranks that share one copy of the weights")
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--log-freq", type=int, default=4)
    args = p.parse_args()
    data_args, model_args = DataArgs(), ModelArgs()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING,
                        format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)

    mesh = get_device_mesh(args.dp_shard)
    dp_rank, dp_degree = get_dp_rank(mesh)
    logger.info("running on dp rank %d of %d", dp_rank, dp_degree)

    torch.manual_seed(data_args.seed)
    model = RecurrentLM(model_args, data_args.vocab)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_cosine(s, 5, args.steps, 0.1))

    data = batches(make_documents(data_args), dp_rank, dp_degree, data_args)
    tokens_seen = 0
    for step in range(1, args.steps + 1):
        tokens, targets = next(data)
        loss = model(tokens, targets)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        tokens_seen += targets.numel() * dp_degree
        if step % args.log_freq == 0 or step == 1:
            logger.info("step %d loss %.6f grad_norm %.4f lr %.2e tokens %d",
                        step, dist_mean(loss), grad_norm.item(), scheduler.get_last_lr()[0], tokens_seen)

    val_loss = validate(model, data_args)
    logger.info("val loss %.6f", val_loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
