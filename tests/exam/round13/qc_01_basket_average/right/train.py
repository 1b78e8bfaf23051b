import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from averaging import WeightAverage
from data import batch_of_step, make_baskets
from model import NextPurchase

ITEMS, SLOTS = 48, 6


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    return ap.parse_args()


@torch.no_grad()
def evaluate(model, baskets, target, rank, world):
    mine = slice(rank, None, world)
    score = model(baskets[mine])
    hits = (score.topk(5, dim=1).indices == target[mine, None]).any(1)
    total = torch.tensor([F.cross_entropy(score, target[mine], reduction="sum"), hits.sum(), hits.numel()], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = NextPurchase(ITEMS, SLOTS, width=24, depth=2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    average = WeightAverage(model, decay=0.8)
    train_x, train_y = make_baskets(512, ITEMS, SLOTS, seed=11)
    valid_x, valid_y = make_baskets(128, ITEMS, SLOTS, seed=12)

    step = 0
    if args.resume:
        ms, os_ = get_state_dict(model, optim)
        state = {"model": ms, "optim": os_, "average": average.shadow, "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < args.steps:
        rows = batch_of_step(len(train_x), step, args.batch, seed=5)[rank::world]
        loss = F.cross_entropy(model(train_x[rows]), train_y[rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optim.step()
        optim.zero_grad()
        average.update()
        step += 1

        if args.save_every and step % args.save_every == 0 and step < args.steps:
            ms, os_ = get_state_dict(model, optim)
            dcp.save({"model": ms, "optim": os_, "average": average.shadow, "step": step}, checkpoint_id=args.out)
        if step % args.eval_every == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            with average.applied() as averaged:
                nll, recall = evaluate(averaged, valid_x, valid_y, rank, world)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.6f} average: nll {nll:.6f} recall@5 {recall:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
