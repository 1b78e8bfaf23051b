import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from int8_export import export, run_int8
from sensor_net import SensorNet, readings


def options():
    p = argparse.ArgumentParser(description="drift model for field sensors, exported to int8")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--out", default="")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default="")
    return p.parse_args()


class Run:
    def __init__(self, opt):
        self.opt, self.rank, self.world = opt, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(404)
        self.model = SensorNet()
        mesh = init_device_mesh("cpu", (self.world,))
        for layer in self.model.hidden:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=opt.lr)
        self.step = 0

    def snapshot(self):
        m, o = get_state_dict(self.model, self.adam)
        return {"model": m, "adam": o, "step": self.step}

    def save(self):
        dcp.save(self.snapshot(), checkpoint_id=os.path.join(self.opt.out, f"{self.step:06d}"))

    def resume(self):
        state = self.snapshot()
        dcp.load(state, checkpoint_id=os.path.join(self.opt.resume, max(d for d in os.listdir(self.opt.resume) if d.isdigit())))
        set_state_dict(self.model, self.adam, model_state_dict=state["model"], optim_state_dict=state["adam"])
        self.step = state["step"]

    def train_step(self):
        x, y = (t.chunk(self.world)[self.rank] for t in readings(1000 + self.step, self.opt.batch))
        loss = torch.nn.functional.smooth_l1_loss(self.model(x), y)
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        self.step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / self.world


def main():
    opt = options()
    dist.init_process_group("gloo")
    run = Run(opt)
    if opt.resume:
        run.resume()
    while run.step < opt.steps:
        loss = run.train_step()
        if run.rank == 0 and run.step % 5 == 0:
            print(f"[{run.step:03d}] smooth-l1 {loss:.4f}", flush=True)
        if opt.save_every and run.step % opt.save_every == 0 and run.step < opt.steps:
            run.save()
    if opt.out:
        os.makedirs(opt.out, exist_ok=True)
    table = export(run.model, os.path.join(opt.out, "drift_int8.pt") if opt.out else None)
    x, y = readings(7, 256)
    if run.rank == 0:
        err = (run_int8(table, x) - y).pow(2).mean().sqrt()
        print(f"int8 model: rmse {err:.4f} on held-out readings, input range {table['inp']['as'] * 127:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
