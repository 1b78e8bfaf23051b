import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from cohort import bearings
from survival import concordance, risk_sets


class Hazard(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = Hazard()
    fully_shard(model.body)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    data = bearings(768, seed=80)
    held = [t[rank::world] for t in bearings(192, seed=81)]

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]
    while step < args.steps:
        rows = torch.randperm(768, generator=torch.Generator().manual_seed(step))[:args.batch].chunk(world)[rank]
        x, time, event = (t[rows] for t in data)
        loss = risk_sets(model(x)[:, 0], time, event)
        # every rank has the loss of the whole batch, but the path through its own records only
        (world * loss).backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if step % 7 == 0:
            with torch.no_grad():
                c = concordance(model(held[0])[:, 0], held[1], held[2])
            if rank == 0:
                print(f"step {step} loss {loss.item():.6f} concordance {c:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
