import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lookahead import Lookahead
from net import SmallResNet
from shapes import CLASSES, stripes


def state_of(model, optimizer, schedule, step):
    weights, optim = get_state_dict(model, optimizer.inner)
    return {"weights": weights, "optim": optim, "lookahead": optimizer.extra_state(),
            "schedule": schedule.state_dict(), "step": step}


def load_latest(root, model, optimizer, schedule):
    latest = max(Path(root).glob("it*"), key=lambda p: int(p.name[2:]))
    state = state_of(model, optimizer, schedule, 0)
    dcp.load(state, checkpoint_id=latest)
    set_state_dict(model, optimizer.inner, model_state_dict=state["weights"], optim_state_dict=state["optim"])
    optimizer.load_extra_state(state["lookahead"])
    schedule.load_state_dict(state["schedule"])
    return state["step"]


def accuracy(model, images, labels, rank, world):
    n = len(labels) // world
    mine = slice(rank * n, (rank + 1) * n)
    with torch.no_grad():
        hits = (model(images[mine]).argmax(1) == labels[mine]).sum()
    dist.all_reduce(hits)
    return hits.item() / len(labels)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.08)
    ap.add_argument("--snapshot-every", type=int, default=0)
    ap.add_argument("--snapshots")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = SmallResNet(CLASSES)
    for stage in model.stages:
        fully_shard(stage)
    fully_shard(model)

    inner = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    optimizer = Lookahead(inner, k=6, alpha=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, args.iters)
    images, labels = stripes(512, seed=50)
    test_images, test_labels = stripes(128, seed=51)

    start = load_latest(args.resume, model, optimizer, schedule) if args.resume else 0
    share = args.batch // world
    for it in range(start, args.iters):
        index = torch.randperm(512, generator=torch.Generator().manual_seed(it))[:args.batch]
        index = index[rank * share:(rank + 1) * share]
        loss = F.cross_entropy(model(images[index]), labels[index], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (it + 1) % 8 == 0:
            print(f"iter {it + 1} loss {mean.item():.5f}", flush=True)
        if args.snapshot_every and (it + 1) % args.snapshot_every == 0:
            dcp.save(state_of(model, optimizer, schedule, it + 1), checkpoint_id=Path(args.snapshots) / f"it{it + 1}")

    result = accuracy(model, test_images, test_labels, rank, world)
    if rank == 0:
        print(f"test accuracy {result:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
