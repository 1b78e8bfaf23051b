import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from config import Config
from groups import make_optimizer, small_parameters
from model import Net


def read_config():
    cfg = Config()
    ap = argparse.ArgumentParser()
    for name in ("steps", "batch", "save_every", "out", "resume"):
        default = getattr(cfg, name)
        ap.add_argument("--" + name.replace("_", "-"), dest=name, type=type(default), default=default)
    for k, v in vars(ap.parse_args()).items():
        setattr(cfg, k, v)
    return cfg


def make_data(dim, n=768):
    g = torch.Generator().manual_seed(17)
    centers = 1.2 * torch.randn(6, dim, generator=g)
    y = torch.randint(0, 6, (n,), generator=g)
    return centers[y] + torch.randn(n, dim, generator=g), y


def batch_at(step, n, size, rank, world):
    per_epoch = n // size
    epoch, i = divmod(step, per_epoch)
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    return perm[i * size : (i + 1) * size][rank::world]


def main():
    cfg = read_config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(cfg.depth)
    model = Net(cfg)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    no_decay = small_parameters(model, cfg.optim.no_decay)
    optim = make_optimizer(model, no_decay, cfg.optim)

    start = 0
    if cfg.resume:
        path = max(Path(cfg.resume).iterdir(), key=lambda p: int(p.name))
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    x, y = make_data(cfg.dim)
    for step in range(start, cfg.steps):
        ids = batch_at(step, len(x), cfg.batch, rank, world)
        loss = F.cross_entropy(model(x[ids]), y[ids])
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=True)
        if step % 4 == 0 or step == cfg.steps - 1:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if cfg.out and cfg.save_every and (step + 1) % cfg.save_every == 0:
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd, "step": step + 1}, checkpoint_id=Path(cfg.out) / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
