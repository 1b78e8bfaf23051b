import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sam import ASAM
from vision import Net, shapes


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--micro", type=int, default=2, help="micro-batches per rank and step")
    ap.add_argument("--smoothing", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="sam_ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Net()
    for stage in model.stages:
        fully_shard(stage)
    fully_shard(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(sgd, max_lr=0.5, total_steps=args.steps, cycle_momentum=False)
    sam = ASAM(model.parameters(), sgd)

    start = 0
    if args.resume:
        last = sorted(os.listdir(args.resume))[-1]
        m, o = get_state_dict(model, sgd)
        state = {"model": m, "opt": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, sgd, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        start = state["step"]

    def full_gradient(x, y):
        """Gradient of the mean loss of the global batch, over micro-batches; returns the loss of this rank."""
        total = 0.0
        for i, (xs, ys) in enumerate(zip(x.chunk(args.micro), y.chunk(args.micro))):
            model.set_requires_gradient_sync(i == args.micro - 1)
            loss = F.cross_entropy(model(xs), ys, label_smoothing=args.smoothing) / args.micro
            loss.backward()
            total += loss.item()
        return total

    for step in range(start, args.steps):
        x, y = (t.chunk(world)[rank] for t in shapes(step, args.batch))
        first = full_gradient(x, y)
        sam.ascend()
        second = full_gradient(x, y)
        sam.descend()
        sched.step()
        if step % 4 == 3:
            t = torch.tensor([first, second])
            dist.all_reduce(t)
            if rank == 0:
                print(f"step {step + 1} loss {t[0] / world:.5f} perturbed {t[1] / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, sgd)
            dcp.save({"model": m, "opt": o, "sched": sched.state_dict(), "step": step + 1},
                     checkpoint_id=os.path.join(args.out, f"{step + 1:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
