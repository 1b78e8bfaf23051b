import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from trainer import LSGANTrainer

if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--z-dim", type=int, default=16)
    p.add_argument("--lr-g", type=float, default=2e-3)
    p.add_argument("--lr-d", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--log-every", type=int, default=10)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    cfg = p.parse_args()

    dist.init_process_group("gloo")
    trainer = LSGANTrainer(cfg)
    if cfg.resume:
        trainer.load(cfg.resume)
    trainer.train()
    if cfg.export:
        full = StateDictOptions(full_state_dict=True)
        nets = {"G": get_model_state_dict(trainer.G, options=full), "D": get_model_state_dict(trainer.D, options=full)}
        if dist.get_rank() == 0:
            torch.save(nets, cfg.export)
    dist.destroy_process_group()
