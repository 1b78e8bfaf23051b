"""Prefix tuning of a frozen sharded transformer with zeroth-order optimization."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from mezo import MeZO
from model import PrefixClassifier


def reviews(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    word = torch.randint(0, 24, (n, 10), generator=g) + 16 * y[:, None]
    return word, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(41)
    model = PrefixClassifier().double()
    for p in model.body.parameters():
        p.requires_grad_(False)
    model.embed.weight.requires_grad_(False)
    for part in (model.prefix, *model.body, model):
        fully_shard(part, reshard_after_forward=True)  # no backward pass comes to free the weights
    model.train()
    tuned = [p for p in model.parameters() if p.requires_grad]
    opt = MeZO(tuned, lr=0.02, seed=5)

    if args.resume:
        path = max(pathlib.Path(args.resume).glob("t*"), key=lambda p: int(p.name[1:]))
        state = {"model": model.state_dict(), "t": 0}
        dcp.load(state, checkpoint_id=path)
        opt.t = state["t"]

    while opt.t < args.steps:
        words, y = (v.chunk(world)[rank] for v in reviews(args.batch, seed=opt.t))
        loss = opt.step(lambda: F.cross_entropy(model(words), y))
        if rank == 0 and opt.t % 10 == 0:
            print(f"step {opt.t} loss {loss:.4f}", flush=True)
        if args.save_every and opt.t % args.save_every == 0:
            dcp.save({"model": model.state_dict(), "t": opt.t}, checkpoint_id=pathlib.Path(args.out) / f"t{opt.t}")

    with torch.no_grad():
        words, y = reviews(256, seed=77_777)
        accuracy = (model(words).argmax(1) == y).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
