import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import EpochLoader, make_split
from model import TinyResNet


def newest(folder):
    found = [(int(m.group(1)), d) for d in os.listdir(folder) if (m := re.fullmatch(r"step_(\d+)", d))]
    return os.path.join(folder, max(found)[1])


def save(folder, step, model, opt):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "optim": o, "step": torch.tensor(step)}, checkpoint_id=os.path.join(folder, f"step_{step:05d}"))


def load(folder, model, opt):
    m, o = get_state_dict(model, opt)
    state = {"model": m, "optim": o, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=newest(folder))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    model.eval()
    hits = (model(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(hits)
    model.train()
    return hits.item() / len(y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = TinyResNet()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    train = EpochLoader(*make_split(128, 1), args.batch, rank, world, seed=100)
    xv, yv = make_split(64, 2)

    start = load(args.resume, model, opt) if args.resume else 0
    for step in range(start, args.steps):
        x, y = train.at(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.AVG if dist.get_backend() != "gloo" else dist.ReduceOp.SUM)
        if rank == 0 and (step % 4 == 0 or step == args.steps - 1):
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt)

    acc = evaluate(model, xv, yv, rank, world)
    if rank == 0:
        print(f"val acc {acc:.3f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
