import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from es import Evolution
from task import Reach


def build():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(Reach.obs_dim, 16), nn.Tanh(), nn.Linear(16, Reach.act_dim))
    # every evaluation ends with the shards back in place, they are moved between two evaluations
    return fully_shard(net, reshard_after_forward=True)


def main(a):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task, policy = Reach(), build()
    opt = torch.optim.SGD(policy.parameters(), lr=0.3, momentum=0.6)
    es = Evolution(policy, pairs=a.pairs, sigma=0.1, seed=77)
    start, goal = task.part(rank, world)

    first = 0
    if a.resume:
        folder = sorted(pathlib.Path(a.resume).glob("gen_*"))[-1]
        model_sd, opt_sd = get_state_dict(policy, opt)
        state = {"policy": model_sd, "opt": opt_sd, "generation": 0}
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(policy, opt, model_state_dict=state["policy"], optim_state_dict=state["opt"])
        first = state["generation"]

    for gen in range(first, a.generations):
        fit = es.generation(gen, lambda: task.returns(policy, start, goal), count=len(task.start))
        opt.step()
        if rank == 0:
            print(f"generation {gen + 1} loss {-fit:.5f}", flush=True)
        if a.save_every and (gen + 1) % a.save_every == 0 and gen + 1 < a.generations:
            model_sd, opt_sd = get_state_dict(policy, opt)
            dcp.save({"policy": model_sd, "opt": opt_sd, "generation": gen + 1},
                     checkpoint_id=str(pathlib.Path(a.out) / f"gen_{gen + 1:03d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=14)
    ap.add_argument("--pairs", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    main(ap.parse_args())
