import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from data import Demonstrations
from model import GaitTransformer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--window", type=int, default=12)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--out")
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--resume")


def make_model():
    torch.manual_seed(13)
    model = GaitTransformer()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=mp)
    return fully_shard(model, mp_policy=mp)


def predict(model, obs, step):
    return model(obs, step)


@torch.no_grad()
def held_out(model, demos, window):
    """Error early and late in the episodes; the same segments on every rank."""
    errors = []
    for first, last in ((0, 200), (600, 1000)):
        obs, step, act = demos.segments(99, 64, window, first, last)
        errors.append((predict(model, obs, step) - act).pow(2).mean().item())
    return errors


def train(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    demos, model = Demonstrations(), make_model()
    optim = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)
    begin = 0
    if args.resume:
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, "last"))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        begin = state["step"]

    for it in range(begin, args.steps):
        batch = demos.segments(it, args.batch, args.window)
        obs, step, act = (t.chunk(world)[rank] for t in batch)
        loss = (predict(model, obs, step) - act).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if it % 5 == 4 or it == begin:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"{it + 1:4d} loss {total.item() / world:.4f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0 and it + 1 < args.steps:
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd, "step": it + 1}, checkpoint_id=os.path.join(args.out, "last"))
    early, late = held_out(model, demos, args.window)
    if rank == 0:
        print(f"held out: early {early:.4f} late {late:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(parser.parse_args())
