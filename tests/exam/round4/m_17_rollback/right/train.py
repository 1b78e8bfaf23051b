"""Training that goes back to the last good snapshot when the loss explodes, and leaves out the batches in between."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import disk
from memory import Snapshot
from problem import batch, build


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30, help="updates that count")
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--snap-every", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)
    # updates: how often the weights were changed (net of rollbacks); cursor: next batch of the stream
    control = {"updates": 0, "cursor": 0, "level": 0.0, "rollbacks": 0}
    good = None
    if args.resume:
        disk.load(args.resume, model, opt, control)
        good = Snapshot(model, opt, control["updates"])

    while control["updates"] < (args.stop_at or args.steps):
        if control["updates"] % args.snap_every == 0 and opt.state:
            good = Snapshot(model, opt, control["updates"])
        x, y = batch(control["cursor"], args.batch, rank, world)
        control["cursor"] += 1
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        control["updates"] += 1

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean = mean.item() / world
        if good is not None and mean > 6 * control["level"]:
            # every rank has the same mean and the same level, so all of them go back together
            control["updates"] = good.restore(model, opt)
            control["rollbacks"] += 1
            if rank == 0:
                print(f"loss {mean:.2f}: back to update {control['updates']}", flush=True)
            continue
        control["level"] = mean if control["level"] == 0 else 0.7 * control["level"] + 0.3 * mean
        if rank == 0:
            print(f"update {control['updates']} batch {control['cursor'] - 1} loss {mean:.4f}", flush=True)
        if args.out and args.save_every and control["updates"] % args.save_every == 0:
            disk.save(args.out, model, opt, control)
            good = Snapshot(model, opt, control["updates"])  # what a resumed run would go back to

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
