import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from data import batches, make_split
from evaluate import recall_at_1
from model import build


def full_state(model):
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {k: v.clone() for k, v in full.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=80)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_split(800, seed=1)
    vx, vy = make_split(240, seed=2)
    torch.manual_seed(0)
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.steps)
    best, best_step, best_state = -1.0, -1, None
    for step, idx in batches(len(x), args.batch, args.steps, rank, world):
        loss = model(x[idx], y[idx])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if (step + 1) % args.eval_every:
            continue
        model.eval()
        recall = recall_at_1(model, vx, vy)
        model.train()
        log = loss.detach() / world
        dist.all_reduce(log)
        if recall > best:
            best, best_step, best_state = recall, step + 1, full_state(model)
        if rank == 0:
            print(f"step {step + 1} loss {log.item():.4f} recall@1 {recall:.4f}", flush=True)
    if rank == 0:
        print(f"best recall@1 {best:.4f} at step {best_step}")
        if args.export:
            torch.save(best_state, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
