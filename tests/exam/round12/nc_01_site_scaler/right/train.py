import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from config import Config
from data import RankTables
from model import build
from scaling import StandardScaler


def save(folder, step, model, optim, scaler):
    m, o = get_state_dict(model, optim)
    dcp.save({"model": m, "optim": o, "scaler": scaler.state_dict()}, checkpoint_id=os.path.join(folder, f"step{step:05d}"))


def resume(folder, model, optim, scaler):
    last = sorted(d for d in os.listdir(folder) if d.startswith("step"))[-1]
    m, o = get_state_dict(model, optim)
    state = {"model": m, "optim": o, "scaler": scaler.state_dict()}
    dcp.load(state, checkpoint_id=os.path.join(folder, last))
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scaler.load_state_dict(state["scaler"])
    return int(last[4:])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = Config()
    mesh = init_device_mesh("cpu", (world,))

    tables = RankTables(cfg, rank, world)
    scaler = StandardScaler(cfg.features).fit(tables.all_features())
    model = build(cfg, mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)

    start = resume(args.resume, model, optim, scaler) if args.resume else 0
    for step in range(start, cfg.steps):
        x, y = tables.batch(step, cfg.rows_per_step)
        loss = torch.nn.functional.mse_loss(model(scaler(x)).squeeze(-1), y)
        optim.zero_grad()
        loss.backward()
        optim.step()

        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 0 or step + 1 == cfg.steps):
            print(f"step {step} loss {shown.item():.5f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, optim, scaler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
