"""Transformer forecaster with hybrid sharding: sharded inside a node, replicated between two nodes."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from clip import clip_grad_norm

CONTEXT, HORIZON = 32, 8


class SeriesTransformer(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Linear(4, dim)
        self.pos = nn.Parameter(torch.randn(CONTEXT // 4, dim) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(depth))
        self.head = nn.Linear(dim * CONTEXT // 4, HORIZON)

    def forward(self, x):
        h = self.patch(x.unflatten(1, (-1, 4))) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(h.flatten(1))


def batch(step, size=32):
    g = torch.Generator().manual_seed(step + 31)
    t = torch.arange(CONTEXT + HORIZON).float()
    f = 0.1 + 0.5 * torch.rand(size, 1, generator=g)
    x = 3 * torch.sin(f * t + 6.28 * torch.rand(size, 1, generator=g)) + 0.2 * torch.randn(size, len(t), generator=g)
    return x[:, :CONTEXT], x[:, CONTEXT:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(5)
    model = SeriesTransformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, args.steps)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        s = {"model": m, "optim": o, "sched": sched.state_dict(), "step": 0}
        newest = max(os.listdir(args.resume), key=int)
        dcp.load(s, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optim, model_state_dict=s["model"], optim_state_dict=s["optim"])
        sched.load_state_dict(s["sched"])
        step = s["step"]

    while step < args.steps:
        x, y = (v.chunk(world)[rank] for v in batch(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        norm = clip_grad_norm(model.parameters(), args.max_norm)
        optim.step()
        sched.step()
        optim.zero_grad()
        step += 1
        if step % 4 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f} grad norm {norm.item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "sched": sched.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.out, str(step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
