import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from grow import build, grow, restore, snapshot

STEPS, BATCH, CTX, VOCAB = 15, 16, 18, 40
GROW_AT = (5, 10)


def batch(step):
    g = torch.Generator().manual_seed(808 + step)
    ids = torch.randint(0, VOCAB, (BATCH, CTX // 2), generator=g)
    return torch.cat([ids, ids], 1)  # second half repeats the first


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    p.add_argument("--export")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        ck = torch.load(os.path.join(args.resume, newest), weights_only=False)
        model, opt = build(ck["depth"])
        restore(model, opt, ck["weights"], ck["moments"])
        step = ck["step"]
    else:
        model, opt = build(1)
        step = 0

    while step < STEPS:
        if step in GROW_AT:
            model, opt = grow(model, opt)
        ids = batch(step).chunk(world)[rank]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} depth {len(model.stages)} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            weights, moments = snapshot(model, opt)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"weights": weights, "moments": moments, "depth": len(model.stages), "step": step},
                           os.path.join(args.out, f"{step:05d}.pt"))
            dist.barrier()

    weights, _ = snapshot(model, opt)
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
