"""Causal convolutional language model with mixture-of-experts layers (balanced by a choice bias)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from model import ConvMoELM

VOCAB, LENGTH, BATCH = 40, 16, 16


def make_batch(step, rank, world):
    """Documents of several domains; a domain is a multiplier and an offset of the next token. The shards of a rank are
    contiguous, sorted by domain as the files of a corpus are."""
    g = torch.Generator().manual_seed(77 + step)
    domain = torch.randint(0, 4, (BATCH,), generator=g).sort().values
    ids = torch.randint(0, 10, (BATCH, 1), generator=g)
    for _ in range(LENGTH):
        nxt = (ids[:, -1:] * 3 + 1 + 2 * domain[:, None]) % 10
        flip = torch.rand(BATCH, 1, generator=g) < 0.1
        nxt = torch.where(flip, torch.randint(0, 10, (BATCH, 1), generator=g), nxt)
        ids = torch.cat([ids, nxt], 1)
    ids = ids + 10 * domain[:, None]
    return ids.chunk(world)[rank]


def checkpoint_state(model, opt, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o, "step": step}


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = ConvMoELM(VOCAB)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)

    start = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=int)
        state = checkpoint_state(model, opt, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        start = state["step"]

    for step in range(start, args.steps):
        ids = make_batch(step, rank, world)
        logits = model(ids[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        load = torch.stack([moe.load for moe in model.moes()])
        for moe in model.moes():
            moe.update_bias()

        if (step + 1) % 5 == 0:
            stats = torch.cat([loss.detach().view(1), load.flatten()])
            dist.all_reduce(stats)
            if rank == 0:
                share = stats[1:].view_as(load)
                print(f"{step + 1}: loss {stats[0].item() / world:.4f} busiest expert {(share.max(1).values / share.mean(1)).max():.2f}x", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            dcp.save(checkpoint_state(model, opt, step + 1), checkpoint_id=os.path.join(args.checkpoints, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=20)
    cli.add_argument("--save-every", type=int, default=0)
    cli.add_argument("--checkpoints", default="checkpoints")
    cli.add_argument("--resume", default=None)
    main(cli.parse_args())
