import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from streams import DIM, StreamLoader


class AppState(Stateful):
    """Everything that a restart needs, in one object for dcp.save / dcp.load."""

    def __init__(self, model, optim, loader):
        self.model, self.optim, self.loader, self.step = model, optim, loader, 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "loader": self.loader.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.optim, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.loader.load_state_dict(sd["loader"])
        self.step = sd["step"]


def build(mesh):
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Linear(DIM, 48),
        nn.SiLU(),
        nn.Linear(48, 48),
        nn.SiLU(),
        nn.Linear(48, 3),
    )
    for m in model:
        if isinstance(m, nn.Linear):
            fully_shard(m, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def newest(folder):
    return os.path.join(folder, max((d for d in os.listdir(folder) if d.startswith("ckpt-")), key=lambda d: int(d[5:])))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = build(mesh)
    optim = torch.optim.Adam(model.parameters(), lr=args.lr)
    app = AppState(model, optim, StreamLoader(rank, world))

    if args.resume:
        dcp.load({"app": app}, checkpoint_id=newest(args.resume))
        if rank == 0:
            print("resumed from step", app.step)

    for x, y in app.loader:
        if app.step >= args.steps:
            break
        optim.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optim.step()
        app.step += 1
        if app.step % 4 == 0:
            avg = loss.detach() / world
            dist.all_reduce(avg)
            if rank == 0:
                print(f"[{app.step}/{args.steps}] mse {avg.item():.5f}", flush=True)
        if args.out and args.save_every and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"ckpt-{app.step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
