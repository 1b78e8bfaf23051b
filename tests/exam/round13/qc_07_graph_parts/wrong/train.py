import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from exchange import global_sum
from gcn import GCN
from graph import make_part


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    part = make_part(rank, world)
    n_train, n_test = global_sum(part.train.sum()).item(), global_sum(part.test.sum()).item()
    torch.manual_seed(1)
    model = GCN(width=12, hidden=24, classes=4, depth=3)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    for step in range(step + 1, args.steps + 1):
        scores = model(part.adjacency, part.features)
        own_sum = F.cross_entropy(scores[part.train], part.labels[part.train], reduction="sum")
        # the mean over all labelled nodes; gradients are averaged over the ranks, hence the factor
        (own_sum / n_train * world).backward()
        optim.step()
        optim.zero_grad()
        if step % 5 == 0:
            loss = global_sum(own_sum) / n_train
            right = (scores.argmax(1) == part.labels)[part.test].sum()
            accuracy = global_sum(right) / n_test
            if rank == 0:
                print(f"step {step} loss {loss.item():.6f} test accuracy {accuracy.item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=args.out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description="Node classification on a graph partitioned over the ranks")
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    dist.init_process_group("gloo")
    run(ap.parse_args())
    dist.destroy_process_group()
