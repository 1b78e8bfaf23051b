"""Config-driven trainer, ported from DDP to fully_shard."""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from config import Config
from data import SuccessorData
from model import build_model
from optim import build_optimizer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int)
    ap.add_argument("--export", help="write the full weights here at the end")
    args = ap.parse_args()
    cfg = Config()
    if args.steps:
        cfg.steps = args.steps

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    model = build_model(cfg, mesh)
    fully_shard(model, mesh=mesh)
    opt, sched = build_optimizer(model, cfg)
    data = SuccessorData(cfg, rank, world)

    for step, (x, y) in enumerate(islice(iter(data), cfg.steps)):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        model.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step:3d} loss {shown.item() / world:.4f} lr {sched.get_last_lr()[0]:.3g}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
