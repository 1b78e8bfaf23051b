import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from acoustics import ReverbNet, ReverbTask
from callbacks import Progress, WeightAverage
from trainer import Trainer

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--workdir")
    ap.add_argument("--save-at", type=int, nargs="*", default=[])
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = ReverbNet()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model.body:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    Trainer(model, optimizer, ReverbTask(), [WeightAverage(0.8), WeightAverage(0.96), Progress(4)],
            args.steps, args.workdir, args.save_at).fit(args.resume)
    dist.destroy_process_group()
