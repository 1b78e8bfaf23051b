import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from callbacks import Checkpointer, EpochLogger, restore
from data import SensorSet, ShardedLoader
from model import SensorMixer
from trainer import Trainer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = SensorMixer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    loader = ShardedLoader(SensorSet(), args.batch_size, dist.get_rank(), dist.get_world_size())
    callbacks = [EpochLogger()]
    if args.out and args.save_every:
        callbacks.append(Checkpointer(args.out, args.save_every))
    trainer = Trainer(model, optimizer, loader, args.epochs, args.accumulate, args.max_norm, callbacks)
    if args.resume:
        restore(trainer, args.resume)
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
