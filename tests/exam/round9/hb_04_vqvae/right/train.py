import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from vq.data import Stripes
from vq.model import VQVAE


@torch.no_grad()
def evaluate(model, x):
    model.eval()
    recon, _, idx = model(x)
    model.train()
    return F.mse_loss(recon, x).item(), idx.unique().numel()


def checkpoint(model, opt, epoch):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o, "epoch": epoch}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0, help="epochs")
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # double precision: the nearest code of a vector does not hang on the last bits
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(21)
    model = VQVAE()
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    train, val = Stripes(256, 1), Stripes(64, 2)

    start = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[1]))
        state = checkpoint(model, opt, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        start = state["epoch"]

    for epoch in range(start, args.epochs):
        running = torch.zeros(())
        for x in train.epoch(args.batch, epoch, rank, world):
            recon, commit, _ = model(x)
            loss = F.mse_loss(recon, x) + commit
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.detach()
        dist.all_reduce(running)
        mse, used = evaluate(model, val.x)
        if rank == 0:
            print(f"epoch {epoch + 1} loss {running.item() / world / 8:.4f} val mse {mse:.4f} codes used {used}")
        if args.save_every and (epoch + 1) % args.save_every == 0:
            dcp.save(checkpoint(model, opt, epoch + 1), checkpoint_id=os.path.join(args.out, f"epoch-{epoch + 1}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
