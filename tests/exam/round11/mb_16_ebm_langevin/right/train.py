"""Energy-based model of small images: persistent contrastive divergence with a replay buffer. The negative samples come
from Langevin dynamics, that is from gradients with respect to the images; the parameters get no gradient there."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, BATCH, BUFFER, SIDE = 18, 16, 64, 10


class Energy(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.blocks = nn.ModuleList([
            nn.Sequential(nn.Conv2d(1, ch, 3, 1, 1), nn.SiLU()),
            nn.Sequential(nn.Conv2d(ch, 2 * ch, 4, 2, 1), nn.SiLU()),
            nn.Sequential(nn.Conv2d(2 * ch, 2 * ch, 3, 2, 1), nn.SiLU())])
        self.out = nn.Linear(2 * ch * 9, 1)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x.flatten(1))


class ReplayBuffer:
    """Chains of all ranks. Every rank holds the whole buffer; what is drawn and which chains start anew is decided from
    one generator, and after sampling the new states of all ranks are written back everywhere."""

    def __init__(self, rank, world):
        self.gen = torch.Generator().manual_seed(77)
        self.chains = torch.rand(BUFFER, 1, SIDE, SIDE, generator=self.gen) * 2 - 1
        self.rank, self.world = rank, world

    def draw(self):
        self.ids = torch.randperm(BUFFER, generator=self.gen)[:BATCH]
        start = self.chains[self.ids]
        new = torch.rand(BATCH, 1, 1, 1, generator=self.gen) < 0.05
        fresh = torch.rand(start.shape, generator=self.gen) * 2 - 1
        return torch.where(new, fresh, start).chunk(self.world)[self.rank]

    def noise(self, scale):
        return scale * torch.randn(BATCH, 1, SIDE, SIDE, generator=self.gen).chunk(self.world)[self.rank]

    def put(self, x):
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x.contiguous())
        self.chains[self.ids] = torch.cat(parts)

    def state_dict(self):
        return {"chains": self.chains, "gen": self.gen.get_state()}

    def load_state_dict(self, s):
        self.chains = s["chains"]
        self.gen.set_state(s["gen"])


def langevin(model, buffer, steps=6, size=0.5, noise=0.01):
    x = buffer.draw()
    model.requires_grad_(False)
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        energy = model(x).sum()
        grad, = torch.autograd.grad(energy, x)
        x = (x - size * grad.clamp(-0.1, 0.1) + buffer.noise(noise)).clamp(-1, 1)
    x = x.detach()
    model.requires_grad_(True)
    buffer.put(x)
    return x


def real(step, rank, world):
    g = torch.Generator().manual_seed(step)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    a, p = 6.28 * torch.rand(2, BATCH, 1, 1, generator=g)
    x = torch.sin(4 * (a.cos() * xx + a.sin() * yy) + p)[:, None]
    x = (x + 0.03 * torch.randn(x.shape, generator=g)).clamp(-1, 1)
    return x.chunk(world)[rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ebm")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(16)
    model = Energy()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.99))
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)
    buffer = ReplayBuffer(rank, world)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "sched": sched.state_dict(), "buffer": buffer.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        buffer.load_state_dict(state["buffer"])
        step = state["step"]

    while step < STEPS:
        negative = langevin(model, buffer)
        positive = real(step, rank, world)
        e_pos, e_neg = model(torch.cat([positive, negative])).chunk(2)
        divergence = e_pos.mean() - e_neg.mean()
        loss = divergence + 0.1 * (e_pos.pow(2).mean() + e_neg.pow(2).mean())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        step += 1
        log = torch.stack([loss.detach(), divergence.detach()])
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step} loss {log[0].item() / world:.5f} gap {log[1].item() / world:.5f}")
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "sched": sched.state_dict(), "buffer": buffer.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.out, f"ebm{step:04d}"))

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        sd["chains"] = buffer.chains
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
