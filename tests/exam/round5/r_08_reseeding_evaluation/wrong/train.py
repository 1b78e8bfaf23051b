"""GraphSAGE link prediction with fresh negatives for every step."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)

from linkgraph import build_graph, draw_batch
from sage import create
from validate import hit_rate


def snapshot(model, opt, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "optim": o, "step": step, "rng": torch.get_rng_state()}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=32)
    p.add_argument("--eval-every", type=int, default=4)
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    adj, feats, edges, held = build_graph()
    model = create()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    torch.manual_seed(77)
    if args.resume:
        state = snapshot(model, opt, 0)
        dcp.load(state, checkpoint_id=sorted(glob.glob(os.path.join(args.resume, "at_*")))[-1])
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        torch.set_rng_state(state["rng"])
        step = state["step"]

    while step < args.steps:
        pairs, label = draw_batch(edges, args.global_batch // 2)
        pairs, label = pairs.chunk(world)[rank], label.chunk(world)[rank]
        loss = F.binary_cross_entropy_with_logits(model(adj, feats, pairs), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        line = f"step {step} loss {mean.item() / world:.4f}"
        if step % args.eval_every == 0:
            line += f" held-out {hit_rate(model, adj, feats, held):.3f}"
        if rank == 0:
            print(line, flush=True)
        if args.save_every and args.out and step % args.save_every == 0:
            dcp.save(snapshot(model, opt, step), checkpoint_id=os.path.join(args.out, f"at_{step:05d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
