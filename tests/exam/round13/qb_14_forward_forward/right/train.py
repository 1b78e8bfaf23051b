"""Forward-Forward training (Hinton 2022): no backward pass through the network, each layer learns by itself."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from glyphs import CLASSES, SIDE, draw, with_label
from layers import Unit


def collect(units):
    state = {}
    for i, u in enumerate(units):
        state[f"w{i}"], state[f"o{i}"] = get_state_dict(u.layer, u.opt)
    return state


@torch.no_grad()
def accuracy(units, rank, world):
    x, y, _ = draw(10**5, 64)
    x, y = x[rank::world], y[rank::world]
    goodness = []
    for k in range(CLASSES):
        h, total = with_label(x, torch.full_like(y, k)), 0
        for u in units:
            h = u.layer(h)
            total = total + h.square().mean(1)
        goodness.append(total)
    hits = (torch.stack(goodness).argmax(0) == y).sum()
    dist.all_reduce(hits)
    return hits.item() / 64


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    sizes = [CLASSES + SIDE * SIDE, 48, 32, 32]
    units = [Unit(a, b, 0.01) for a, b in zip(sizes, sizes[1:])]
    first = 0
    if args.resume:
        first = max(int(n) for n in os.listdir(args.resume))
        state = collect(units)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, str(first)))
        for i, u in enumerate(units):
            set_state_dict(u.layer, u.opt, model_state_dict=state[f"w{i}"], optim_state_dict=state[f"o{i}"])

    for step in range(first, args.steps):
        x, y, wrong = (t.chunk(world)[rank] for t in draw(step, 32))
        pos, neg, losses = with_label(x, y), with_label(x, wrong), []
        for u in units:
            pos, neg, loss = u.learn(pos, neg)
            losses.append(loss)
        if (step + 1) % 6 == 0:
            shown = torch.stack(losses)
            dist.all_reduce(shown)
            acc = accuracy(units, rank, world)
            if rank == 0:
                print(step + 1, "losses", " ".join(f"{v / world:.4f}" for v in shown.tolist()), f"accuracy {acc:.3f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(collect(units), checkpoint_id=os.path.join(args.out, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
