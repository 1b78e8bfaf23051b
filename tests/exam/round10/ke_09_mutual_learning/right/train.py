"""Deep mutual learning: two different networks teach each other, each with its own optimizer and schedule."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from nets import ConvNet, GRUNet
from peer import Clock, Peer

CLASSES, BATCH, STEPS = 5, 32, 26


def signals(step, rank, world):
    g = torch.Generator().manual_seed(70_000 + step)
    y = torch.randint(0, CLASSES, (BATCH,), generator=g)
    t = torch.linspace(0, 6.28, 32)
    phase = torch.rand(BATCH, 1, generator=g) * 6.28
    base = torch.sin((y[:, None] + 1) * t + phase)
    x = torch.stack([base, base.roll(3, 1), torch.zeros_like(base)], 2) + 0.4 * torch.randn(BATCH, 32, 3, generator=g)
    n = BATCH // world
    return x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]


def build():
    torch.manual_seed(2)
    peers = []
    for name, net, make in (
        ("gru", GRUNet(CLASSES), lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-6)),
        ("cnn", ConvNet(CLASSES), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ):
        for part in net.parts():
            fully_shard(part)
        # the logits of one peer are needed in the step of the other: no weights stay gathered in between
        fully_shard(net, reshard_after_forward=True)
        optim = make(net.parameters())
        peers.append(Peer(name, net, optim, torch.optim.lr_scheduler.StepLR(optim, 10, 0.5)))
    return peers


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    peers, clock = build(), Clock()
    state = {"clock": clock, **{p.name: p for p in peers}}
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))

    while clock.step < STEPS:
        x, y = signals(clock.step, rank, world)
        # even steps: the first peer learns first and the second one already sees its new opinion
        order = peers if clock.step % 2 == 0 else peers[::-1]
        for me, other in (order, order[::-1]):
            with torch.no_grad():
                opinion = other.net(x).log_softmax(1)
            logits = me.net(x)
            kl = F.kl_div(logits.log_softmax(1), opinion, log_target=True, reduction="batchmean")
            loss = F.cross_entropy(logits, y) + 0.5 * kl
            loss.backward()
            me.optim.step()
            me.optim.zero_grad()
            me.sched.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            me.loss = mean.item() / world
        min(peers, key=lambda p: p.loss).wins += 1
        clock.step += 1
        if rank == 0 and clock.step % 5 == 0:
            print(clock.step, {p.name: (round(p.loss, 4), p.wins) for p in peers}, flush=True)
        if args.save_every and clock.step % args.save_every == 0:
            dcp.save(state, checkpoint_id=os.path.join(args.out, str(clock.step)))

    if args.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {p.name: get_model_state_dict(p.net, options=opts) for p in peers}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
