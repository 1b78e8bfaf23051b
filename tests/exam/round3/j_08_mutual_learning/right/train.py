"""Deep mutual learning: two peers learn from labels and from each other."""

import argparse

import torch
import torch.distributed as dist

import store
from noisy import Epochs, noisy_task
from peers import make_peer, peer_loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="peers")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = noisy_task()
    batches = Epochs(len(x), args.batch, rank, world)

    pairs = {}
    for name, seed in (("ann", 1), ("bob", 2)):
        net = make_peer(seed)
        pairs[name] = (net, torch.optim.AdamW(net.parameters(), lr=args.lr, betas=(0.9, 0.99)))
    step = store.load(args.resume, pairs) if args.resume else 0

    (ann, _), (bob, _) = pairs["ann"], pairs["bob"]
    while step < args.steps:
        idx = batches[step]
        a, b = ann(x[idx]), bob(x[idx])
        losses = peer_loss(a, b, y[idx]), peer_loss(b, a, y[idx])
        sum(losses).backward()
        for net, opt in pairs.values():
            torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            opt.step()
            opt.zero_grad()
        step += 1

        agree = (a.argmax(1) == b.argmax(1)).float().mean()
        stats = torch.stack([losses[0].detach(), losses[1].detach(), agree])
        dist.all_reduce(stats)
        if rank == 0:
            s = stats / world
            print(f"{step:3d}  ann {s[0]:.4f}  bob {s[1]:.4f}  agree {s[2]:.2f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            store.save(args.out, step, pairs)

    if args.export:
        store.export(args.export, pairs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
