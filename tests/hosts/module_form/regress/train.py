"""`python -m regress.train`: the command line."""

import argparse

import torch.distributed as dist

from .trainer import Trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", default="out")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(options)
    if options.resume:
        trainer.resume()
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
