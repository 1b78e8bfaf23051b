import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from criterion import UncertaintyWeighted
from net import DensePredictor
from scenes import batch_at, scenes


def collect(net, crit, opts):
    return {
        "net": get_model_state_dict(net),
        "crit": get_model_state_dict(crit),
        "opt_net": get_optimizer_state_dict(net, opts[0]),
        "opt_crit": get_optimizer_state_dict(crit, opts[1]),
    }


def restore(folder, net, crit, opts):
    step = max(int(d) for d in os.listdir(folder) if d.isdigit())
    state = collect(net, crit, opts)
    dcp.load(state, checkpoint_id=os.path.join(folder, str(step)))
    set_model_state_dict(net, state["net"])
    set_model_state_dict(crit, state["crit"])
    set_optimizer_state_dict(net, opts[0], state["opt_net"])
    set_optimizer_state_dict(crit, opts[1], state["opt_crit"])
    return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    net = DensePredictor()
    for stage in net.stages:
        fully_shard(stage)
    fully_shard(net)
    crit = UncertaintyWeighted()
    fully_shard(crit)
    opts = [
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        torch.optim.SGD(crit.parameters(), lr=0.1),
    ]
    data = scenes(200, seed=4)
    start = restore(args.resume, net, crit, opts) if args.resume else 0

    for step in range(start, args.steps):
        img, target = batch_at(data, step, args.batch, rank, world)
        total, raw = crit(net(img), target)
        for o in opts:
            o.zero_grad()
        total.backward()
        for o in opts:
            o.step()
        dist.all_reduce(raw)
        if rank == 0 and step % 5 == 4:
            shown = ", ".join(f"{n} {v / world:.3f}" for n, v in zip(crit.tasks, raw.tolist()))
            print(f"[{step + 1}] {shown}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(collect(net, crit, opts), checkpoint_id=os.path.join(args.out, str(step + 1)))

    if args.export:
        opt = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {"net": get_model_state_dict(net, options=opt), "crit": get_model_state_dict(crit, options=opt)}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
