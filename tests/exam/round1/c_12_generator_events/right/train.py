"""The training loop is a generator that yields events; printing, saving and stopping are consumers of the stream."""

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


@dataclass
class StepDone:
    step: int
    loss: torch.Tensor


@dataclass
class EpochDone:
    epoch: int


class AutoEncoder(nn.Module):
    def __init__(self, d=20, h=32, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, z))
        self.dec = nn.Sequential(nn.Linear(z, h), nn.Tanh(), nn.Linear(h, d))

    def forward(self, x):
        return self.dec(self.enc(x))


def corpus(n=320):
    g = torch.Generator().manual_seed(2)
    return torch.tanh(torch.randn(n, 5, generator=g) @ torch.randn(5, 20, generator=g))


def denoising_batches(data, rank, world, first_step, size=32):
    """Endless; a pure function of the step number, so that it can start anywhere."""
    per_epoch = len(data) // size
    step = first_step
    while True:
        epoch, i = divmod(step, per_epoch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        clean = data[order[i * size : (i + 1) * size]]
        noise = 0.1 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(10_000 + step))
        yield epoch, (clean + noise)[rank::world], clean[rank::world]
        step += 1


def training(model, opt, sched, batches, step):
    last_epoch = None
    for epoch, noisy, clean in batches:
        if last_epoch is not None and epoch != last_epoch:
            sched.step()
            yield EpochDone(last_epoch)
        last_epoch = epoch
        # squared error summed over the features, averaged over the samples
        loss = (model(noisy) - clean).square().sum(1).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        step += 1
        yield StepDone(step, loss.detach())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = AutoEncoder()
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=4e-3, eps=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"m": m, "o": o, "sched": copy.deepcopy(sched.state_dict()), "step": step}

    start = 0
    data = corpus()
    per_epoch = len(data) // 32
    if args.resume:
        s = state(0)
        dcp.load(s, checkpoint_id=max(args.resume.glob("s*"), key=lambda p: int(p.name[1:])))
        set_state_dict(model, opt, model_state_dict=s["m"], optim_state_dict=s["o"])
        sched.load_state_dict(s["sched"])
        start = s["step"]
        if start and start % per_epoch == 0:
            # the epoch's end is noticed by the first batch of the next one, which this process never sees
            sched.step()

    stream = training(model, opt, sched, denoising_batches(data, rank, world, start), start)
    for event in stream:
        match event:
            case EpochDone(epoch=e):
                if rank == 0:
                    print(f"-- epoch {e} done, lr is now {sched.get_last_lr()[0]:.5f}")
            case StepDone(step=n, loss=loss):
                dist.all_reduce(loss)
                if rank == 0:
                    print(f"step {n} loss {loss.item() / world:.4f}", flush=True)
                if args.out and args.save_every and n % args.save_every == 0:
                    dcp.save(state(n), checkpoint_id=args.out / f"s{n}")
                if n >= args.steps:
                    stream.close()

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
