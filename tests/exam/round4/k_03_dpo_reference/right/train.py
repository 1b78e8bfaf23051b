"""DPO with a frozen reference model, both sharded with FSDP2."""
import argparse
import copy
import glob
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dpo import dpo_loss
from model import Llamalet
from pairs import VOCAB, batch

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sft_model():
    # stands for reading the SFT weights from disk
    torch.manual_seed(3)
    return Llamalet(VOCAB)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--beta", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    state = None
    if a.resume:
        newest = max(glob.glob(os.path.join(a.resume, "dpo_*.pt")), key=lambda p: int(p.split("_")[-1][:-3]))
        state = torch.load(newest, map_location="cpu")

    policy = sft_model()
    reference = copy.deepcopy(policy)
    if state is not None:
        policy.load_state_dict(state["policy"])
    reference.requires_grad_(False).eval()

    policy, reference = shard(policy, mesh), shard(reference, mesh)
    opt = torch.optim.AdamW(policy.parameters(), lr=a.lr, weight_decay=0.0)
    step = 0
    if state is not None:
        set_optimizer_state_dict(policy, opt, state["opt"], options=StateDictOptions(full_state_dict=True))
        step = state["step"]

    while step < a.steps:
        opt.param_groups[0]["lr"] = a.lr * min(1.0, (step + 1) / 5)
        chosen, rejected, mask = batch(step, a.batch, rank, world)
        loss, acc = dpo_loss(policy, reference, chosen, rejected, mask, a.beta)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        step += 1
        stats = torch.stack([loss.detach(), acc]) / world
        dist.all_reduce(stats)
        if rank == 0 and step % 3 == 0:
            print(f"step {step:3d}  dpo loss {stats[0]:.4f}  reward accuracy {stats[1]:.2f}", flush=True)
        if a.out and a.save_every and step % a.save_every == 0:
            weights = get_model_state_dict(policy, options=FULL)
            optim = get_optimizer_state_dict(policy, opt, options=FULL)
            if rank == 0:
                os.makedirs(a.out, exist_ok=True)
                torch.save({"policy": weights, "opt": optim, "step": step}, os.path.join(a.out, f"dpo_{step}.pt"))
            dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
