import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from adafactor import ShardedAdafactor
from model import CharLM

VOCAB, CTX, GLOBAL_BATCH = 37, 24, 16


def make_batch(step, rank, world):
    """Noisy affine sequences. Every rank draws the global batch and keeps its rows."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.empty(GLOBAL_BATCH, CTX + 1, dtype=torch.long)
    x[:, 0] = torch.randint(VOCAB, (GLOBAL_BATCH,), generator=g)
    noise = torch.rand(GLOBAL_BATCH, CTX, generator=g) < 0.1
    rnd = torch.randint(VOCAB, (GLOBAL_BATCH, CTX), generator=g)
    for t in range(CTX):
        x[:, t + 1] = torch.where(noise[:, t], rnd[:, t], (3 * x[:, t] + 5) % VOCAB)
    per = GLOBAL_BATCH // world
    return x[rank * per:(rank + 1) * per]


def save(path, step, model, opt, rank):
    folder = os.path.join(path, f"step{step:05d}")
    os.makedirs(folder, exist_ok=True)
    shards = {n: p.to_local() for n, p in model.named_parameters()}
    torch.save({"step": step, "world": dist.get_world_size(), "model": shards, "opt": opt.state_dict()},
               os.path.join(folder, f"rank{rank}.pt"))
    dist.barrier()
    if rank == 0:
        open(os.path.join(folder, "DONE"), "w").close()


def load(path, model, opt, rank):
    done = [d for d in sorted(os.listdir(path)) if os.path.exists(os.path.join(path, d, "DONE"))]
    blob = torch.load(os.path.join(path, done[-1], f"rank{rank}.pt"))
    assert blob["world"] == dist.get_world_size(), "per-rank checkpoints need the same number of ranks"
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(blob["model"][n])
    opt.load_state_dict(blob["opt"])
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = CharLM(VOCAB, ctx=CTX)
    for blk in model.blocks:
        fully_shard(blk)
    fully_shard(model)
    opt = ShardedAdafactor(model.parameters())
    start = load(args.resume, model, opt, rank) if args.resume else 0

    for step in range(start, args.steps):
        ids = make_batch(step, rank, world)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 0 or step == args.steps - 1):
            print(f"step {step} loss {shown.item() / world:.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
