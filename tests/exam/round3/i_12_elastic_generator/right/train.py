"""Training as a generator: the loop is a pipeline of small generators, and a restart may use another number of ranks.

All bookkeeping is in global units (samples), never in batches of a rank.
"""

import argparse
import itertools
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FULL_SAVE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FULL_LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
N, GLOBAL_BATCH = 500, 32


class Tick(NamedTuple):
    seen: int
    loss: torch.Tensor


def global_indices(seen):
    """Endless sample ids from position `seen` on; each epoch has a permutation of its own and batches may span two epochs."""
    while True:
        epoch, offset = divmod(seen, N)
        perm = torch.randperm(N, generator=torch.Generator().manual_seed(100 + epoch))
        yield from perm[offset:].tolist()
        seen += N - offset


def batches(seen, data, rank, world):
    ids = global_indices(seen)
    while True:
        window = list(itertools.islice(ids, GLOBAL_BATCH))
        seen += GLOBAL_BATCH
        mine = window[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
        yield seen, tuple(t[mine] for t in data)


def training(model, optim, source):
    for seen, (x, y) in source:
        for group in optim.param_groups:
            group["lr"] = group["peak"] * min(seen / (6 * GLOBAL_BATCH), (6 * GLOBAL_BATCH / seen) ** 0.5)
        loss = F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        yield Tick(seen, loss.detach())


def averaged(ticks, world):
    for t in ticks:
        dist.all_reduce(t.loss)
        yield t._replace(loss=t.loss / world)


def printed(ticks, rank, every=5):
    for i, t in enumerate(ticks, 1):
        if rank == 0 and i % every == 0:
            print(f"{t.seen:6d} samples  loss {t.loss.item():.4f}", flush=True)
        yield t


def saved(ticks, model, optim, out, every):
    for t in ticks:
        if out and every and (t.seen // GLOBAL_BATCH) % every == 0:
            blob = {
                "model": get_model_state_dict(model, options=FULL_SAVE),
                "optim": get_optimizer_state_dict(model, optim, options=FULL_SAVE),
                "seen": t.seen,
            }
            if dist.get_rank() == 0:
                os.makedirs(out, exist_ok=True)
                name = os.path.join(out, f"{t.seen:08d}.pt")
                torch.save(blob, name + ".tmp")
                os.replace(name + ".tmp", name)
            dist.barrier()
        yield t


def restore(folder, model, optim):
    box, blob = [None], {"model": {}, "optim": {}}
    if dist.get_rank() == 0:
        path = os.path.join(folder, max(n for n in os.listdir(folder) if n.endswith(".pt")))
        blob = torch.load(path, weights_only=True)
        box = [blob["seen"]]
    dist.broadcast_object_list(box, src=0)
    set_model_state_dict(model, blob["model"], options=FULL_LOAD)
    set_optimizer_state_dict(model, optim, blob["optim"], options=FULL_LOAD)
    return box[0]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(14, 40), nn.LeakyReLU(), nn.Linear(40, 40), nn.LeakyReLU(), nn.Linear(40, 1))
    for i in (0, 2):
        fully_shard(model[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.NAdam(model.parameters(), lr=8e-3, weight_decay=1e-3, decoupled_weight_decay=True)
    for group in optim.param_groups:
        group["peak"] = 8e-3

    g = torch.Generator().manual_seed(9)
    x = torch.randn(N, 14, generator=g)
    y = ((x[:, :5].prod(1) > 0) | (x[:, 6] > 0.8)).float()

    seen = restore(args.resume, model, optim) if args.resume else 0
    source = batches(seen, (x, y), rank, world)
    ticks = saved(
        printed(averaged(training(model, optim, source), world), rank), model, optim, args.out, args.save_every
    )
    for _ in itertools.islice(ticks, args.steps - seen // GLOBAL_BATCH):
        pass
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
