import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

from evaluate import validation_mse
from farms import FarmData
from power_net import PowerNet


def parse():
    p = argparse.ArgumentParser(description="wind power surrogate")
    p.add_argument("--steps", type=int, default=54)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--valid-every", type=int, default=3)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=12)
    p.add_argument("--resume")
    return p.parse_args()


def snapshot(model, opt, sched, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o, "sched": sched.state_dict(), "step": step}


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = fully_shard(PowerNet(), mesh=init_device_mesh("cpu", (world,)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=0.01)
    data = FarmData(rank, world)
    xv, yv = data.validation()

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        state = snapshot(model, opt, sched, step)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        step = state["step"]

    running = []
    while step < args.steps:
        x, y = data.batch(step, rows=4)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        running.append(loss.item())
        if step % args.valid_every == 0:
            val = validation_mse(model, xv, yv)
            sched.step(val)
            mean = torch.tensor(sum(running) / len(running) / world)
            dist.all_reduce(mean)
            running.clear()
            if rank == 0:
                print(f"step {step} loss {mean.item():.5f} val {val:.5f} lr {opt.param_groups[0]['lr']:.2e}", flush=True)
        if args.out and step % args.save_every == 0:
            dcp.save(snapshot(model, opt, sched, step), checkpoint_id=os.path.join(args.out, str(step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
