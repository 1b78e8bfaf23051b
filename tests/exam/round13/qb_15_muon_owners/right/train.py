import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from muon import OwnerMuon
from video import NextFrame, moving_dots


def split(model):
    """Hidden matrices go to Muon, everything else to AdamW."""
    matrices = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    chosen = set(matrices)
    return matrices, [p for p in model.parameters() if p not in chosen]


def tensors(model, muon, adam):
    """Everything a run needs, under names; optimizer states are created where they are missing."""
    names = {p: n for n, p in model.named_parameters()}
    out = {f"model.{n}": p.detach() for p, n in names.items()}
    for p in muon.param_groups[0]["params"]:
        out[f"muon.{names[p]}"] = muon.state[p].setdefault("buf", torch.zeros_like(p))
    for p in adam.param_groups[0]["params"]:
        s = adam.state[p]
        out[f"adam.step.{names[p]}"] = s.setdefault("step", torch.tensor(0.0))
        out[f"adam.m.{names[p]}"] = s.setdefault("exp_avg", torch.zeros_like(p))
        out[f"adam.v.{names[p]}"] = s.setdefault("exp_avg_sq", torch.zeros_like(p))
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(6)
    model = NextFrame()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices, rest = split(model)
    muon, adam = OwnerMuon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=5e-3)
    first = 0
    if args.resume:
        first = max(int(f[2:]) for f in os.listdir(args.resume) if f.startswith("at"))
        dcp.load(tensors(model, muon, adam), checkpoint_id=os.path.join(args.resume, f"at{first}"))
    for step in range(first, args.steps):
        past, future = (t.chunk(world)[rank] for t in moving_dots(step, 16))
        loss = (model(past) - future).square().mean()
        loss.backward()
        muon.step()
        adam.step()
        model.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"{step + 1} mse {shown.item() / world:.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(tensors(model, muon, adam), checkpoint_id=os.path.join(args.out, f"at{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
