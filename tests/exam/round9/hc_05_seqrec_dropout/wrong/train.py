import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sasrec import SASRec


def sessions(n=1024, items=120, length=17, seed=21):
    """Sessions walk through the catalogue with a personal stride and some noise."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, items, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    seq = start + stride * torch.arange(length)
    noise = torch.rand(n, length, generator=g) < 0.05
    return torch.where(noise, torch.randint(0, items, (n, length), generator=g), seq % items)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--no-recompute", action="store_true")
    p.add_argument("--out", default="")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default="")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = SASRec(recompute=not args.no_recompute)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.05)
    data = sessions()

    # each rank drops different units
    torch.manual_seed(1000 + rank)
    first = 0
    if args.resume:
        path = os.path.join(args.resume, max(d for d in os.listdir(args.resume) if d.startswith("ckpt")))
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o, "step": 0, f"rng{rank}": torch.get_rng_state()}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        torch.set_rng_state(state[f"rng{rank}"])
        first = state["step"]

    model.train()
    for step in range(first, args.steps):
        g = torch.Generator().manual_seed(7000 + step)
        rows = torch.randperm(len(data), generator=g)[: args.batch].chunk(world)[rank]
        seq = data[rows]
        logits = model(seq[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean:.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            state = {"model": m, "optim": o, "step": step + 1, f"rng{rank}": torch.get_rng_state()}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"ckpt{step + 1:04d}"))

    model.eval()
    with torch.no_grad():
        seq = sessions(seed=22, n=256).chunk(world)[rank]
        hit = (model(seq[:, :-1])[:, -1].argmax(-1) == seq[:, -1]).float().sum()
    dist.all_reduce(hit)
    if rank == 0:
        print(f"hit@1 {hit.item() / 256:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
