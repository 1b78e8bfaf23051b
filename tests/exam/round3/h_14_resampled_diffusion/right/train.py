import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from model import ABAR, T, build
from resampler import LossAware


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = LossAware(T)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "moment": sampler.moment, "step": step}

    start = 0
    if a.resume:
        st = state(0)
        dcp.load(st, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        sampler.moment, start = st["moment"], st["step"]
    g0 = torch.Generator().manual_seed(3)
    data = torch.sin(torch.randn(512, 2, generator=g0) @ torch.randn(2, 8, generator=g0))
    for step in range(start, a.steps):
        g = torch.Generator().manual_seed(10_000 + step)  # everything random is a function of the step
        idx = torch.randint(0, len(data), (a.batch,), generator=g)
        t, w = sampler.sample(a.batch, g)
        eps = torch.randn(a.batch, 8, generator=g)
        x, t, w, eps = (v.chunk(world)[rank] for v in (data[idx], t, w, eps))
        k = ABAR[t][:, None]
        per = (model(k.sqrt() * x + (1 - k).sqrt() * eps, t) - eps).square().mean(1)
        (w * per).mean().backward()
        opt.step()
        opt.zero_grad()
        sampler.update(t, per)
        log = (w * per).detach().mean() / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {log.item():.5f} p_max {sampler.probs().max():.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(a.out, f"{step + 1:05d}"))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save({**full, "moment": sampler.moment}, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
