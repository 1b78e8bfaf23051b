"""Population based tuning of the learning rate, all members resident and sharded over all ranks."""
import argparse
import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from members import Member
from population import Population
from task import CreditTask

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--round-steps", type=int, default=6)
parser.add_argument("--rows", type=int, default=32)
parser.add_argument("--archive")
parser.add_argument("--archive-rounds", type=int, nargs="*", default=[])
parser.add_argument("--revive")
args = parser.parse_args()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
members = [Member.create(n, seed, lr, mesh) for n, seed, lr in (("amber", 1, 3e-4), ("birch", 2, 2e-3), ("cedar", 3, 1e-2))]
pop = Population(members, CreditTask(args.rows), seed=17)
first = 0


def snapshot(rounds_done):
    return {"rounds": rounds_done, **{m.name: m.state() for m in members}}


if args.revive:
    state = snapshot(0)
    dcp.load(state, checkpoint_id=os.path.join(args.revive, max(os.listdir(args.revive))))
    for m in members:
        m.restore(state[m.name])
    first = state["rounds"]

for r in range(first, args.rounds):
    for s in range(args.round_steps):
        losses = pop.train(r * args.round_steps + s)
    best, worst = pop.evolve(r)
    if dist.get_rank() == 0:
        print(f"round {r}: losses {' '.join(f'{v:.4f}' for v in losses)}; {worst.name} <- {best.name}, lr {worst.lr:.2e}", flush=True)
    if args.archive and r + 1 in args.archive_rounds:
        dcp.save(snapshot(r + 1), checkpoint_id=os.path.join(args.archive, f"round{r + 1:02d}"))

order = pop.rank_members()
if dist.get_rank() == 0:
    print("winner", order[0].name, f"{order[0].fitness:.4f}", "lineage", order[0].lineage)
dist.destroy_process_group()
