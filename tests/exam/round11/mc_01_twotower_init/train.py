"""BPR training of a two-tower recommender."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

import checkpoint
from data import Interactions
from model import build


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=128)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Interactions()
    model = build(data.n_users, data.n_items, args.seed)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3, eps=1e-6)

    done = checkpoint.load_latest(args.resume, model, optim) if args.resume else 0
    per_rank = args.batch_size // world
    mine = slice(rank * per_rank, (rank + 1) * per_rank)

    step = 0
    for epoch in range(args.epochs):
        for users, pos, neg in data.batches(epoch, args.batch_size, args.seed):
            step += 1
            if step <= done:
                continue
            s_pos, s_neg = model(users[mine], pos[mine], neg[mine])
            loss = F.softplus(s_neg - s_pos).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optim.step()
            optim.zero_grad()
            if step % 6 == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {shown.item() / world:.5f}")
            if args.save_every and step % args.save_every == 0:
                checkpoint.save(args.out, step, model, optim)

    if rank == 0:
        print("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
