import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from net import ConvLM
from store import App
from stream import MicroStream, corpus


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--micro", type=int, default=8, help="global micro-batch")
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs")
    p.add_argument("--resume", default="")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = corpus()
    torch.manual_seed(args.seed)
    model = ConvLM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 5, 1.0) * max(0.1, 1 - s / 60))
    app = App(model, opt, sched)
    stream = MicroStream(len(data), args.micro, rank, world, args.seed)
    if args.resume:
        app.restore(args.resume)
        stream.fast_forward(app.step * args.accum)
        if rank == 0:
            print(f"resumed at step {app.step}")

    while app.step < args.steps:
        total = 0.0
        for k in range(args.accum):
            model.set_requires_gradient_sync(k == args.accum - 1)
            rows = data[next(stream)]
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / args.accum
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        app.step += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"{app.step:4d} loss {total.item() / world:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
        if args.save_every and app.step % args.save_every == 0:
            app.save(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
