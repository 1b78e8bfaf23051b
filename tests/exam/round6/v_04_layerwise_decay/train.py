"""Fine-tuning of a pretrained time series encoder with layer-wise learning rates."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from encoder import TimeSeriesEncoder
from schedule import layerwise_scheduler, param_groups


def windows(seed, n, drift=0.0):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 24)
    freq = 1 + 5 * torch.rand(n, 1, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, 3, generator=g)
    x = torch.sin(6.28 * freq * t[None, :, None] + phase) + 0.1 * torch.randn(n, 24, 3, generator=g)
    y = freq[:, 0, 0] / 3 - 1 + drift * x.abs().mean((1, 2))
    return x, y


def pretrain(model):
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for s in range(30):
        x, y = windows(5000 + s, 32)
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()


class TrainState(Stateful):
    def __init__(self, model, optim, sched):
        self.model, self.optim, self.sched = model, optim, sched
        self.step = 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.sched.load_state_dict(state["sched"])
        self.step = state["step"]


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--warmup", type=int, default=3)
    ap.add_argument("--layer-decay", type=float, default=0.6)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = TimeSeriesEncoder()
    pretrain(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    optim = torch.optim.AdamW(param_groups(model, args.lr), weight_decay=0.01)
    sched = layerwise_scheduler(optim, args.warmup, args.steps, args.layer_decay)
    state = TrainState(model, optim, sched)
    if args.resume:
        last = max(int(d) for d in os.listdir(args.resume))
        dcp.load({"train": state}, checkpoint_id=os.path.join(args.resume, str(last)))

    local = args.batch // world
    while state.step < args.steps:
        x, y = windows(state.step, args.batch, drift=1.0)
        mine = slice(rank * local, (rank + 1) * local)
        loss = F.mse_loss(model(x[mine]), y[mine])
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        sched.step()
        state.step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {state.step} loss {shown:.5f} head lr {sched.get_last_lr()[-1]:.2e}", flush=True)
        if args.save_every and state.step % args.save_every == 0:
            dcp.save({"train": state}, checkpoint_id=os.path.join(args.out, str(state.step)))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
