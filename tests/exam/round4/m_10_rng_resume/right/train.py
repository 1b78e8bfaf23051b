import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from net import build, rows
from snapshot import Snapshot


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="snaps")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 4, 1.0) * (1 - s / (2 * args.steps)))
    torch.manual_seed(1000 + rank)  # masks and dropout differ from rank to rank
    snapshot = Snapshot(model, opt, sched)
    begin = snapshot.load(args.resume) if args.resume else 0

    x_all = rows()
    for step in range(begin, args.stop_at or args.steps):
        pick = torch.randperm(len(x_all), generator=torch.Generator().manual_seed(step))[:args.batch]
        x = x_all[pick[rank::world]]
        out, hide = model(x)
        err = (out - x).square()
        loss = err.mean() + err[hide].sum() / x.numel()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        seen = torch.stack([loss.detach(), hide.float().mean()])
        dist.all_reduce(seen)
        seen /= world
        if rank == 0:
            print(f"step {step + 1} loss {seen[0]:.4f} hidden {seen[1]:.3f} lr {sched.get_last_lr()[0]:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            snapshot.save(args.out, step + 1)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
