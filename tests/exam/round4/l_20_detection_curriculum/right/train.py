"""Keypoint localisation with a curriculum that paces itself by the loss of the whole job."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from heat import Locator
from keeper import Keeper
from stream import Pace, endless


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="kp")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = Locator()
    for c in model.convs:
        fully_shard(c)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    pace = Pace(target=0.6)
    keeper = Keeper(model, opt, pace)
    start = keeper.load(args.resume) if args.resume else 0

    for step, img, centre in endless(start, args.batch, rank, world, pace):
        if step >= args.steps:
            break
        loss = 20 * F.mse_loss(model(img, 4.0 + 4.0 * pace.level), centre)
        loss.backward()
        opt.step()
        opt.zero_grad()
        total = loss.detach() / world
        dist.all_reduce(total)
        pace.report(total.item())
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {total.item():.4f} difficulty {pace.level:.2f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            keeper.save(args.out, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
