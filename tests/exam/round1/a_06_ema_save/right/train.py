"""Pre-training of a small convolutional LM with an EMA of the weights for evaluation.

torchrun --standalone --nproc-per-node 2 train.py --save-every 10 --out runs/a
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from data import Batches, sequences
from ema import ShardedEMA
from model import ConvLM
from trainer import Trainer


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--ema", type=float, default=0.9)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/default")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(2024)
    model = ConvLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    batches = Batches(sequences(256, 24, 40, seed=1), args.batch, dist.get_rank(), dist.get_world_size(), seed=50)
    trainer = Trainer(model, opt, ShardedEMA(model, args.ema), batches, sequences(64, 24, 40, seed=2), args)
    if args.resume:
        trainer.load_newest(args.resume)
    trainer.fit(args.steps)
    if args.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        raw = {k: v.clone() for k, v in get_model_state_dict(model, options=opts).items()}
        with trainer.ema.applied(model):
            averaged = {k: v.clone() for k, v in get_model_state_dict(model, options=opts).items()}
        if dist.get_rank() == 0:
            torch.save({"model": raw, "ema": averaged}, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
