"""Sequence-to-sequence digit reversal with an LSTM; gradients are summed over a window of micro-batches.

The number of micro-batches in a window grows during training (small batches first).
"""
import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, N = 14, 7
SEP = VOCAB - 1


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.norm(x + self.lstm(x)[0])


class Reverser(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.layers = nn.Sequential(Layer(dim), Layer(dim))
        self.out = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, x):
        return self.out(self.layers(self.emb(x)))


def micro_batch(index, size):
    g = torch.Generator().manual_seed(5000 + index)
    digits = torch.randint(0, VOCAB - 1, (size, N), generator=g)
    sep = torch.full((size, 1), SEP)
    return torch.cat([digits, sep, digits.flip(1)], dim=1)


def window_size(step):
    return 2 if step < 8 else 4


def first_index(step):
    return sum(window_size(s) for s in range(step))


def save(root, step, model, opt):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "opt": o, "step": torch.tensor(step)}, checkpoint_id=os.path.join(root, f"at{step:04d}"))
    if dist.get_rank() == 0:  # keep two
        for old in sorted(os.listdir(root))[:-2]:
            shutil.rmtree(os.path.join(root, old))
    dist.barrier()


def load(root, model, opt):
    m, o = get_state_dict(model, opt)
    state = {"model": m, "opt": o, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=os.path.join(root, sorted(os.listdir(root))[-1]))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    return int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--micro", type=int, default=16)
    ap.add_argument("--max-norm", type=float, default=0.5)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    model = Reverser()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, nesterov=True)
    step = load(args.resume, model, opt) if args.resume else 0

    per = args.micro // world
    while step < args.steps:
        n = window_size(step)
        total = torch.zeros(())
        for k in range(n):
            model.set_requires_gradient_sync(k == n - 1)
            seq = micro_batch(first_index(step) + k, args.micro)[rank * per : (rank + 1) * per]
            logits = model(seq[:, :-1])
            loss = F.cross_entropy(logits[:, N:].flatten(0, 1), seq[:, N + 1 :].flatten())
            loss.backward()
            total += loss.detach() / n
        for p in model.parameters():
            p.grad.div_(n)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(total)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {total.item() / world:.4f} grad norm {norm.item():.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt)

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
