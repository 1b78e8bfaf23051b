"""torchrun --standalone --nproc-per-node 2 train.py [--save-every 3 --out DIR] [--resume DIR] [--export FILE]"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from callbacks import EMA, Checkpoint, CosineLR, Evaluate
from data import LENGTH, VOCAB, Windows, make
from model import build
from trainer import Trainer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--micro", type=int, default=8)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build(VOCAB, LENGTH, seed=9)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    windows = Windows(make(104, seed=1), args.micro, args.accum, rank, world, seed=3)
    ema = EMA(model, 0.95)
    trainer = Trainer(
        model,
        opt,
        windows,
        [
            CosineLR(args.lr, 4, args.steps),
            ema,
            Evaluate(make(101, seed=2), args.eval_every, ema),
            Checkpoint(args.out, args.save_every),
        ],
    )
    if args.resume:
        Checkpoint.resume(trainer, args.resume)
    trainer.fit(args.steps)

    if args.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        out = {"raw": {k: v.clone() for k, v in get_model_state_dict(model, options=opts).items()}}
        ema.swap(model)
        out["ema"] = get_model_state_dict(model, options=opts)
        if rank == 0:
            torch.save(out, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
