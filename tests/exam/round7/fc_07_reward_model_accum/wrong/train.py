"""Train a reward model on preference pairs (Bradley-Terry) with gradient accumulation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from model import RewardModel
from prefs import Preferences


class TrainState(Stateful):
    def __init__(self, model, opt):
        self.model, self.opt, self.epoch = model, opt, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "epoch": self.epoch}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.epoch = sd["epoch"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--pairs", type=int, default=80)
    ap.add_argument("--micro", type=int, default=8)
    ap.add_argument("--save-every", type=int, default=0, help="epochs")
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = RewardModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    data = Preferences(args.pairs, args.micro, rank, world)
    ts = TrainState(model, opt)
    if args.resume:
        newest = max((d for d in os.listdir(args.resume) if d.startswith("epoch")), key=lambda d: int(d[5:]))
        dcp.load({"train": ts}, checkpoint_id=os.path.join(args.resume, newest))

    micro_batches = len(data)
    for epoch in range(ts.epoch, args.epochs):
        seen = torch.zeros(2)
        for i, chosen, rejected in data.epoch(epoch):
            window_start = i - i % args.accum
            window = min(args.accum, micro_batches - window_start)
            sync = (i + 1) % args.accum == 0
            model.set_requires_gradient_sync(sync)
            margin = model(torch.cat([chosen, rejected])).chunk(2)
            margin = (margin[0] - margin[1]).squeeze(-1)
            loss = -F.logsigmoid(margin).mean()
            (loss / window).backward()
            seen += torch.stack([loss.detach(), (margin > 0).float().mean()])
            if (i + 1) % args.accum == 0 or i + 1 == micro_batches:
                opt.step()
                opt.zero_grad()
        dist.all_reduce(seen)
        seen /= world * micro_batches
        if rank == 0:
            print(f"epoch {epoch} loss {seen[0]:.5f} acc {seen[1]:.3f}", flush=True)
        ts.epoch = epoch + 1
        if args.save_every and ts.epoch % args.save_every == 0:
            dcp.save({"train": ts}, checkpoint_id=os.path.join(args.out, f"epoch{ts.epoch}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
