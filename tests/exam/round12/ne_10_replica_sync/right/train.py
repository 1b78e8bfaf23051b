import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lanes import LaneReducer
from reader import LABELS, ProteinTagger, batch
from topology import Topology


def shard(model, topo):
    for conv in model.convs:
        fully_shard(conv, mesh=topo.island_mesh)
    return fully_shard(model, mesh=topo.island_mesh)


def states(model, optim, step):
    m, o = get_state_dict(model, optim)
    return {"m": m, "o": o, "step": step}


def run(steps: int, rows: int, accum: int, save_every: int, out: str, resume: str):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    topo = Topology.detect()
    island = topo.mesh.get_local_rank("lane")
    torch.manual_seed(100 + island)
    model = shard(ProteinTagger(), topo)
    lanes = LaneReducer(model, topo)
    lanes.align()
    optim = torch.optim.AdamW(model.parameters(), lr=6e-3)
    step = 0
    if resume:
        s = states(model, optim, 0)
        dcp.load(s, checkpoint_id=os.path.join(resume, sorted(os.listdir(resume))[-1]))
        set_state_dict(model, optim, model_state_dict=s["m"], optim_state_dict=s["o"])
        step = s["step"]
    while step < steps:
        seen = 0.0
        for k in range(accum):
            seq, tags = (t.tensor_split(world)[rank] for t in batch(step * accum + k, rows))
            model.set_requires_gradient_sync(k == accum - 1)
            loss = torch.nn.functional.cross_entropy(model(seq).reshape(-1, LABELS), tags.reshape(-1)) / accum
            loss.backward()
            seen = seen + loss.detach()
        lanes.reduce()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optim.step()
        optim.zero_grad()
        step += 1
        dist.all_reduce(seen)
        if rank == 0 and step % 6 == 0:
            print("step", step, "loss", round(seen.item() / world, 4), flush=True)
        if save_every and step % save_every == 0 and step < steps:
            dcp.save(states(model, optim, step), checkpoint_id=os.path.join(out, f"s{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume", default="")
    run(**vars(ap.parse_args()))
