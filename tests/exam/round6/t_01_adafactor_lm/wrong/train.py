import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from model import TinyLM
from optim import ShardedAdafactor


def make_corpus(n=4096, vocab=64, seed=7):
    """A noisy second-order pattern, so there is something to learn."""
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, dtype=torch.long)
    noise = torch.rand(n, generator=g)
    rnd = torch.randint(0, vocab, (n,), generator=g)
    for i in range(2, n):
        x[i] = rnd[i] if noise[i] < 0.15 else (3 * x[i - 1] + x[i - 2] + 1) % vocab
    return x


def batch_at(corpus, step, batch, ctx, seed=11):
    g = torch.Generator().manual_seed(seed * 100003 + step)
    start = torch.randint(0, len(corpus) - ctx - 1, (batch,), generator=g)
    rows = torch.stack([corpus[s : s + ctx + 1] for s in start])
    return rows[:, :-1], rows[:, 1:]


def save(path, step, model, opt):
    """Each rank writes its own shards; the optimizer state is in shard layout already."""
    os.makedirs(path, exist_ok=True)
    blob = {
        "step": step,
        "model": {k: (v.to_local() if isinstance(v, DTensor) else v).clone() for k, v in model.state_dict().items()},
        "optim": opt.state_dict(),
    }
    torch.save(blob, os.path.join(path, f"step{step:05d}_rank{dist.get_rank()}of{dist.get_world_size()}.pt"))
    dist.barrier()


def load(path, model, opt):
    files = sorted(glob.glob(os.path.join(path, f"step*_rank{dist.get_rank()}of{dist.get_world_size()}.pt")))
    if not files:
        raise FileNotFoundError(f"no checkpoint for this world size in {path}")
    blob = torch.load(files[-1], weights_only=True)
    with torch.no_grad():
        for k, v in model.state_dict().items():
            (v.to_local() if isinstance(v, DTensor) else v).copy_(blob["model"][k])
    opt.load_state_dict(blob["optim"])
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--ctx", type=int, default=24)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = TinyLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = ShardedAdafactor(model.parameters(), lr=args.lr)
    corpus = make_corpus()

    start = load(args.resume, model, opt) if args.resume else 0
    per_rank = args.batch // world
    for step in range(start, args.steps):
        x, y = batch_at(corpus, step, args.batch, args.ctx)
        x, y = x[rank * per_rank : (rank + 1) * per_rank], y[rank * per_rank : (rank + 1) * per_rank]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 0 or step == args.steps - 1):
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt)

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
