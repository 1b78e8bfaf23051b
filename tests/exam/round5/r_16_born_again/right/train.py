"""Born-again networks: each generation is distilled from the one before and starts afresh."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import archive
from blobs import Blobs
from lookahead import Lookahead
from student import new_student


class Run:
    """What is alive in one generation."""

    def __init__(self, generation, teacher):
        self.generation, self.teacher, self.step = generation, teacher, 0
        self.student = new_student(generation)
        self.look = Lookahead(torch.optim.Adam(self.student.parameters(), lr=1e-2))


def frozen(net):
    return None if net is None else net.requires_grad_(False)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--generations", type=int, default=3)
    p.add_argument("--steps", type=int, default=10, help="per generation")
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Blobs()

    if args.resume:
        folder, generation, step = archive.newest(args.resume)
        teacher = frozen(new_student(generation - 1)) if generation else None
        run = Run(generation, teacher)
        archive.load(folder, run)
        run.step = step
    else:
        run = Run(0, None)

    while True:
        stream = data.stream(run.generation, args.global_batch, rank, world, run.step)
        while run.step < args.steps:
            x, y = next(stream)
            logits = run.student(x)
            loss = F.cross_entropy(logits, y)
            if run.teacher is not None:
                with torch.no_grad():
                    soft = run.teacher(x).softmax(-1)
                loss = 0.5 * loss + 0.5 * F.cross_entropy(logits, soft)
            loss.backward()
            run.look.step()
            run.step += 1
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"generation {run.generation} step {run.step} loss {mean.item():.4f}", flush=True)
            if args.save_every and args.out and run.step % args.save_every == 0:
                archive.save(args.out, run)
        if run.generation + 1 == args.generations:
            break
        run = Run(run.generation + 1, frozen(run.student))

    if args.export:
        full = get_model_state_dict(run.student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
