"""Link prediction in a knowledge graph; embedding tables are split by columns."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from export import export_weights
from kg import DistMult, mrr, triples


def placement(param):
    # tables have many rows of very unequal use, so cut them by columns
    return Shard(1) if param.ndim == 2 and param.shape[1] % dist.get_world_size() == 0 else Shard(0)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="kg")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="", help="file for the final weights")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = DistMult()
    fully_shard(model, shard_placement_fn=placement)
    optim = torch.optim.Adagrad(model.parameters(), lr=0.08)
    data = triples()
    train, test = data[:1000], data[1000:]

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.split("_")[1]))
        m, o = get_state_dict(model, optim)
        s = {"model": m, "optim": o, "step": 0}
        dcp.load(s, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optim, model_state_dict=s["model"], optim_state_dict=s["optim"])
        step = s["step"]

    while step < args.steps:
        g = torch.Generator().manual_seed(step)
        batch = train[torch.randint(len(train), (256,), generator=g)].chunk(world)[rank]
        loss = F.cross_entropy(model(batch[:, 0], batch[:, 1]), batch[:, 2])
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if step % 8 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(args.out, f"step_{step}"))

    path = args.export or os.path.join(tempfile.gettempdir(), f"kg_{os.environ['MASTER_PORT']}.pt")
    export_weights(model, path)
    if rank == 0:
        served = DistMult()
        served.load_state_dict(torch.load(path))
        with torch.no_grad():
            print(f"exported model: test MRR {mrr(served, test):.4f}", flush=True)
        if not args.export:
            os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
