import argparse
import itertools
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from deq import DEQ


@dataclass
class Event:
    step: int
    loss: float
    residual: float
    lr: float


def stream(seed, batch, skip=0):
    """Endless stream of global batches; `skip` batches are left out (they cost a draw each)."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(12, 3, generator=g)
    for i in itertools.count():
        x = torch.randn(batch, 12, generator=g)
        y = torch.sin(x @ w).prod(dim=1, keepdim=True) + torch.tanh(x[:, :1])
        if i >= skip:
            yield x, y


class WarmupInverseSqrt:
    def __init__(self, opt, peak, warmup):
        self.opt, self.peak, self.warmup = opt, peak, warmup

    def set(self, step):
        lr = self.peak * min((step + 1) / self.warmup, (self.warmup / (step + 1)) ** 0.5)
        for group in self.opt.param_groups:
            group["lr"] = lr
        return lr


def training(model, opt, batches, schedule, start, rank, world):
    """Generator: one optimizer step between two yields."""
    for step, (x, y) in zip(itertools.count(start), batches):
        lr = schedule.set(step)
        out, residual = model(x.chunk(world)[rank])
        loss = F.huber_loss(out, y.chunk(world)[rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        total, worst = loss.detach().clone(), residual.clone()
        dist.all_reduce(total)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        yield Event(step + 1, total.item() / world, worst.item(), lr)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="deq_ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(9)
    # one group of parameters only, kept whole until the backward pass: the implicit solve uses them again
    model = fully_shard(DEQ(12), reshard_after_forward=False)
    opt = torch.optim.NAdam(model.parameters(), lr=1.0, eps=1e-6)
    schedule = WarmupInverseSqrt(opt, peak=1e-2, warmup=6)
    start = 0
    if args.resume:
        folder = os.path.join(args.resume, sorted(os.listdir(args.resume))[-1])
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "step": 0}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        start = state["step"]

    loop = training(model, opt, stream(70, args.batch, skip=start), schedule, start, rank, world)
    for event in itertools.islice(loop, args.steps - start):
        if rank == 0 and event.step % 4 == 0:
            print(f"step {event.step} loss {event.loss:.6f} residual {event.residual:.1e} lr {event.lr:.5f}", flush=True)
        if args.save_every and event.step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "step": event.step},
                     checkpoint_id=os.path.join(args.out, f"{event.step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
