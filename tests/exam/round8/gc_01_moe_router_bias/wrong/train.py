import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict, StateDictOptions
from torch.distributed.fsdp import fully_shard

from balance import max_violation, update_expert_bias
from data import MarkovText
from model import MoE, MoELM


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--bias-rate", type=float, default=0.02)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = MoELM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    data = MarkovText(48, 16, args.global_batch, seed=5)

    start = 0
    if args.resume:
        newest = max(glob.glob(os.path.join(args.resume, "step_*")), key=lambda d: int(d.rsplit("_", 1)[1]))
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        x, y = data.batch(step, rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        load = model.blocks[-1].moe.load.clone()
        update_expert_bias(model, args.bias_rate)
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        dist.all_reduce(load)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {logged.item() / world:.4f} max violation {max_violation(load):.2f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd, "step": step + 1}, checkpoint_id=os.path.join(args.out, f"step_{step + 1}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
