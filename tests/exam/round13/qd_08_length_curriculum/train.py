"""Set regression with a length curriculum; lengths and learning rate follow the number of samples consumed."""
import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

BATCH, BUDGET = 32, 32 * 18
SHORT, LONG = 2, 12


class Aggregator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.item = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.score = nn.Linear(width, 1, bias=False)
        self.top = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x, mask):
        h = self.item(x)
        a = self.score(h).masked_fill(~mask[..., None], float("-inf")).softmax(1)
        return self.top((a * h).sum(1))


class Curriculum:
    """Everything that moves during the run is a function of `seen` / `budget`."""

    def __init__(self, budget, base_lr):
        self.budget, self.base_lr, self.seen = budget, base_lr, 0

    @property
    def progress(self):
        return min(self.seen / self.budget, 1.0)

    def max_length(self):
        return SHORT + round((LONG - SHORT) * min(1.0, 1.5 * self.progress))

    def lr(self):
        return self.base_lr * 0.5 * (1 + math.cos(math.pi * self.progress))


def make_batch(index, max_length):
    g = torch.Generator().manual_seed(60_000 + index)
    x = torch.randn(BATCH, LONG, 3, generator=g)
    n = (torch.rand(BATCH, generator=g) * max_length).long() + 1
    mask = torch.arange(LONG) < n[:, None]
    y = (x[..., 0] * mask).masked_fill(~mask, -9).amax(1) + 0.3 * (x[..., 1] * mask).sum(1) / n
    return x, mask, y[:, None]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=18)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = Aggregator()
    fully_shard(model.item)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    plan, update = Curriculum(BUDGET, args.lr), 0
    if args.resume:
        folder = os.path.join(args.resume, max(os.listdir(args.resume)))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        with open(os.path.join(folder, "progress.json")) as f:
            saved = json.load(f)
        plan.seen, update = saved["seen"], saved["update"]

    while update < args.updates:
        length = plan.max_length()
        for group in opt.param_groups:
            group["lr"] = plan.lr()
        x, mask, y = (t[rank::world] for t in make_batch(update, length))
        loss = (model(x, mask) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        plan.seen += x.shape[0] * world
        update += 1
        if update % 3 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"update {update} loss {mean.item():.5f} max length {length} lr {opt.param_groups[0]['lr']:.5f}", flush=True)
        if args.save_every and update % args.save_every == 0:
            folder = os.path.join(args.out, f"update{update:05d}")
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o}, checkpoint_id=folder)
            if rank == 0:
                with open(os.path.join(folder, "progress.json"), "w") as f:
                    json.dump({"seen": plan.seen, "update": update}, f)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
