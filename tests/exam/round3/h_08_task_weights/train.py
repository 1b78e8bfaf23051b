"""Depth, segmentation and edges from one trunk, with learned loss weights (homoscedastic uncertainty)."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Stage(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c_in, c_out, 3, padding=1), nn.GroupNorm(4, c_out)

    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))


class Multi(nn.Module):
    def __init__(self, c=16, classes=3):
        super().__init__()
        self.trunk = nn.Sequential(Stage(2, c), Stage(c, c))
        self.depth, self.seg, self.edge = nn.Conv2d(c, 1, 1), nn.Conv2d(c, classes, 1), nn.Conv2d(c, 1, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.depth(h)[:, 0], self.seg(h), self.edge(h)[:, 0]


class UncertaintyWeights(nn.Module):
    def __init__(self, tasks=3):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses):
        return (torch.exp(-self.log_var) * losses + 0.5 * self.log_var).sum()


def make_data(n=256, side=8):
    g = torch.Generator().manual_seed(17)
    x = torch.randn(n, 2, side, side, generator=g)
    x = F.avg_pool2d(x, 3, 1, 1) * 2
    depth = 3 * torch.sin(x[:, 0]) + 0.5 * torch.randn(n, side, side, generator=g)
    seg = (x[:, 1] > 0.3).long() + (x[:, 1] > -0.3).long()
    edge = ((x[:, 0] - x[:, 1]).abs() > 0.7).float()
    return x, depth, seg, edge


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--lr-weights", type=float, default=0.05)
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Multi()
    weights = UncertaintyWeights()
    for stage in model.trunk:
        fully_shard(stage)
    fully_shard(model)
    opt = torch.optim.AdamW(
        [
            {"params": list(model.parameters()), "lr": args.lr},
            {"params": list(weights.parameters()), "lr": args.lr_weights, "weight_decay": 0.0},
        ]
    )

    x, depth, seg, edge = make_data()
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(0, len(x), (args.global_batch,), generator=g).chunk(world)[rank]
        d, s, e = model(x[idx])
        losses = torch.stack(
            [
                F.mse_loss(d, depth[idx]),
                F.cross_entropy(s, seg[idx]),
                F.binary_cross_entropy_with_logits(e, edge[idx]),
            ]
        )
        loss = weights(losses)
        opt.zero_grad()
        loss.backward()
        dist.all_reduce(weights.log_var.grad.div_(world))
        opt.step()
        log = torch.cat([loss.detach()[None], losses.detach()]) / world
        dist.all_reduce(log)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            w = [f"{v:.3f}" for v in torch.exp(-weights.log_var.detach()).tolist()]
            print(
                f"step {step} loss {log[0]:.4f} depth {log[1]:.3f} seg {log[2]:.3f} edge {log[3]:.3f} w {w}", flush=True
            )

    if args.export:
        out = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save({**out, "log_var": weights.log_var.detach()}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
