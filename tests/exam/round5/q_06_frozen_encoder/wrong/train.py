import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from toyvqa import toyvqa
from vlm import VisualQA

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def set_mode(model, train):
    model.train(train)
    model.encoder.eval()


@torch.no_grad()
def validate(model, data, rank, world):
    set_mode(model, False)
    img, q, a = (t[rank::world] for t in data)
    res = torch.stack([(model(img, q).argmax(-1) == a).sum(), torch.tensor(len(a))])
    dist.all_reduce(res)
    model.train()
    return res[0].item() / res[1].item()


def save(path, model, opt, sched, step):
    blob = {
        "model": get_model_state_dict(model, options=FULL),
        "opt": get_optimizer_state_dict(model, opt, options=FULL),
        "sched": sched.state_dict(),
        "step": step,
    }
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(blob, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=8)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(5)
    model = VisualQA()
    fully_shard(model.encoder)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    set_mode(model, True)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps, eta_min=0.01)

    train, val = toyvqa(256, 1), toyvqa(96, 2)
    first = 0
    if args.resume:
        blob = torch.load(os.path.join(args.resume, max(os.listdir(args.resume))), weights_only=False)
        set_model_state_dict(model, blob["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(model, opt, blob["opt"], options=StateDictOptions(full_state_dict=True))
        sched.load_state_dict(blob["sched"])
        first = blob["step"]

    for step in range(first, args.steps):
        idx = torch.randperm(256, generator=torch.Generator().manual_seed(step))[: args.batch].chunk(world)[rank]
        img, q, a = (t[idx] for t in train)
        loss = F.cross_entropy(model(img, q), a)
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        if (step + 1) % args.eval_every == 0:
            acc = validate(model, val, rank, world)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f} val {acc:.3f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(os.path.join(args.out, f"{step + 1:05d}.pt"), model, opt, sched, step + 1)

    if args.export:
        full = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
