import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import store
from model import Tagger
from stream import Pipeline


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(77)
    model = Tagger()
    fully_shard(model.emb, mesh=mesh)
    fully_shard(model.rnn, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.RMSprop(model.parameters(), lr=args.lr, alpha=0.95, eps=1e-4, momentum=0.5)
    pipeline = Pipeline(args.batch, rank, world)

    done = store.read(args.resume, model, optim, pipeline) if args.resume else 0
    for step, (ids, label) in enumerate(pipeline, done + 1):
        if step > args.steps:
            break
        loss = F.cross_entropy(model(ids), label)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step:3d} length {ids.shape[1]:2d} loss {shown.item() / world:.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            store.write(args.out, step, model, optim, pipeline)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
