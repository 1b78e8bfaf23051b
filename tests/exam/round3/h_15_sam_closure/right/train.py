import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from sam import SAM


def spectra(n=384, bins=24, frames=12):
    g = torch.Generator().manual_seed(12)
    y = torch.randint(0, 6, (n,), generator=g)
    x = 0.7 * torch.randn(n, bins, frames, generator=g)
    x[torch.arange(n), 4 * y] += 1.0
    return x, y


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(24, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv1d(16, 16, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(16, 6),
    )
    fully_shard(model[2])
    fully_shard(model)
    opt = SAM(model.parameters(), lr=0.1)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": step}

    def make_closure(x, y):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return closure

    start = 0
    if a.resume:
        # SAM.step cannot run without a closure, so the state is made before it is loaded
        for prm in model.parameters():
            opt.state[prm]["momentum_buffer"] = torch.zeros_like(prm)
        st = state(0)
        dcp.load(st, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        start = st["step"]
    X, Y = spectra()
    for step in range(start, a.steps):
        idx = torch.randint(0, len(X), (a.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        log = opt.step(make_closure(X[idx], Y[idx])).detach() / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {log.item():.5f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(a.out, f"{step + 1:05d}"))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
