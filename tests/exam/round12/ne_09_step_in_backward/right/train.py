"""Grid-load forecaster. Gradients never live longer than one layer: the update runs inside backward."""
import argparse
import json
import math
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from inline_optim import InlineAdam
from net import LoadForecaster, windows

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=28)
ap.add_argument("--batch", type=int, default=24)
ap.add_argument("--peak-lr", type=float, default=6e-3)
ap.add_argument("--ckpt-dir", type=pathlib.Path)
ap.add_argument("--ckpt-at", type=int, nargs="*", default=[])
ap.add_argument("--continue-from", type=pathlib.Path)


def write(folder, step, model, optim):
    target = folder / f"{step:05d}"
    target.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    weights = {n: p.detach().to_local() for n, p in model.named_parameters()}
    torch.save({"weights": weights, "optim": optim.state_dict()}, target / f"part{rank}.pt")
    dist.barrier()
    if rank == 0:
        (target / "meta.json").write_text(json.dumps({"step": step, "parts": dist.get_world_size()}))


def read(folder, model, optim):
    target = max(p.parent for p in folder.glob("*/meta.json"))
    meta = json.loads((target / "meta.json").read_text())
    assert meta["parts"] == dist.get_world_size(), "restart with the same number of ranks"
    part = torch.load(target / f"part{dist.get_rank()}.pt")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(part["weights"][name])
    optim.load_state_dict(part["optim"])
    return meta["step"]


def main(a):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = LoadForecaster()
    mesh = init_device_mesh("cpu", (world,))
    for mixer in model.mixers:
        fully_shard(mixer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def lr_of(tick):
        return a.peak_lr * min(tick / 4, 0.5 * (1 + math.cos(math.pi * tick / (a.steps + 1))))

    optim = InlineAdam(model, lr_of)
    step = read(a.continue_from, model, optim) if a.continue_from else 0
    share = a.batch // world
    while step < a.steps:
        x, y = windows(step, a.batch)
        x, y = x[rank * share:(rank + 1) * share], y[rank * share:(rank + 1) * share]
        loss = (model(x) - y).pow(2).mean()
        optim.begin()
        loss.backward()
        step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 5 == 0:
            print(f"{step:4d} mse {total.item() / world:.5f}")
        if a.ckpt_dir and step in a.ckpt_at:
            write(a.ckpt_dir, step, model, optim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(ap.parse_args())
