import os
from argparse import ArgumentParser
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from inbackward import AdamInBackward
from vae import build


@dataclass
class Hyper:
    steps: int = 40
    batch: int = 16
    peak_lr: float = 4e-3
    warmup: int = 5
    kl_warmup: int = 25
    latent: int = 6

    def lr(self, step):
        return self.peak_lr * min(1.0, (step + 1) / self.warmup) * (1 - 0.8 * step / self.steps)

    def beta(self, step):
        return 0.05 * min(1.0, step / self.kl_warmup)


def faces(n=96):
    g = torch.Generator().manual_seed(101)
    parts = torch.randn(6, 100, generator=g)
    return torch.tanh(torch.randn(n, 6, generator=g) @ parts / 2) + 0.05 * torch.randn(n, 100, generator=g)


def main():
    ap = ArgumentParser()
    ap.add_argument("--ckpt")
    ap.add_argument("--ckpt-every", type=int, default=16)
    ap.add_argument("--restore")
    args = ap.parse_args()
    hp = Hyper()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, data = build(), faces()
    optimizer = AdamInBackward(net.named_parameters())

    step = 0
    if args.restore:
        newest = max(os.listdir(args.restore), key=int)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.restore, newest))
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    while step < hp.steps:
        g = torch.Generator().manual_seed(step)
        x = data[torch.randperm(len(data), generator=g)[:hp.batch]][rank::world]
        noise = torch.randn(hp.batch, hp.latent, generator=g)[rank::world]
        y, kl = net(x, noise)
        loss = (y - x).pow(2).mean() + hp.beta(step) * kl
        optimizer.begin(hp.lr(step))
        loss.backward()
        step += 1
        if step % 8 == 0 or step == 1:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item():.5f}", flush=True)
        if args.ckpt and step % args.ckpt_every == 0:
            dcp.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.ckpt, str(step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
