import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import consumers
from engine import Progress, training
from task import Task, build


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")

    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    cursor = {"epoch": 0, "index": 0}
    start = consumers.restore(args.resume, model, opt, cursor) if args.resume else 0

    listeners = [consumers.printer(), consumers.decayer(opt, 0.8),
                 consumers.saver(args.out, args.save_every, model, opt, cursor)]
    for listener in listeners:
        next(listener)

    last = args.stop_at or args.steps
    for event in training(model, opt, Task(args.batch, dist.get_rank(), dist.get_world_size()), cursor, start):
        for listener in listeners:
            listener.send(event)
        if isinstance(event, Progress) and event.step >= last:
            break

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0 and args.export:
        torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
