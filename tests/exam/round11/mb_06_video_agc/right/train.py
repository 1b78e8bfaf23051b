"""Video classifier without normalisation layers; AGC + SGD, FSDP2."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from agc import adaptive_clip_
from engine import Callback, Printer, Saver, Trainer
from video import VideoNet, clips

STEPS, BATCH = 24, 16


class Export(Callback):
    def __init__(self, path):
        self.path = path

    def after_fit(self, trainer):
        sd = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(sd, self.path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="out")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(19)
    model = VideoNet()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS, cycle_momentum=False)

    def batches(step):
        x, y = clips(step, BATCH)
        return x.chunk(world)[rank], y.chunk(world)[rank]

    def clip(m):
        # the classifier is left out, as in the paper
        adaptive_clip_(q for n, q in m.named_parameters() if not n.startswith("head."))

    callbacks = [Printer()]
    if args.save_every:
        callbacks.append(Saver(args.out, args.save_every))
    if args.export:
        callbacks.append(Export(args.export))
    trainer = Trainer(model, optimizer, scheduler, F.cross_entropy, clip, callbacks)
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit(batches, STEPS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
