from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from detector import build, detection_loss
from sampler import EpochSampler
from scenes import Scenes

p = ArgumentParser()
p.add_argument("--iterations", type=int, default=30)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seed", type=int, default=9)
p.add_argument("--out", type=Path)
p.add_argument("--snapshot", type=int, default=0, help="write a checkpoint every so many iterations")
p.add_argument("--resume", type=Path)


class App:
    """Everything that a checkpoint holds."""

    def __init__(self, net, opt, sampler):
        self.net, self.opt, self.sampler, self.iteration = net, opt, sampler, 0

    def state_dict(self):
        model, optim = get_state_dict(self.net, self.opt)
        return {"model": model, "optim": optim, "sampler": self.sampler.state_dict(), "iteration": self.iteration}

    def load_state_dict(self, s):
        set_state_dict(self.net, self.opt, model_state_dict=s["model"], optim_state_dict=s["optim"])
        self.sampler.load_state_dict(s["sampler"])
        self.iteration = s["iteration"]


def main():
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Scenes(96, seed=args.seed)
    net = build()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    app = App(net, opt, EpochSampler(len(data), args.batch, rank, world, args.seed))
    if args.resume:
        newest = max(args.resume.glob("it*"), key=lambda d: int(d.name[2:]))
        state = {"app": app}
        dcp.load(state, checkpoint_id=newest)

    while app.iteration < args.iterations:
        images, heat, size = data.take(app.sampler.next())
        loss = detection_loss(*net(images), heat, size)
        loss.backward()
        opt.step()
        opt.zero_grad()
        app.iteration += 1
        if app.iteration % 5 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"it {app.iteration} epoch {app.sampler.epoch} loss {mean.item():.5f}", flush=True)
        if args.out and args.snapshot and app.iteration % args.snapshot == 0:
            dcp.save({"app": app}, checkpoint_id=args.out / f"it{app.iteration}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
