"""Progressive growing of an auto-encoder: 4x4, 8x8, 16x16, each new level faded in.

Each phase has its own optimizer over the levels in use; the levels of older phases get a lower rate.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from growing import GrowingAE

PHASES = [dict(top=0, steps=6, batch=24), dict(top=1, steps=8, batch=16), dict(top=2, steps=10, batch=8)]


def paint(n, gen):
    c = torch.rand(n, 2, 1, 1, generator=gen) * 12 + 2
    r = torch.rand(n, 1, 1, generator=gen) * 4 + 2
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    return torch.sigmoid(r - ((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2).sqrt()).unsqueeze(1)


def build():
    torch.manual_seed(23)
    net = GrowingAE()
    for level in net.levels:
        # to_px, from_px, up and down are called one by one, hence a unit for each convolution
        for conv in level.children():
            fully_shard(conv)
    fully_shard(net.squeeze)
    fully_shard(net.expand)
    return fully_shard(net)


def phase_optimizer(net, top, lr):
    old = [p for k in range(top) for p in net.levels[k].parameters()]
    new = [*net.levels[top].parameters(), *net.squeeze.parameters(), *net.expand.parameters()]
    groups = [{"params": new, "lr": lr}] + ([{"params": old, "lr": lr * 0.3}] if old else [])
    return torch.optim.Adam(groups, betas=(0.8, 0.99))


class Position:
    def __init__(self, phase=0, step=0):
        self.phase, self.step = phase, step

    @property
    def total(self):
        return sum(p["steps"] for p in PHASES[: self.phase]) + self.step


def run_phase(net, opt, pos, gen, args, on_step):
    rank, world = dist.get_rank(), dist.get_world_size()
    ph = PHASES[pos.phase]
    size = 4 * 2 ** ph["top"]
    while pos.step < ph["steps"]:
        alpha = min(1.0, (pos.step + 1) / (ph["steps"] / 2)) if ph["top"] else 1.0
        x = F.adaptive_avg_pool2d(paint(ph["batch"], gen), size).chunk(world)[rank]
        loss = (net(x, ph["top"], alpha) - x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        pos.step += 1
        on_step(loss.detach(), alpha, size)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="grow")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = build()
    gen = torch.Generator().manual_seed(24)
    pos, saved_opt = Position(), None
    if args.resume:
        folder = os.path.join(args.resume, max(os.listdir(args.resume)))
        blob = torch.load(os.path.join(folder, f"rank{rank}.pt"), weights_only=False)
        net.load_state_dict(blob["net"])
        gen.set_state(blob["gen"])
        pos, saved_opt = Position(*blob["pos"]), blob["opt"]

    def on_step(loss, alpha, size):
        if pos.step == PHASES[pos.phase]["steps"] or pos.step % 4 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"phase {pos.phase} step {pos.step} ({size}x{size}, alpha {alpha:.2f}) loss {loss.item() / world:.5f}")
        if args.save_every and pos.total % args.save_every == 0:
            folder = os.path.join(args.out, f"{pos.total:04d}")
            os.makedirs(folder, exist_ok=True)
            blob = {"net": net.state_dict(), "opt": opt.state_dict(), "gen": gen.get_state(), "pos": (pos.phase, pos.step)}
            torch.save(blob, os.path.join(folder, f"rank{rank}.pt"))
            dist.barrier()

    while pos.phase < len(PHASES):
        opt = phase_optimizer(net, PHASES[pos.phase]["top"], args.lr)
        if saved_opt is not None:
            opt.load_state_dict(saved_opt)
            saved_opt = None
        run_phase(net, opt, pos, gen, args, on_step)
        pos.phase, pos.step = pos.phase + 1, 0

    if args.export:
        sd = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
