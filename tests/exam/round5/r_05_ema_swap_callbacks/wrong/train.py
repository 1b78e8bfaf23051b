"""Rating prediction with a callback trainer; evaluation uses averaged weights."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from callbacks import Printer, Saver, WeightAverage, load_newest
from ratings import Ratings, build
from trainer import Trainer


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=256)
    p.add_argument("--save-every", type=int, default=5, help="evaluate (and save, with --out) every so many steps")
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    average = WeightAverage(model)
    callbacks = [average, Printer()]
    if args.out:
        callbacks.insert(0, Saver(args.out, average))
    trainer = Trainer(model, opt, Ratings(args.global_batch, rank, world), F.mse_loss, callbacks, args.save_every)
    if args.resume:
        load_newest(args.resume, trainer, average)
    trainer.fit(args.steps)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
