"""Depth and segmentation from one trunk with PCGrad: the gradients of the tasks are taken one after the other,
conflicting parts are projected out on the shards (dot products over all ranks), and the sum goes to the optimizer.
The job can be stopped and continued from a distributed checkpoint.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(3, o), nn.SiLU())


class TwoHeads(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.trunk = nn.ModuleList([block(1, ch), block(ch, ch)])
        self.seg, self.depth = nn.Conv2d(ch, 2, 1), nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        for b in self.trunk:
            x = b(x)
        return self.seg(x), self.depth(x).squeeze(1)


def rooms(n=160, size=10, seed=80):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = 2 + 6 * torch.rand(n, 2, 1, 1, generator=g)
    r2 = (yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2
    obj = (r2 < 5).long()
    depth = 1 + yy / size - 0.8 * torch.exp(-r2 / 6)
    img = obj + 0.5 * depth + 0.25 * torch.randn(n, size, size, generator=g)
    return img.unsqueeze(1), obj, depth


def task_grads(losses, params):
    """One backward per task; the reduced gradient shards are taken off the parameters each time."""
    out = []
    for i, loss in enumerate(losses):
        last = i == len(losses) - 1
        loss.backward(retain_graph=not last)
        out.append([torch.zeros_like(p) if p.grad is None else p.grad for p in params])
        for p in params:
            p.grad = None
    return out


def shard_dot(a, b):
    s = sum((x.to_local().double() * y.to_local().double()).sum() for x, y in zip(a, b))
    s = torch.as_tensor(s, dtype=torch.float64).reshape(1)
    dist.all_reduce(s)
    return s.item()


@torch.no_grad()
def pcgrad(grads):
    fixed = [[x.clone() for x in g] for g in grads]
    clash = 0
    for i, gi in enumerate(fixed):
        for j, gj in enumerate(grads):
            if i == j:
                continue
            d = shard_dot(gi, gj)
            if d < 0:
                clash += 1
                scale = d / shard_dot(gj, gj)
                for x, y in zip(gi, gj):
                    x.sub_(y, alpha=scale)
    return [sum(parts[1:], parts[0]) for parts in zip(*fixed)], clash


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="slots")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(81)
    model = TwoHeads()
    for b in model.trunk:
        fully_shard(b)
    fully_shard(model)
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=6e-3)

    def bundle(step):
        m, o = get_state_dict(model, opt)
        return {"m": m, "o": o, "step": torch.tensor(step)}

    start = 0
    if args.resume:
        at = {}
        for name in os.listdir(args.resume):
            if os.path.exists(os.path.join(args.resume, name, ".metadata")):
                at[int(name.rpartition("_")[2])] = os.path.join(args.resume, name)
        if at:
            sd = bundle(0)
            dcp.load(sd, checkpoint_id=at[max(at)])
            set_state_dict(model, opt, model_state_dict=sd["m"], optim_state_dict=sd["o"])
            start = int(sd["step"])

    img, obj, depth = rooms()
    for step in range(start, args.steps):
        ids = torch.randperm(len(img), generator=torch.Generator().manual_seed(step))[:args.batch][rank::world]
        seg, dep = model(img[ids])
        losses = [F.cross_entropy(seg, obj[ids]), 2 * F.smooth_l1_loss(dep, depth[ids])]
        mixed, clash = pcgrad(task_grads(losses, params))
        for p, g in zip(params, mixed):
            p.grad = g
        opt.step()
        opt.zero_grad()

        shown = torch.stack([l.detach() for l in losses]) / world
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} seg loss {shown[0]:.4f} depth loss {shown[1]:.4f} conflicts {clash}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(bundle(step + 1), checkpoint_id=os.path.join(args.out, f"slot_{step + 1:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
