import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from fused import BackwardAdamW
from model import RecurrentLM

VOCAB, LENGTH = 32, 14


def brackets(n, g):
    """Random walks in which a token is repeated, in turn, after a marker: needs some memory."""
    ids = torch.randint(2, VOCAB, (n, LENGTH + 1), generator=g)
    marker = torch.rand(n, LENGTH + 1, generator=g) < 0.35
    for t in range(2, LENGTH + 1):
        ids[:, t] = torch.where(marker[:, t - 1], ids[:, t - 2], ids[:, t])
        ids[:, t - 1] = torch.where(marker[:, t - 1], torch.zeros_like(ids[:, t]), ids[:, t - 1])
    return ids[:, :-1], ids[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(27)
    model = RecurrentLM(VOCAB)
    for mixer in model.mixers:
        fully_shard(mixer)
    fully_shard(model)

    def lr_at(step):
        warm = min(1.0, (step + 1) / 6)
        return args.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)))

    optimizer = BackwardAdamW(model, lr_at)
    rng = torch.Generator().manual_seed(28)
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        state = {"model": get_model_state_dict(model), "optimizer": optimizer.state_dict(), "rng": rng.get_state()}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_model_state_dict(model, state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.set_state(state["rng"])

    n = args.batch // world
    while optimizer.step_count < args.steps:
        x, y = (t[rank * n:(rank + 1) * n] for t in brackets(args.batch, rng))
        loss = F.cross_entropy(model(x), y.flatten())
        loss.backward()  # updates the weights, too
        optimizer.finish_step()
        step = optimizer.step_count
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {mean.item():.5f} lr {lr_at(step - 1):.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), "optimizer": optimizer.state_dict(), "rng": rng.get_state()},
                     checkpoint_id=os.path.join(args.save_dir, str(step)))

    with torch.no_grad():
        x, y = brackets(64, torch.Generator().manual_seed(29))
        loss = F.cross_entropy(model(x), y.flatten())
    if rank == 0:
        print(f"held-out loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
