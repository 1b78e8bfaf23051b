"""Ragged sequences: gradients are *summed* over tokens, micro-batches and ranks, and scaled once before the step."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

PAD = -100


class Tagger(nn.Module):
    def __init__(self, vocab=30, d=24, tags=7):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, tags))

    def forward(self, t):
        return self.mlp(self.rnn(self.embed(t))[0])


def sentences(step, count):
    g = torch.Generator().manual_seed(70 + step)
    out = []
    for _ in range(count):
        n = int(torch.randint(3, 24, (1,), generator=g))
        t = torch.randint(30, (n,), generator=g)
        prev = torch.cat((t.new_zeros(1), t[:-1]))
        out.append((t, (t + 2 * (prev % 3)) % 7))
    return out


def micro_batches(rows, tokens_per_micro):
    """Greedy packing by token count: the number of micro-batches differs between ranks."""
    batch, width = [], 0
    for row in sorted(rows, key=lambda r: len(r[0])):
        if batch and max(width, len(row[0])) * (len(batch) + 1) > tokens_per_micro:
            yield batch
            batch, width = [], 0
        batch.append(row)
        width = max(width, len(row[0]))
    if batch:
        yield batch


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--sentences", type=int, default=32)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = Tagger()
    fully_shard(model.mlp)
    fully_shard(model)
    # gloo can only sum and the divisor 1 makes the reduce-scatter a plain sum
    model.set_force_sum_reduction_for_comms(True)
    model.mlp.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    model.mlp.set_gradient_divide_factor(1.0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    for step in range(args.steps):
        rows = sentences(step, args.sentences)[rank::world]
        micros = list(micro_batches(rows, tokens_per_micro=128))
        most = torch.tensor(len(micros))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        # ranks with fewer micro-batches add empty ones: the collectives of forward and backward need everybody
        micros += [[(torch.zeros(1, dtype=torch.long), torch.full((1,), PAD))]] * (int(most) - len(micros))

        stats = torch.zeros(2)
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros) - 1)
            t = pad_sequence([r[0] for r in micro], batch_first=True)
            y = pad_sequence([r[1] for r in micro], batch_first=True, padding_value=PAD)
            loss = F.cross_entropy(model(t).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            loss.backward()
            stats += torch.stack((loss.detach(), (y != PAD).sum()))
        dist.all_reduce(stats)
        for p in model.parameters():
            p.grad.div_(stats[1].item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if rank == 0:
            print(
                f"step {step} loss/token {(stats[0] / stats[1]).item():.4f} tokens {int(stats[1])} micro {int(most)}",
                flush=True,
            )

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
