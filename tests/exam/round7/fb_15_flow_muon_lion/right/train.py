import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from model import MelFlow, split_params
from optim import Muon, SoftLion


def frames(step, n):
    g = torch.Generator().manual_seed(123 + 7 * step)
    ids = torch.randint(0, 6, (n,), generator=g)
    centre = 2.0 * ids[:, None]
    x1 = torch.exp(-((torch.arange(12) - centre) ** 2) / 6) + 0.05 * torch.randn(n, 12, generator=g)
    x0 = torch.randn(n, 12, generator=g)
    t = torch.sigmoid(torch.randn(n, generator=g))  # logit-normal times
    return x0, x1, t, ids


class Checkpointer:
    """Model and the states of both optimizers under the names of the parameters."""

    def __init__(self, model, optimizers):
        self.model, self.optimizers = model, optimizers
        self.names = {p: n for n, p in model.named_parameters()}

    def state(self, step):
        slots = {}
        for opt in self.optimizers:
            for group in opt.param_groups:
                for p in group["params"]:
                    key = "buf" if isinstance(opt, Muon) else "m"
                    opt.state[p].setdefault(key, torch.zeros_like(p))
                    slots[f"{self.names[p]}/{key}"] = opt.state[p][key]
        return {"model": self.model.state_dict(), "slots": slots, "step": step}

    def save(self, folder, step):
        dcp.save(self.state(step), checkpoint_id=os.path.join(folder, f"ckpt-{step}"))

    def load(self, folder):
        step = max(int(m[1]) for m in map(re.compile(r"ckpt-(\d+)$").match, os.listdir(folder)) if m)
        state = self.state(0)  # tensors are loaded in place
        dcp.load(state, checkpoint_id=os.path.join(folder, f"ckpt-{step}"))
        return state["step"]


def learning_rate(step, total, warmup=4):
    """Warm-up, flat, linear decay in the last third."""
    return min(1.0, (step + 1) / warmup, (total - step) / (total / 3))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=18)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = MelFlow()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    matrices, rest = split_params(model)
    optimizers = [Muon(matrices, lr=0.02), SoftLion(rest, lr=0.01, weight_decay=0.01)]
    base = [o.param_groups[0]["lr"] for o in optimizers]
    ckpt = Checkpointer(model, optimizers)
    step = ckpt.load(args.resume) if args.resume else 0

    for step in range(step, args.steps):
        x0, x1, t, ids = (v.tensor_split(world)[rank] for v in frames(step, args.batch))
        xt = torch.lerp(x0, x1, t[:, None])
        loss = F.mse_loss(model(xt, t, ids), x1 - x0)
        loss.backward()
        for opt, lr in zip(optimizers, base):
            opt.param_groups[0]["lr"] = lr * learning_rate(step, args.steps)
            opt.step()
            opt.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1:3d} loss {loss.item() / world:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            ckpt.save(args.out, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
