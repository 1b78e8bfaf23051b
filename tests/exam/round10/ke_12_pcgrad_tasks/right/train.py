import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from net import Shared
from surgery import GradientSurgery

TASKS = {
    "speed": lambda out, t: F.mse_loss(out.squeeze(1), t),
    "load": lambda out, t: F.smooth_l1_loss(out.squeeze(1), t),
    "state": lambda out, t: F.cross_entropy(out, t),
}


def machine_data(step, rank, world, n=24):
    g = torch.Generator().manual_seed(step + 800)
    x = torch.randn(n, 10, generator=g)
    speed = x[:, 0] - x[:, 1] + 0.5 * x[:, 2] * x[:, 3]
    load = -x[:, 0] + x[:, 1] + x[:, 4].abs()
    state = (x[:, 0] > 0).long() * 2 + (x[:, 5] > 0).long()
    n = n // world
    cut = lambda t: t[rank * n : (rank + 1) * n]
    return cut(x), {"speed": cut(speed), "load": cut(load), "state": cut(state)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    model = Shared()
    for layer in model.body:
        fully_shard(layer)
    for head in model.heads.values():
        fully_shard(head)
    fully_shard(model)
    optim = torch.optim.Adagrad(model.parameters(), lr=0.05)
    surgery = GradientSurgery(model.parameters(), seed=99)

    start = 0
    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "surgery": surgery.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        surgery.load_state_dict(state["surgery"])
        start = state["step"]

    for step in range(start, args.steps):
        x, targets = machine_data(step, rank, world)
        grads, values = [], []
        for task, loss_fn in TASKS.items():
            loss = loss_fn(model(x, task), targets[task])
            loss.backward()
            grads.append(surgery.collect())
            values.append(loss.detach())
        surgery.combine(grads)
        optim.step()
        optim.zero_grad()
        values = torch.stack(values)
        dist.all_reduce(values)
        if rank == 0 and step % 4 == 3:
            shown = dict(zip(TASKS, (round(v, 4) for v in (values / world).tolist())))
            print(f"step {step + 1} {shown} conflicts {surgery.conflicts}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save(
                {"model": m, "optim": o, "surgery": surgery.state_dict(), "step": step + 1},
                checkpoint_id=os.path.join(args.out, f"{step + 1:05d}"),
            )

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
