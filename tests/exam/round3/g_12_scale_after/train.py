"""The backward passes use plain sums of token losses. How many tokens the step had is known only at the end of the accumulation
(documents are drawn until a token budget is full), and only then are the gradients divided. Checkpoints are one ordinary file."""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, MAX_LEN, LANES = 32, 24, 18, 4
GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        x = x + self.rnn(self.norm(x))[0]
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def document(seed):
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(5, MAX_LEN, (1,), generator=g))
    a, b = (int(torch.randint(0, VOCAB, (1,), generator=g)) for _ in range(2))
    return (a + (1 + b % 3) * torch.arange(n + 1)) % VOCAB


def lane_batches(step, lane, rounds):
    """each lane draws a batch of documents per round; short documents leave padding"""
    for r in range(rounds):
        docs = [document(((step * LANES + lane) * rounds + r) * 10 + i) for i in range(2 + (step + r) % 3)]
        ids = nn.utils.rnn.pad_sequence([d[:-1] for d in docs], batch_first=True)
        yield ids, nn.utils.rnn.pad_sequence([d[1:] for d in docs], batch_first=True, padding_value=-100)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--rounds", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)  # only the weights of rank 0 count, they are sent to the others below
    model = LM()
    initial = {k: v.clone() for k, v in model.state_dict().items()} if rank == 0 else {}
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    first, optim_state = 0, None
    if args.resume:
        newest = max(pathlib.Path(args.resume).glob("*.pt"), key=lambda p: int(p.stem))
        first = int(newest.stem)
        if rank == 0:
            loaded = torch.load(newest)
            initial, optim_state = loaded["model"], loaded["optim"]
    set_model_state_dict(model, initial, options=SPREAD)
    if args.resume:
        set_optimizer_state_dict(model, optimizer, optim_state or {}, options=SPREAD)

    for step in range(first, args.steps):
        tokens, total = torch.zeros(()), torch.zeros(())
        work = [b for lane in range(rank, LANES, world) for b in lane_batches(step, lane, args.rounds)]
        for k, (ids, targets) in enumerate(work):
            model.set_is_last_backward(k == len(work) - 1)
            model.set_requires_gradient_sync(k == len(work) - 1)
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            loss.backward()
            tokens += (targets != -100).sum()
            total += loss.detach()
        dist.all_reduce(tokens)
        dist.all_reduce(total)
        for p in model.parameters():
            p.grad.mul_(world / tokens)  # the gradient holds (sum over all ranks) / world
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} tokens {int(tokens)} loss {(total / tokens).item():.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            state = {
                "model": get_model_state_dict(model, options=GATHER),
                "optim": get_optimizer_state_dict(model, optimizer, options=GATHER),
            }
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(state, os.path.join(args.out, f"{step + 1}.pt.tmp"))
                os.replace(os.path.join(args.out, f"{step + 1}.pt.tmp"), os.path.join(args.out, f"{step + 1}.pt"))
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=GATHER)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
