"""Clone a family of controllers with a mixture-of-experts policy."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import ControllerLog
from moe import MoEPolicy


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--bias-rate", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    return ap.parse_args()


def save(path, step, model, opt):
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "opt": osd, "step": step}, checkpoint_id=path)
    if dist.get_rank() == 0:
        with open(os.path.join(os.path.dirname(path), "latest"), "w") as f:
            f.write(os.path.basename(path))
    dist.barrier()


def load(root, model, opt):
    with open(os.path.join(root, "latest")) as f:
        path = os.path.join(root, f.read().strip())
    msd, osd = get_state_dict(model, opt)
    state = {"model": msd, "opt": osd, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    return state["step"]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = MoEPolicy()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.01)
    log = ControllerLog()
    start = load(args.resume, model, opt) if args.resume else 0

    for step in range(start, args.steps):
        obs, act = log.window(step, args.batch, rank, world)
        loss = F.mse_loss(model(obs), act)
        opt.zero_grad()
        loss.backward()
        opt.step()
        for layer in model.layers:
            layer.rebalance(args.bias_rate)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step + 1:3d}  loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save(os.path.join(args.out, f"step_{step + 1}"), step + 1, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
