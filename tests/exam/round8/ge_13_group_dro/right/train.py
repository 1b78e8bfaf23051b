import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

from dro import GroupDRO
from groups import GroupLoader, spurious

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(path, step, model, optimizer, dro, loader):
    """One file with full tensors, written by rank 0."""
    state = {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
        "q": dro.q,
        "loader": loader.rng.get_state(),
        "step": step,
    }
    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
        torch.save(state, os.path.join(path, f"{step:06d}.pt"))
    dist.barrier()


def load(path, model, optimizer, dro, loader):
    state = torch.load(sorted(glob.glob(os.path.join(path, "*.pt")))[-1])
    set_model_state_dict(model, state["model"], options=FULL)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FULL)
    dro.q = state["q"]
    loader.rng.set_state(state["loader"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(25)
    model = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    fully_shard(model[2])
    fully_shard(model)
    # The weights of the samples are normalised over the global batch, so gradients are summed, not averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)
    loader = GroupLoader(spurious(800, 97), rank, world)
    dro = GroupDRO(4, args.rate)
    step = load(args.resume, model, optimizer, dro, loader) if args.resume else 0

    for (x, label, group), size in loader:
        if step == args.steps:
            break
        losses = F.cross_entropy(model(x), label, reduction="none")
        objective, mean, count = dro(losses, group)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % 6 == 0:
            average = (mean * count).sum() / size
            print(f"step {step} mean loss {average:.5f} worst group {mean.max():.5f} q {[round(v, 3) for v in dro.q.tolist()]}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.save_dir, step, model, optimizer, dro, loader)

    x, label, group = spurious(1000, 98)
    with torch.no_grad():
        right = (model(x).argmax(1) == label).float()
    by_group = [right[group == k].mean().item() for k in range(4)]
    if rank == 0:
        print(f"accuracy {right.mean():.4f} worst group {min(by_group):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
