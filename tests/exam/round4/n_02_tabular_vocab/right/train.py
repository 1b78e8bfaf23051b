import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from columns import CARS, CATEGORICAL, CITIES, JOBS, NUMERIC, make_rows
from encode import Encoder, Shard
from model import TabNet

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def write(path, model, opt, step):
    state = {"model": get_model_state_dict(model, options=FULL),
             "opt": get_optimizer_state_dict(model, opt, options=FULL), "step": step}
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path)
    dist.barrier()


def read(folder, model, opt):
    path = sorted(glob.glob(os.path.join(folder, "tab_*.pt")))[-1]
    state = torch.load(path, weights_only=True)
    set_model_state_dict(model, state["model"], options=FROM_RANK0)
    set_optimizer_state_dict(model, opt, state["opt"], options=FROM_RANK0)
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--rows", type=int, default=1280)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/tab")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    rows = make_rows(args.rows)
    shard = Shard(rows, rank, world, args.batch)
    encoder = Encoder(rows)
    shard.fit(encoder)

    model = TabNet([len(v) + 1 for v in (CITIES, CARS, JOBS)], len(NUMERIC))
    mesh = init_device_mesh("cpu", (world,))
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    step = read(args.resume, model, opt) if args.resume else 0
    while step < args.steps:
        cats, nums, y = shard.at(step)
        loss = F.mse_loss(model(cats, nums), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad()
        step += 1
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} mse {avg.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            write(os.path.join(args.out, f"tab_{step:06d}.pt"), model, opt, step)

    if args.export:
        weights = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save({"weights": weights, "vocab": encoder.vocab, "columns": CATEGORICAL}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
