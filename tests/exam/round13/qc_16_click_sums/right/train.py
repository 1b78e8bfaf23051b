import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import ClickModel, click_sum
from sessions import make_sessions


class Counted:
    """Steps an optimizer with gradients of sums, divided by the number of results they come from."""

    def __init__(self, optim, floor=1.0):
        self.optim, self.floor = optim, floor
        self.count = torch.zeros(())
        self.value = torch.zeros(())

    def add(self, value, count):
        self.value += value.detach()
        self.count += count

    def step(self):
        both = torch.stack([self.value, self.count])
        dist.all_reduce(both)
        for group in self.optim.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(both[1].clamp_min(self.floor).item())
        self.optim.step()
        self.optim.zero_grad()
        self.value.zero_()
        self.count.zero_()
        return (both[0] / both[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--sessions", type=int, default=48, help="sessions of a step, over all ranks")
    ap.add_argument("--micro-batches", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(23)
    model = ClickModel()
    fully_shard(model.good)
    fully_shard(model)
    for part in (model.good, model):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    optim = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.8)
    counted = Counted(optim)
    x, shown, click = make_sessions(600, seed=120)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, "clicks"))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]
    while step < args.steps:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:args.sessions]
        # long pages first, dealt like cards
        order = order[shown[order].sum(1).argsort(descending=True, stable=True)]
        parts = order[rank::world].chunk(args.micro_batches)
        for i, rows in enumerate(parts):
            model.set_requires_gradient_sync(i + 1 == len(parts))
            total = click_sum(model(x[rows]), shown[rows], click[rows])
            total.backward()
            counted.add(total, shown[rows].sum())
        loss = counted.step()
        step += 1
        if rank == 0 and (step == 1 or step % 4 == 0):
            print(f"step {step} loss {loss:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(args.out, "clicks"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
