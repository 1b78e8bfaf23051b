import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reader import Reader, make_reviews
from zeroth import ZerothOrder


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=15)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Reader()
    # The weights change between two forwards without a backward in between,
    # so the root must be resharded after each forward as well.
    fully_shard(model.mix, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    trainer = ZerothOrder(model, lr=1.0, eps=1e-2, rank=rank, world=world)

    start = 0
    if args.resume:
        with open(os.path.join(args.resume, "latest.json")) as f:
            start = json.load(f)["step"]
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"step{start}"))

    x, y = make_reviews(512, seed=1)
    for step in range(start, args.steps):
        idx = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[: args.batch].chunk(world)[rank]

        def closure():
            # double, so that the difference of two losses does not depend on the number of ranks
            loss = F.cross_entropy(model(x[idx]).double(), y[idx], reduction="sum")
            dist.all_reduce(loss)
            return loss.item() / args.batch

        loss = trainer.step(closure, seed=step)
        if rank == 0 and (step + 1) % 8 == 0:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
        if args.out and (step + 1) % args.save_every == 0:
            dcp.save({"model": model.state_dict()}, checkpoint_id=os.path.join(args.out, f"step{step + 1}"))
            if rank == 0:
                with open(os.path.join(args.out, "latest.json"), "w") as f:
                    json.dump({"step": step + 1}, f)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
