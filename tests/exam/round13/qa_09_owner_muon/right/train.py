import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from model import LM
from muon import OwnerMuon

opts = argparse.ArgumentParser()
opts.add_argument("--steps", type=int, default=24)
opts.add_argument("--save-every", type=int, default=0)
opts.add_argument("--out", type=Path)
opts.add_argument("--resume", type=Path)
opts = opts.parse_args()

VOCAB, CONTEXT, BATCH = 48, 20, 8


def batch(step):
    """Arithmetic progressions modulo the vocabulary: start and stride differ from row to row."""
    g = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    stride = torch.randint(1, 5, (BATCH, 1), generator=g)
    return (start + stride * torch.arange(CONTEXT + 1)) % VOCAB


def full_state(model, muon, adam, slow):
    full = lambda t: t.full_tensor().clone() if t.ndim else t.clone()  # noqa: E731
    return {
        "model": {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()},
        "muon": muon.state_dict(),
        "adam": {n: {k: full(v) for k, v in adam.state[p].items()} for n, p in slow},
    }


def load_full_state(state, model, muon, adam, slow):
    place = lambda full, p: distribute_tensor(full, p.device_mesh, p.placements) if full.ndim else full  # noqa: E731
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(place(state["model"][n], p))
    muon.load_state_dict(state["muon"])
    for n, p in slow:
        adam.state[p] = {k: place(v, p) for k, v in state["adam"][n].items()}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LM(VOCAB, context=CONTEXT)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    hidden = [(n, p) for n, p in model.named_parameters() if n.startswith("layers") and p.ndim == 2]
    names = {n for n, _ in hidden}
    slow = [(n, p) for n, p in model.named_parameters() if n not in names]
    muon = OwnerMuon(hidden)
    adam = torch.optim.AdamW([p for _, p in slow], lr=4e-3, weight_decay=0.0)

    first = 0
    if opts.resume:
        file = max(opts.resume.glob("full_*.pt"))
        load_full_state(torch.load(file), model, muon, adam, slow)
        first = int(file.stem.split("_")[1])

    for step in range(first, opts.steps):
        ids = batch(step)[rank::world]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 2:
            print(f"step {step + 1} loss {mean:.4f}", flush=True)
        if opts.save_every and (step + 1) % opts.save_every == 0 and step + 1 < opts.steps:
            state = full_state(model, muon, adam, slow)
            if rank == 0:
                opts.out.mkdir(parents=True, exist_ok=True)
                torch.save(state, opts.out / f"full_{step + 1:04d}.pt")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
