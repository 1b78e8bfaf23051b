"""Training with a growing batch. Micro-batches have at most four samples, so the number of
accumulation steps grows; weights and gradients are kept in float32, the network is computed in float64."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ramp import Ramp


class OscillatorNet(nn.Module):
    """Predicts the position of a damped oscillator from its parameters and the time."""

    def __init__(self, dim=32):
        super().__init__()
        self.register_buffer("freq", torch.linspace(0.5, 4, 8))
        self.inp = nn.Linear(2 + 16, dim)
        self.mid = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, 1)

    def forward(self, q):
        phase = q[:, 2:] * self.freq
        x = torch.tanh(self.inp(torch.cat([q[:, :2], phase.sin(), phase.cos()], 1)))
        for layer in self.mid:
            x = x + torch.tanh(layer(x))
        return self.out(x).sum(1)


class Stream:
    """Sample number i is always the same, whatever the batch it falls into."""

    def samples(self, ids):
        rows = [torch.rand(3, generator=torch.Generator().manual_seed(4_000 + i)) for i in ids]
        q = torch.stack(rows).double() * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([0.1, 1.0, 0.0])
        y = torch.exp(-q[:, 0] * q[:, 2]) * torch.cos(q[:, 1] * q[:, 2])
        return q, y


def micro_batches(first, size, micro, rank, world):
    """Rank r takes the samples with number r, r + world, ... of the batch, in micro-batches."""
    mine = list(range(first + rank, first + size, world))
    return [mine[k : k + micro] for k in range(0, len(mine), micro)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--total", type=int, default=900, help="samples")
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ramp")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(70)
    model = OscillatorNet()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    for layer in model.mid:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    ramp, stream = Ramp(total=args.total), Stream()
    seen = step = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "seen": 0, "step": 0}
        newest = max(os.listdir(args.resume), key=lambda d: int(d.rsplit("_", 1)[1]))
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        seen, step = state["seen"], state["step"]

    while seen < args.total:
        size = ramp.batch_size(seen)
        for group in opt.param_groups:
            group["lr"] = ramp.rate(seen, size)
        micros = micro_batches(seen, size, args.micro, rank, world)
        shown = torch.zeros((), dtype=torch.float64)
        for k, ids in enumerate(micros):
            model.set_requires_gradient_sync(k == len(micros) - 1)
            q, y = stream.samples(ids)
            # sum over the samples of all micro-batches and ranks, divided by the global size
            loss = F.mse_loss(model(q), y, reduction="sum") * (world / size)
            loss.backward()
            shown += loss.detach() / world
        opt.step()
        opt.zero_grad()
        seen += size
        step += 1
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} batch {size} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            state = {"model": m, "opt": o, "seen": seen, "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"after_{seen}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
