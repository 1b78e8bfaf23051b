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

from stack import GreedyStack


def state(net, step):
    out = {"step": step}
    for k, (s, o) in enumerate(zip(net.stages, net.opts)):
        out[f"model{k}"], out[f"opt{k}"] = get_state_dict(s, o)
    return out


def resume(net, folder):
    st = state(net, 0)
    dcp.load(st, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
    for k, (s, o) in enumerate(zip(net.stages, net.opts)):
        set_state_dict(s, o, model_state_dict=st[f"model{k}"], optim_state_dict=st[f"opt{k}"])
    return st["step"]


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
    net = GreedyStack([36, 32, 24, 16], classes=5, lr=5e-3)
    start = resume(net, a.resume) if a.resume else 0
    g = torch.Generator().manual_seed(13)
    proto = torch.randn(5, 36, generator=g)
    Y = torch.randint(0, 5, (512,), generator=g)
    X = proto[Y] + 1.5 * torch.randn(512, 36, generator=g)
    for step in range(start, a.steps):
        idx = torch.randint(0, 512, (a.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        log = net.train_on(X[idx], Y[idx]) / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} losses " + " ".join(f"{v:.4f}" for v in log.tolist()), flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state(net, step + 1), checkpoint_id=os.path.join(a.out, f"{step + 1:05d}"))
    out = {}
    for k, s in enumerate(net.stages):
        full = get_model_state_dict(s, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        out.update({f"{k}.{n}": v for n, v in full.items()})
    if rank == 0 and a.export:
        torch.save(out, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
