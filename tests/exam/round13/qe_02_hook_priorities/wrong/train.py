import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from engine import Engine
from hooks import CheckpointHook, DecayRampHook, PrintHook, WarmupCosineHook, unpack
from net import DemandForecaster


@dataclass
class Config:
    steps: int = 30
    batch: int = 16
    length: int = 24
    peak_lr: float = 6e-3
    warmup: int = 5


class LoadCurves:
    """Daily and weekly waves with noise; the batch of a step depends on the step only."""

    def __init__(self, cfg):
        self.cfg, self.rank, self.world = cfg, dist.get_rank(), dist.get_world_size()

    def __call__(self, step):
        g = torch.Generator().manual_seed(7919 + step)
        t = torch.arange(self.cfg.length) + torch.randint(0, 168, (self.cfg.batch, 1), generator=g)
        day = torch.sin(t * 2 * torch.pi / 24) * (0.5 + torch.rand(self.cfg.batch, 1, generator=g))
        week = 0.4 * torch.cos(t * 2 * torch.pi / 168)
        curves = day + week + 0.1 * torch.randn(self.cfg.batch, self.cfg.length, generator=g)
        return curves.chunk(self.world)[self.rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=None)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    cfg = Config()

    dist.init_process_group("gloo")
    torch.manual_seed(31)
    model = DemandForecaster()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.peak_lr, eps=1e-6)

    engine = Engine(model, optimizer, LoadCurves(cfg), cfg.steps)
    engine.register(PrintHook(5), WarmupCosineHook(cfg.peak_lr, cfg.warmup, cfg.steps), DecayRampHook(0.0, 0.2, cfg.steps))
    if args.save_every:
        engine.register(CheckpointHook(args.out, args.save_every))
    if args.resume:
        unpack(engine, args.resume)
    engine.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
