import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lookahead import Lookahead
from parser_model import TAGS, InvoiceTagger, invoices
from rawstore import RawStore


def get_args():
    ap = argparse.ArgumentParser(description="invoice field tagger, elastic trainer")
    ap.add_argument("--max-steps", type=int, default=33)
    ap.add_argument("--global-batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.25)
    ap.add_argument("--store", default="", help="directory of the raw store")
    ap.add_argument("--every", type=int, default=0)
    ap.add_argument("--rejoin", action="store_true", help="go on from the newest generation of the store")
    return ap.parse_args()


def main():
    a = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(64)
    model = InvoiceTagger()
    mesh = init_device_mesh("cpu", (world,))
    for block in (model.one, model.two):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = Lookahead(model, a.lr)
    store = RawStore(a.store) if a.store else None
    step = 0
    if a.rejoin:
        scalars = store.read_latest(opt.tensors())
        step, opt.count = scalars["step"], scalars["count"]
    while step < a.max_steps:
        tokens, tags = (t.chunk(world)[rank] for t in invoices(step, a.global_batch))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 6 == 0:
            print(f"{step:4d} loss {shown.item() / world:.4f}", flush=True)
        if store and a.every and step % a.every == 0:
            store.write(step, opt.tensors(), {"step": step, "count": opt.count})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
