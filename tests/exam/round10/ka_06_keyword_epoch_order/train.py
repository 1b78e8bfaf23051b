import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from loader import ShardedLoader
from speech import KeywordNet, make_corpus, spec_augment

SEED = 99
STEPS = 26
GLOBAL_BATCH = 24


def shard_file(root, step, rank):
    return os.path.join(root, f"{step:04d}", f"rank_{rank}.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(SEED)
    model = KeywordNet()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # own augmentation and dropout on every rank
    torch.manual_seed(SEED * 100 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=8e-3, total_steps=STEPS + 1)
    loader = ShardedLoader(*make_corpus(), GLOBAL_BATCH // world, rank, world, SEED)
    parts = {"model": model, "opt": opt, "sched": sched, "loader": loader}

    step = 0
    if args.resume:
        step = max(int(d) for d in os.listdir(args.resume))
        saved = torch.load(shard_file(args.resume, step, rank), weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])

    while step < STEPS:
        x, y = loader.next()
        logits = model(spec_augment(x))
        loss = F.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        step += 1
        stats = torch.stack([loss.detach(), (logits.argmax(-1) == y).float().mean()])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} epoch {loader.epoch} loss {stats[0] / world:.4f} acc {stats[1] / world:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            path = shard_file(args.out, step, rank)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "rng": torch.get_rng_state()}, path)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
