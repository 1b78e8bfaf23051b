"""Greedy layer-wise pre-training of a denoising image autoencoder, then joint fine-tuning."""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from autoencoder import build
from plan import TOTAL, enter, locate

BATCH = 16


def option(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def images(n=96):
    g = torch.Generator().manual_seed(31)
    basis = torch.randn(10, 144, generator=g)
    return torch.tanh(torch.randn(n, 10, generator=g) @ basis / 3)


def batch(data, step, rank, world):
    g = torch.Generator().manual_seed(500 + step)
    x = data[torch.randperm(len(data), generator=g)[:BATCH]]
    noisy = x + 0.2 * torch.randn(x.shape, generator=g)
    return x[rank::world], noisy[rank::world]


def main():
    out, resume, save_at = option("--out"), option("--resume"), int(option("--save-at", "0"))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, data = build(), images()

    step, opt = 0, None
    if resume:
        step = int(open(os.path.join(resume, "STEP")).read())
        phase, begin = locate(step)
        opt = enter(phase, net)
        state = {"net": net.state_dict()}
        if step > begin:
            state["opt"] = get_optimizer_state_dict(net, opt)
        dcp.load(state, checkpoint_id=os.path.join(resume, "state"))
        net.load_state_dict(state["net"])
        if step > begin:
            set_optimizer_state_dict(net, opt, state["opt"])

    while step < TOTAL:
        phase, begin = locate(step)
        if step == begin:
            opt = enter(phase, net)
        x, noisy = batch(data, step, rank, world)
        loss = (net(noisy, phase.depth) - x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and step % 5 == 1:
            print(f"{phase.name:8s} step {step} loss {value.item() / world:.5f}", flush=True)
        if out and step == save_at:
            dcp.save({"net": net.state_dict(), "opt": get_optimizer_state_dict(net, opt)},
                     checkpoint_id=os.path.join(out, "state"))
            if rank == 0:
                with open(os.path.join(out, "STEP"), "w") as f:
                    f.write(str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
