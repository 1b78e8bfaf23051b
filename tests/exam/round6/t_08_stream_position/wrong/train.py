import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from net import ConvLM
from stream import TokenStream

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(args, step, model, opt, sched):
    weights, moments = get_state_dict(model, opt, options=FULL)
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        tmp = os.path.join(args.out, "tmp.part")
        torch.save({"model": weights, "optim": moments, "sched": sched.state_dict(), "step": step}, tmp)
        os.replace(tmp, os.path.join(args.out, f"lm-{step:05d}.pt"))
    dist.barrier()


def load_checkpoint(args, model, opt, sched):
    files = sorted(f for f in os.listdir(args.resume) if f.startswith("lm-"))
    ck = torch.load(os.path.join(args.resume, files[-1]), weights_only=False)
    set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["optim"],
                   options=StateDictOptions(full_state_dict=True))
    sched.load_state_dict(ck["sched"])
    return ck["step"]


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = ConvLM(args.vocab)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    stream = TokenStream(args.vocab, args.ctx, args.micro, rank, world)

    step = 0
    if args.resume:
        step = load_checkpoint(args, model, opt, sched)
        stream.skip(step)
        if rank == 0:
            print(f"resumed at step {step}", flush=True)

    while step < args.steps:
        seen = torch.zeros(())
        for k in range(args.accum):
            model.set_requires_gradient_sync(k == args.accum - 1)
            x, y = stream.next()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / args.accum
            loss.backward()
            seen += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(seen)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {seen.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save_checkpoint(args, step, model, opt, sched)

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--vocab", type=int, default=40)
    ap.add_argument("--ctx", type=int, default=24)
    ap.add_argument("--micro", type=int, default=8, help="documents per micro-batch, over all ranks")
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    dist.init_process_group("gloo")
    train(ap.parse_args())
    dist.barrier()
    dist.destroy_process_group()
