import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import TASKS, Properties
from model import MultiTaskNet
from surgery import GradientSurgery


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--depth", type=int, default=1)
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--out", default=None)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default=None)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = MultiTaskNet(12, args.dim, args.depth, TASKS)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.8)
    surgery = GradientSurgery(model.trunk_parameters())
    data = Properties(12, seed=21)

    start = 0
    if args.resume:
        folder = os.path.join(args.resume, sorted(os.listdir(args.resume))[-1])
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "step": torch.zeros((), dtype=torch.int64)}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"].item()

    for step in range(start, args.steps):
        order = torch.Generator().manual_seed(1000 + step)
        opt.zero_grad(set_to_none=True)
        shards, losses = {}, torch.zeros(len(TASKS))
        for i, task in enumerate(TASKS):
            x, y = data.batch(step, task, args.batch, rank, world)
            loss = F.mse_loss(model(x, task), y)
            loss.backward()
            shards[task] = surgery.take()
            losses[i] = loss.detach()
        surgery.put(surgery.combine(shards, order))
        opt.step()

        dist.all_reduce(losses)
        if rank == 0 and (step % 3 == 2 or step == 0):
            print(f"step {step + 1:3d} " + " ".join(f"{t}={v:.4f}" for t, v in zip(TASKS, (losses / world).tolist())) + f" mean={losses.mean().item() / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "step": torch.tensor(step + 1)}, checkpoint_id=os.path.join(args.out, f"{step + 1:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
