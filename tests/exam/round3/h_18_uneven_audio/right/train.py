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

from model import build
from packing import corpus, deal, plan


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--clips", type=int, default=24, help="clips per step over all ranks")
    p.add_argument("--budget", type=int, default=160, help="frames per micro-batch")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": step}

    start = 0
    if a.resume:
        st = state(0)
        dcp.load(st, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        start = st["step"]
    data = corpus()
    for step in range(start, a.steps):
        picked = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[: a.clips].tolist()
        hands = deal([len(data[i][0]) for i in picked], world)
        micros = plan([data[picked[j]] for j in hands[rank]], a.budget)
        frames = sum(len(data[i][0]) for i in picked)  # of all ranks: every rank knows the whole pick
        total = torch.zeros(())
        for i, (x, y, m) in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros) - 1)
            loss = model(x, y, m) * world / frames
            loss.backward()
            total += loss.detach() / world
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and step % 4 == 0:
            print(
                f"step {step} loss per frame {total.item():.5f} micro-batches {len(micros)} clips {len(hands[0])}",
                flush=True,
            )
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(a.out, f"{step + 1:05d}"))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
