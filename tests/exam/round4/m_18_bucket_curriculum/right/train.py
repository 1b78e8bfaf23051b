"""Length curriculum: short sequences first, batches filled by tokens; ranks get different numbers of rows and tokens."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB = 18


class Copycat(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 3)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        a, b = self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2).chunk(2, -1)
        x = x + a * torch.sigmoid(b)
        return self.head(x + self.ff(x))


def sequences(n=1500):
    g = torch.Generator().manual_seed(42)
    out = []
    for _ in range(n):
        length = int(torch.randint(4, 20, (1,), generator=g))
        s = torch.randint(1, VOCAB, (2,), generator=g).tolist()
        while len(s) < length:
            s.append((s[-1] + s[-2]) % (VOCAB - 1) + 1)
        out.append(torch.tensor(s))
    return out


def plan(seqs, steps, budget):
    """For every step a list of sequence numbers; the longest length allowed grows from 6 to 19."""
    g = torch.Generator().manual_seed(0)
    batches = []
    for step in range(steps):
        limit = 6 + int(13 * min(1.0, step / (0.7 * steps)))
        pool = [i for i, s in enumerate(seqs) if len(s) <= limit]
        batch, tokens = [], 0
        for j in torch.randperm(len(pool), generator=g).tolist():
            if tokens + len(seqs[pool[j]]) > budget:
                break
            batch.append(pool[j])
            tokens += len(seqs[pool[j]])
        batches.append(batch)
    return batches


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--tokens", type=int, default=512, help="token budget of a global batch")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Copycat()
    fully_shard(model.ff)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2, eps=1e-6)
    seqs = sequences()

    for step, batch in enumerate(plan(seqs, args.steps, args.tokens)):
        rows = sorted(batch, key=lambda i: len(seqs[i]))[rank::world]
        pad = nn.utils.rnn.pad_sequence([seqs[i] for i in rows], batch_first=True)
        ids, tgt = pad[:, :-1], pad[:, 1:]
        count = (tgt != 0).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(model(ids).flatten(0, 1), tgt.flatten(), ignore_index=0, reduction="sum") / count
        (loss * world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        info = torch.stack([loss.detach(), torch.tensor(float(len(rows)))])
        dist.all_reduce(info)
        if rank == 0:
            print(f"step {step + 1} nll {info[0]:.4f} tokens {int(count)} rows {int(info[1])}", flush=True)

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
