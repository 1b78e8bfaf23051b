import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lamb import Lamb
from model import RatingModel, interactions

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=400)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--out", default="")
parser.add_argument("--resume", default="")


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(17)
    model = RatingModel()
    fully_shard(model.mlp)
    fully_shard(model)
    optimizer = Lamb(model.parameters(), lr=args.lr)

    users, items, ratings = interactions()
    per_epoch = len(ratings) // args.batch
    total = args.epochs * per_epoch
    step = 0
    if args.resume:
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o, "step": 0}
        last = max(os.listdir(args.resume), key=lambda name: int(name.split("-")[1]))
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < total:
        epoch, k = divmod(step, per_epoch)
        order = torch.randperm(len(ratings), generator=torch.Generator().manual_seed(epoch))
        idx = order[k * args.batch:(k + 1) * args.batch].chunk(world)[rank]

        pred = model(users[idx], items[idx])
        loss = torch.nn.functional.mse_loss(pred, ratings[idx])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1

        loss = loss.detach() / world
        dist.all_reduce(loss)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} mse {loss.item():.5f}", flush=True)
        if args.save_every and args.out and step % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=f"{args.out}/step-{step}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
