"""Energies of small molecules. Muon for the hidden matrices, AdamW for everything else, each with its own schedule."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from model import MoleculeNet
from molecules import molecules
from muon import ShardedMuon


class Checkpointer:
    """Weights and Muon buffers go to DCP under the parameter names; AdamW's state is written by each rank."""

    def __init__(self, model, muon, adamw, schedules):
        self.model, self.muon, self.adamw, self.schedules = model, muon, adamw, schedules
        self.names = {p: n for n, p in model.named_parameters()}

    def sharded_state(self):
        momentum = {}
        for p in self.muon.param_groups[0]["params"]:
            momentum[self.names[p]] = self.muon.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        return {"model": get_model_state_dict(self.model), "momentum": momentum}

    def save(self, folder, step):
        path = os.path.join(folder, f"step_{step}")
        dcp.save(self.sharded_state(), checkpoint_id=path)
        torch.save({"adamw": self.adamw.state_dict(), "muon_lr": self.muon.param_groups[0]["lr"],
                    "schedules": [s.state_dict() for s in self.schedules]},
                   os.path.join(path, f"adamw_{dist.get_rank()}.pt"))
        dist.barrier()

    def load(self, folder):
        step = max(int(d.split("_")[1]) for d in os.listdir(folder))
        path = os.path.join(folder, f"step_{step}")
        dcp.load(self.sharded_state(), checkpoint_id=path)       # fills the weights and the buffers in place
        rest = torch.load(os.path.join(path, f"adamw_{dist.get_rank()}.pt"), weights_only=False)
        self.adamw.load_state_dict(rest["adamw"])
        self.muon.param_groups[0]["lr"] = rest["muon_lr"]
        for schedule, state in zip(self.schedules, rest["schedules"]):
            schedule.load_state_dict(state)
        return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(9)
    model = MoleculeNet()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    matrices, others = model.split_parameters()
    muon = ShardedMuon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(others, lr=5e-3)
    schedules = [torch.optim.lr_scheduler.LinearLR(muon, 1.0, 0.1, args.steps),
                 torch.optim.lr_scheduler.CosineAnnealingLR(adamw, args.steps)]
    ckpt = Checkpointer(model, muon, adamw, schedules)
    start = ckpt.load(args.resume) if args.resume else 0

    for step in range(start + 1, args.steps + 1):
        kinds, bonds, energy = (t.chunk(world)[rank] for t in molecules(args.batch, seed=step))
        loss = F.mse_loss(model(kinds, bonds), energy)
        muon.zero_grad()
        adamw.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
        for schedule in schedules:
            schedule.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 2 == 0:
            print(f"step {step} mse {shown.item() / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            ckpt.save(args.out, step)

    with torch.no_grad():
        kinds, bonds, energy = molecules(256, seed=123_456)
        error = F.l1_loss(model(kinds, bonds), energy).item()
    if rank == 0:
        print(f"test mae {error:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
