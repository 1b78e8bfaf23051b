"""Stateful LSTM language model: hidden states travel from one step to the next (truncated back-propagation)
and each stream is reset at its own times. The optimizer step happens every second chunk."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import long_streams

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CharLSTM(nn.Module):
    def __init__(self, vocab=30, dim=32, layers=2):
        super().__init__()
        self.dim = dim
        self.emb = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(layers))
        self.out = nn.Linear(dim, vocab, bias=False)

    def fresh(self, n):
        return [(torch.zeros(1, n, self.dim), torch.zeros(1, n, self.dim)) for _ in self.cells]

    def forward(self, ids, carry):
        h, new = self.emb(ids), []
        for cell, c in zip(self.cells, carry):
            y, c = cell(h, c)
            h = h + y
            new.append(c)
        return self.out(h), new


def gather_streams(t):
    """Join the ranks' streams (dim 1) in rank order."""
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, dim=1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--chunk", type=int, default=10)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    streams = long_streams()
    total = len(streams)
    mine = slice(rank * total // world, (rank + 1) * total // world)
    ids = streams[mine]
    # stream i starts a new document every 60 + 10 i tokens
    period = (60 + 10 * torch.arange(total))[mine]

    torch.manual_seed(23)
    model = CharLSTM()
    for c in model.cells:
        fully_shard(c)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=4e-3, eps=1e-4)
    carry, step = model.fresh(len(ids)), 0

    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        ck = torch.load(os.path.join(args.resume, newest), weights_only=False)
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"], options=StateDictOptions(full_state_dict=True))
        carry = [(h[:, mine].clone(), c[:, mine].clone()) for h, c in ck["carry"]]
        step = ck["step"]

    while step < args.steps:
        seen = 0.0
        for half in range(2):
            at = (2 * step + half) * args.chunk
            x, y = ids[:, at : at + args.chunk], ids[:, at + 1 : at + args.chunk + 1]
            keep = (at % period != 0).float()[None, :, None]
            carry = [(h.detach() * keep, c.detach() * keep) for h, c in carry]
            model.set_requires_gradient_sync(half == 1)
            logits, carry = model(x, carry)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / 2
            loss.backward()
            seen += loss.detach()
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(seen)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {seen.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt, options=FULL)
            whole = [(gather_streams(h.detach()), gather_streams(c.detach())) for h, c in carry]
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": m, "opt": o, "carry": whole, "step": step}, os.path.join(args.out, f"{step:04d}.pt"))
            dist.barrier()

    weights, _ = get_state_dict(model, opt, options=FULL)
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
