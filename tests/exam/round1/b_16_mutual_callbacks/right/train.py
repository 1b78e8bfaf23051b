import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from callbacks import Augment, Checkpoint, Export, Printer, Schedulers
from loop import MutualLoop, Peer
from models import ConvPeer, MLPPeer

CLASSES = 6


def make_data(n=900, seed=14):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(CLASSES, 1, 10, 10, generator=g)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    x = proto[y] + 0.7 * torch.randn(n, 1, 10, 10, generator=g)

    def batch(step, size):
        idx = torch.randint(0, n, (size,), generator=torch.Generator().manual_seed(step))
        return x[idx], y[idx]

    return batch


def shard(net):
    for u in net.units:
        fully_shard(u)
    return fully_shard(net)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mutual")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(77)
    conv, mlp = shard(ConvPeer(CLASSES)), shard(MLPPeer(CLASSES))
    peers = [
        Peer("conv", conv, torch.optim.SGD(conv.parameters(), lr=0.05, momentum=0.9)),
        Peer("mlp", mlp, torch.optim.AdamW(mlp.parameters(), lr=3e-3)),
    ]
    callbacks = [
        Augment(),
        Schedulers(
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 4) * (1 - s / (a.steps + 1)))
        ),
        Printer(3),
        Checkpoint(a.save_every, a.out, a.resume),
        Export(a.export),
    ]
    MutualLoop(peers, make_data(), a.batch, callbacks).run(a.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
