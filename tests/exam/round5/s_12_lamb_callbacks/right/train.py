import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from callbacks import LinearDecay, Print, Resume, Save
from lamb import Lamb


class Trainer:
    def __init__(self, model, opt, loss_fn, source, callbacks):
        self.model, self.opt, self.loss_fn, self.source, self.callbacks = model, opt, loss_fn, source, callbacks
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = self.seen = 0

    def fire(self, name):
        for c in self.callbacks:
            getattr(c, name)(self)

    def fit(self, steps):
        self.fire("on_start")
        while self.step < steps:
            x, y = self.source(self.step)
            loss = self.loss_fn(self.model(x.chunk(self.world)[self.rank]), y.chunk(self.world)[self.rank])
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.loss = loss.detach()
            self.step += 1
            self.seen += len(x)
            self.fire("on_step")


def source(step, n=32):
    g = torch.Generator().manual_seed(70 + step)
    x = torch.randn(n, 9, generator=g)
    return x, torch.stack([x[:, 0] * 2 - x[:, 1], x[:, 2].abs() + x[:, 3]], 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--save-every", type=int)
    ap.add_argument("--out", default="saves")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
    for m in model:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    fully_shard(model)
    cbs = [Resume(args.resume)] if args.resume else []
    cbs += [LinearDecay(0.03, 32 * args.steps), Print()]
    if args.save_every:
        cbs.append(Save(args.out, args.save_every))
    Trainer(model, Lamb(model.parameters()), nn.functional.mse_loss, source, cbs).fit(args.steps)
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and dist.get_rank() == 0:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
