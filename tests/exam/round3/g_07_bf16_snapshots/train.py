import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import net
import snapshots

VOCAB, LENGTH, GLOBAL = 50, 20, 16


def rows_of(step, rank, world):
    g = torch.Generator().manual_seed(31 * step + 7)
    first = torch.randint(0, VOCAB, (GLOBAL, 2), generator=g)
    rows = [first[:, 0], first[:, 1]]
    for _ in range(LENGTH - 1):
        rows.append((rows[-1] + rows[-2] // 10 + 3) % VOCAB)
    rows = torch.stack(rows, 1)
    noise = torch.rand(rows.shape, generator=g) < 0.05
    rows = torch.where(noise, torch.randint(0, VOCAB, rows.shape, generator=g), rows)
    return rows.chunk(world)[rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--publish-every", type=int, default=4)
    ap.add_argument("--publish-dir", default=None)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export", help="fp32 weights at the end")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = net.build(seed=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    step = tokens = 0
    if args.resume:
        extra = snapshots.restore(args.resume, model, optimizer)
        step, tokens = extra["step"], extra["tokens"]
    publish_dir = args.publish_dir or tempfile.mkdtemp()

    while step < args.steps:
        rows = rows_of(step, rank, world)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + GLOBAL * LENGTH
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} tokens {tokens} loss {loss.item() / world:.4f} grad-norm {norm.item():.3f}")
        if args.publish_every and step % args.publish_every == 0:
            snapshots.publish(model, f"{publish_dir}/model-{step}.pt")
        if args.save_every and step % args.save_every == 0:
            snapshots.save(args.out, step, model, optimizer, {"tokens": tokens})

    if args.export:
        weights = snapshots.get_model_state_dict(model, options=snapshots.FULL)
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
