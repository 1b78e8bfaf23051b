"""Train a neural potential on energies and forces, then judge it by a short molecular-dynamics run."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard

from potential import ForceField, Potential, morse


def frames(n=128, atoms=5, seed=31):
    g = torch.Generator().manual_seed(seed)
    types = torch.randint(0, 3, (n, atoms), generator=g)
    base = torch.tensor([[0., 0, 0], [1.4, 0, 0], [0, 1.4, 0], [0, 0, 1.4], [1.2, 1.2, 1.2]])
    pos = base + 0.18 * torch.randn(n, atoms, 3, generator=g)
    return types, pos, *morse(types, pos)


def energy_drift(ff, types, pos, steps=10, dt=0.02):
    """Velocity Verlet with the learnt forces; drift of the learnt total energy, the same on every rank."""
    ff.eval()
    vel = torch.zeros_like(pos)
    e, f = ff(types, pos)
    start = e.detach()
    f = f.detach()
    for _ in range(steps):
        vel = vel + 0.5 * dt * f
        pos = pos + dt * vel
        e, f = (t.detach() for t in ff(types, pos))
        vel = vel + 0.5 * dt * f
    total = e + 0.5 * vel.square().sum((1, 2))
    ff.train()
    return (total - start).abs().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--force-weight", type=float, default=0.5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    types, pos, energy, force = frames()
    shift = energy.mean()
    ff = ForceField(Potential())
    # one group: the inner gradient runs through all layers before the outer backward starts
    fully_shard(ff, reshard_after_forward=False)
    opt = torch.optim.Adam(ff.parameters(), lr=1e-2, eps=1e-5)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)

    first = 0
    if args.resume:
        first = max(int(d[5:]) for d in os.listdir(args.resume) if d.startswith("frame"))
        m, o = get_state_dict(ff, opt)
        state = {"ff": m, "opt": o, "sched": sched.state_dict()}
        dcp.load(state, checkpoint_id=f"{args.resume}/frame{first}")
        set_state_dict(ff, opt, model_state_dict=state["ff"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])

    for step in range(first, args.steps):
        g = torch.Generator().manual_seed(900 + step)
        ids = torch.randperm(len(types), generator=g)[:args.batch].chunk(world)[rank]
        e, f = ff(types[ids], pos[ids])
        e_loss = (e - (energy[ids] - shift)).square().mean()
        f_loss = (f - force[ids]).square().mean()
        loss = e_loss + args.force_weight * f_loss
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        log = torch.stack([e_loss.detach(), f_loss.detach()])
        dist.all_reduce(log)
        log /= world
        if step == 0 or (step + 1) % 8 == 0:
            drift = energy_drift(ff, types[:4], pos[:4])
            if rank == 0:
                print(f"step {step + 1} energy {log[0]:.4f} force {log[1]:.4f} MD drift {drift:.2e}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(ff, opt)
            dcp.save({"ff": m, "opt": o, "sched": sched.state_dict()}, checkpoint_id=f"{args.out}/frame{step + 1}")

    full = get_model_state_dict(ff, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
