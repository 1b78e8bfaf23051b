"""Auto-encoder that grows: 4x4, 8x8, 16x16. Every phase has its own optimizer over the parameters then in use."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ae import GrowingAE
from plan import PLAN, alpha


def pictures(phase_no, i, phase, rank, world):
    g = torch.Generator().manual_seed(100 * phase_no + i)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    cx, cy, r, w = torch.rand(4, phase.batch, 1, 1, generator=g)
    d = ((xx - cx + 0.5) ** 2 + (yy - cy + 0.5) ** 2).sqrt()
    x = torch.sigmoid(10 * (0.3 + 0.4 * r - d)) + 0.2 * torch.sin(8 * w * xx)
    x = F.adaptive_avg_pool2d(x[:, None], phase.side)
    return x.chunk(world)[rank]


def new_optimizer(model, phase):
    """older parameters learn more slowly than those of the new resolution"""
    fresh = set(model.rungs[phase.top].parameters())
    old = [p for p in model.part(phase.top) if p not in fresh]
    return torch.optim.Adam([{"params": [p for p in model.part(phase.top) if p in fresh], "lr": phase.lr},
                             {"params": old, "lr": phase.lr * (1.0 if phase.top == 0 else 0.3)}],
                            betas=(0.8, 0.95), eps=1e-6)


def optimizer_tensors(opt):
    return {f"{i}.{k}": v for i, p in enumerate(p for g in opt.param_groups for p in g["params"])
            for k, v in opt.state[p].items()}


def prime(opt):
    """gives parameters that have not been updated yet their (zero) state, so that it can be written and read"""
    for g in opt.param_groups:
        for p in g["params"]:
            if not opt.state[p]:
                opt.state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p.detach()),
                                    exp_avg_sq=torch.zeros_like(p.detach()))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ae")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(6)
    model = GrowingAE()
    for rung in model.rungs:
        fully_shard(rung, mesh=mesh)
    fully_shard(model, mesh=mesh)

    phase_no, i, total, opt = 0, 0, 0, None
    if args.resume:
        path = os.path.join(args.resume, sorted(os.listdir(args.resume), key=lambda s: int(s.split("_")[-1]))[-1])
        where = {"phase": 0, "i": 0, "total": 0}
        dcp.load(where, checkpoint_id=path)
        phase_no, i, total = where["phase"], where["i"], where["total"]
        # the optimizer of that phase has to exist before its state can be read
        opt = new_optimizer(model, PLAN[phase_no])
        prime(opt)
        state = {"model": get_model_state_dict(model), "opt": optimizer_tensors(opt)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])

    while phase_no < len(PLAN):
        phase = PLAN[phase_no]
        if opt is None:
            opt = new_optimizer(model, phase)
        while i < phase.steps:
            x = pictures(phase_no, i, phase, rank, world)
            loss = F.mse_loss(model(x, phase.top, alpha(phase, i)), x)
            opt.zero_grad()
            loss.backward()
            # rungs that are left out once the blending is over have no gradient: Adam passes over them
            opt.step()
            i, total = i + 1, total + 1
            log = loss.detach().clone()
            dist.all_reduce(log)
            if rank == 0:
                print(f"phase {phase_no} {phase.side}x{phase.side} step {total} loss {log.item() / world:.6f}")
            if args.save_every and total % args.save_every == 0:
                prime(opt)
                dcp.save({"model": get_model_state_dict(model), "opt": optimizer_tensors(opt),
                          "phase": phase_no, "i": i, "total": total},
                         checkpoint_id=os.path.join(args.out, f"grow_{total}"))
        phase_no, i, opt = phase_no + 1, 0, None

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
