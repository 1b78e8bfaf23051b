import argparse

import torch.distributed as dist

from config import Config
from trainer import Trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="runs")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit(args.save_every, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
