"""Semi-supervised mean teacher: two fully sharded copies, the teacher follows the student shard by shard."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def network():
    net = nn.Sequential(
        nn.Linear(12, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 6)
    )
    fully_shard([net[0], net[1]])
    fully_shard([net[3], net[4]])
    return fully_shard(net)


class Pool:
    """512 samples, of which the first 96 have labels."""

    def __init__(self):
        g = torch.Generator().manual_seed(14)
        centres = 2 * torch.randn(6, 12, generator=g)
        self.y = torch.randint(6, (512,), generator=g)
        self.x = centres[self.y] + torch.randn(512, 12, generator=g)

    def draw(self, step, rank, world):
        g = torch.Generator().manual_seed(200 + step)
        labelled = torch.randint(96, (16,), generator=g)
        free = torch.randint(96, 512, (48,), generator=g)
        # the view noise belongs to the sample's place in the global batch, not to the rank
        eps = torch.randn(2, 64, 12, generator=g)
        ids = torch.cat((labelled, free))
        has_label = torch.arange(64) < 16
        mine = torch.arange(64)[rank::world]
        return self.x[ids][mine], self.y[ids][mine], has_label[mine], 0.3 * eps[:, mine]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--ema", type=float, default=0.9)
    ap.add_argument("--export", help="teacher weights")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(5)
    student = network()
    torch.manual_seed(5)
    teacher = network().requires_grad_(False).eval()
    opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    pool = Pool()

    for step in range(args.steps):
        x, y, has_label, (view_s, view_t) = pool.draw(step, rank, world)
        with torch.no_grad():
            goal = teacher(x + view_t).softmax(1)
        out = student(x + view_s)
        ramp = min(1.0, step / 15)
        # per-sample terms; every sample of the global batch weighs 1/64 (labels: 1/16), whatever rank holds it
        supervised = (F.cross_entropy(out, y, reduction="none") * has_label).sum() / 16
        consistent = (out.softmax(1) - goal).square().sum(1).sum() / 64
        loss = supervised + ramp * 4.0 * consistent
        (loss * world).backward()  # reduce-scatter averages; the global loss is the sum over ranks
        opt.step()
        opt.zero_grad()
        teacher.reshard()  # the root stays unsharded after a forward without backward
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.lerp_(s.detach(), 1 - args.ema)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step:2d} loss {total.item():.4f}", flush=True)

    with torch.no_grad():
        hits = (teacher(pool.x[rank::world]).argmax(1) == pool.y[rank::world]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"teacher accuracy {hits.item() / 512:.3f}")
    teacher.reshard()
    if args.export:
        full = get_model_state_dict(teacher, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
