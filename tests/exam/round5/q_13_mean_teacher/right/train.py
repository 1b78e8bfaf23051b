"""Mean teacher: few labels, consistency with an averaged teacher that is an FSDP2 model of its own."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from keeper import Keeper
from student import Net
from views import augment, strokes


def build(seed):
    torch.manual_seed(seed)
    net = Net()
    for c in net.cells:
        fully_shard(c)
    return fully_shard(net, reshard_after_forward=True)


@torch.no_grad()
def follow(teacher, student, step, top=0.95):
    decay = min(top, 1 - 1 / (step + 2))
    t, s = list(teacher.parameters()), list(student.parameters())
    torch._foreach_lerp_(t, s, 1 - decay)
    for a, b in zip(teacher.buffers(), student.buffers()):
        a.copy_(b)


def ramp(step, length=12):
    return math.exp(-5 * (1 - min(step / length, 1)) ** 2)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--labelled", type=int, default=8)
    ap.add_argument("--unlabelled", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    student, teacher = build(0), build(0)
    teacher.requires_grad_(False)
    teacher.eval()
    x, y = strokes(300, seed=1)
    labelled = 40
    for net in (student, teacher):
        net.mean.fill_(x.mean().item())
        net.std.fill_(x.std().item())
    opt = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    keeper = Keeper(student, teacher, opt, rank)
    start = keeper.load(args.resume) if args.resume else 0

    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(70000 + step)
        li = torch.randperm(labelled, generator=g)[: args.labelled].chunk(world)[rank]
        ui = (labelled + torch.randperm(len(x) - labelled, generator=g)[: args.unlabelled]).chunk(world)[rank]
        ids = torch.cat([li, ui])
        with torch.no_grad():
            goal = teacher(augment(x[ids], ids, step, 1)).softmax(-1)
        out = student(augment(x[ids], ids, step, 0))
        sup = F.cross_entropy(out[: len(li)], y[li])
        con = (out.softmax(-1) - goal).square().mean()
        loss = sup + 10 * ramp(step) * con
        opt.zero_grad()
        loss.backward()
        opt.step()
        follow(teacher, student, step)
        parts = torch.stack([sup.detach(), con.detach()]) / world
        dist.all_reduce(parts)
        if rank == 0 and step % 5 == 4:
            print(f"{step + 1} supervised {parts[0].item():.4f} consistency {parts[1].item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            keeper.save(args.out, step + 1)

    xv, yv = strokes(96, seed=2)
    with torch.no_grad():
        hits = (teacher(xv[rank::world]).argmax(1) == yv[rank::world]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"teacher accuracy {hits.item() / len(yv):.3f}")
    if args.export:
        o = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {"student": get_model_state_dict(student, options=o), "teacher": get_model_state_dict(teacher, options=o)}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
