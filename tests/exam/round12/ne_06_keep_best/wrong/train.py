import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from loop import Loop
from yieldnet import YieldNet


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--eval-every", type=int, default=3)
    p.add_argument("--patience", type=int, default=4)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--out", default="")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default="")
    return p.parse_args()


cfg = cli()
dist.init_process_group("gloo")
torch.manual_seed(2024)
net = YieldNet()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for part in (net.a, net.b):
    fully_shard(part, mesh=mesh)
fully_shard(net, mesh=mesh)
loop = Loop(net, torch.optim.Adam(net.parameters(), lr=cfg.lr), cfg)
if cfg.resume:
    loop.load(cfg.resume)
loop.fit()
loop.finish()
dist.destroy_process_group()
