import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from phases import averaged_weights
from schedulefree import ScheduleFreeSGD


class Patches(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.c2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.drop = nn.Dropout(0.0)
        self.fc = nn.Linear(16 * 9, classes)

    def forward(self, x):
        x = F.relu(self.c2(F.relu(self.c1(x))))
        return self.fc(self.drop(x.flatten(1)))


def images(n, seed):
    """A bright bar in one of four directions on a 12 x 12 patch."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = 0.4 * torch.randn(n, 1, 12, 12, generator=g)
    off = torch.randint(2, 10, (n,), generator=g)
    r = torch.arange(12)
    for i in range(n):
        k, o = int(y[i]), int(off[i])
        if k == 0:
            x[i, 0, o, :] += 1.5
        elif k == 1:
            x[i, 0, :, o] += 1.5
        elif k == 2:
            x[i, 0, r, (r + o) % 12] += 1.5
        else:
            x[i, 0, r, (o - r) % 12] += 1.5
    return x, y


@torch.no_grad()
def evaluate(model, data, rank, world):
    x, y = (t[rank::world] for t in data)
    logits = model(x)
    out = torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum()])
    dist.all_reduce(out)
    return (out / len(data[1])).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(81)
    model = Patches()
    for m in (model.c1, model.c2):
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = ScheduleFreeSGD(model.parameters(), lr=1.0, weight_decay=1e-4)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    x, y = images(480, seed=1)
    held = images(120, seed=2)
    while step < args.steps:
        g = torch.Generator().manual_seed(300 + step)
        ids = torch.randint(len(y), (args.batch,), generator=g)[rank::world]
        loss = F.cross_entropy(model(x[ids]), y[ids])
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 5 == 0:
            with averaged_weights(model, optim):
                val, acc = evaluate(model, held, rank, world)
            if rank == 0:
                print(
                    f"step {step:3d} train {loss.item():.4f} (rank 0)  averaged: valid {val:.4f} acc {acc:.3f}",
                    flush=True,
                )
        if args.out and args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(args.out, f"{step:06d}"))
    with averaged_weights(model, optim):
        val, acc = evaluate(model, held, rank, world)
        if rank == 0:
            print(f"final averaged model: valid {val:.4f} acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
