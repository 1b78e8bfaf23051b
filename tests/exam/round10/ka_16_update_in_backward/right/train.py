import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from fused import BackwardLion
from units import UnitLM, loss_of, utterances

STEPS, BATCH, PEAK = 18, 16, 3e-3


def rate_of(name):
    if name.startswith("emb."):
        return 0.5
    if name.startswith("blocks."):
        return 0.8 ** (2 - int(name.split(".")[1]))
    return 1.0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1001)
    model = UnitLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    lion = BackwardLion(model, PEAK, rate_of)

    step = 0
    if args.resume:
        step = max(int(n) for n in os.listdir(args.resume) if n.isdigit())
        state = {"model": get_model_state_dict(model), "lion": lion.state_dict()}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, str(step)))
        set_model_state_dict(model, state["model"])
        lion.load_state_dict(state["lion"])

    while step < STEPS:
        lion.lr = PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        loss = loss_of(model, utterances(step, BATCH).chunk(world)[rank])
        loss.backward()
        step += 1
        assert set(lion.updates.values()) == {step}, "a weight was not updated exactly once"
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            state = {"model": get_model_state_dict(model), "lion": lion.state_dict()}
            dcp.save(state, checkpoint_id=os.path.join(args.out, str(step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
