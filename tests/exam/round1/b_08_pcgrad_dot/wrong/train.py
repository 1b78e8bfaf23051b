"""Three dense tasks on one trunk with gradient surgery (PCGrad) on the shared weights."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

TASKS = ("seg", "depth", "edge")


class Trunk(nn.Module):
    def __init__(self, ch=16, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, ch), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=1)) for _ in range(depth)
        )

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = x + b(x)
        return x


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.heads = nn.ModuleDict(
            {"seg": nn.Conv2d(16, 3, 1), "depth": nn.Conv2d(16, 1, 1), "edge": nn.Conv2d(16, 1, 1)}
        )

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def scenes(n, seed):
    g = torch.Generator().manual_seed(seed)
    seg = torch.randint(0, 3, (n, 3, 3), generator=g).repeat_interleave(3, 1).repeat_interleave(3, 2)
    depth = seg.float() * 0.7 - torch.linspace(0, 1, 9)[None, :, None]
    edge = torch.zeros(n, 9, 9)
    edge[:, :, 1:] = (seg[:, :, 1:] != seg[:, :, :-1]).float()
    img = (1 - seg.float())[:, None] * 0.8 + 0.3 * torch.randn(n, 1, 9, 9, generator=g)
    return {"img": img, "seg": seg, "depth": depth, "edge": edge}


def task_loss(task, out, batch):
    if task == "seg":
        return F.cross_entropy(out, batch["seg"])
    if task == "depth":
        return 2.0 * F.smooth_l1_loss(out[:, 0], batch["depth"])
    return F.binary_cross_entropy_with_logits(out[:, 0], batch["edge"])


def dot(a, b):
    out = torch.stack([(x * y).sum() for x, y in zip(a, b)]).sum()
    return out


def project(grads):
    """grads: per task a list of local shards; returns the summed, conflict-free gradient."""
    merged, conflicts = [torch.zeros_like(t) for t in grads[0]], 0
    for i in range(len(grads)):
        gi = [t.clone() for t in grads[i]]
        for j in range(len(grads)):
            if i == j:
                continue
            ip = dot(gi, grads[j])
            if ip < 0:
                conflicts += 1
                c = ip / dot(grads[j], grads[j]).clamp(min=1e-12)
                for t, u in zip(gi, grads[j]):
                    t -= c * u
        for m, t in zip(merged, gi):
            m += t
    return merged, conflicts


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mtl")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = MultiTask()
    for b in model.trunk.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shared = list(model.trunk.parameters())
    data = scenes(512, 8)

    step = 0
    if args.resume:
        step = max(int(d[1:]) for d in os.listdir(args.resume) if d.startswith("s"))
        m, o = get_state_dict(model, opt)
        state = {"m": m, "o": o}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"s{step}"))
        set_state_dict(model, opt, model_state_dict=state["m"], optim_state_dict=state["o"])

    while step < args.steps:
        idx = torch.randint(0, 512, (args.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        batch = {k: v[idx] for k, v in data.items()}
        opt.zero_grad()
        per_task, losses = [], []
        for task in TASKS:
            loss = task_loss(task, model(batch["img"], task), batch)
            loss.backward()
            losses.append(loss.detach())
            per_task.append([p.grad.to_local().clone() for p in shared])
            for p in shared:
                p.grad = None
        merged, conflicts = project(per_task)
        for p, g in zip(shared, merged):
            p.grad = torch.zeros_like(p)
            p.grad.to_local().copy_(g)
        opt.step()
        step += 1
        mean = torch.stack(losses)
        dist.all_reduce(mean)
        if rank == 0 and step % 2 == 0:
            print(
                f"step {step} "
                + " ".join(f"{t} {v:.4f}" for t, v in zip(TASKS, (mean / world).tolist()))
                + f" conflicts {conflicts}",
                flush=True,
            )
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o}, checkpoint_id=os.path.join(args.out, f"s{step}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
