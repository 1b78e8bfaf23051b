"""Graph regression with gradient accumulation; the reduction of the gradients happens once per update."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gin import GraphRegressor
from graphs import make_graphs

MICRO = 32      # graphs per micro batch, over all ranks
ACCUM = 4       # micro batches per update
EPOCHS = 5
LR = 3e-3


def micro_batches(n, epoch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(100 + epoch))
    return order.split(MICRO)


def save(folder, model, opt, epoch, updates):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "opt": o, "epoch": epoch, "updates": updates},
             checkpoint_id=os.path.join(folder, f"epoch{epoch:03d}"))


def load(folder, model, opt):
    last = sorted(os.listdir(folder))[-1]
    m, o = get_state_dict(model, opt)
    state = {"model": m, "opt": o, "epoch": 0, "updates": 0}
    dcp.load(state, checkpoint_id=os.path.join(folder, last))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    return state["epoch"], state["updates"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0, help="epochs")
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(17)
    model = GraphRegressor()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.98), eps=1e-5)
    x, adj, alive, y = make_graphs()

    first, updates = load(args.resume, model, opt) if args.resume else (0, 0)
    for epoch in range(first, EPOCHS):
        batches = micro_batches(len(y), epoch)
        total = 0.0
        for i, rows in enumerate(batches):
            boundary = (i + 1) % ACCUM == 0 or i + 1 == len(batches)
            window = min(ACCUM, len(batches) - i // ACCUM * ACCUM)
            model.set_requires_gradient_sync(boundary)
            share = len(rows) // world
            rows = rows[rank * share:(rank + 1) * share]
            loss = F.smooth_l1_loss(model(x[rows], adj[rows], alive[rows]).squeeze(-1), y[rows])
            (loss / window).backward()
            total += loss.item()
            if boundary:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                opt.step()
                opt.zero_grad()
                updates += 1
        shown = torch.tensor(total / len(batches))
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} updates {updates} loss {shown.item() / world:.5f}")
        if args.save_every and (epoch + 1) % args.save_every == 0:
            save(args.out, model, opt, epoch + 1, updates)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
