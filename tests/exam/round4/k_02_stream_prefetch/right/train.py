"""Pre-training from an endless stream (shuffle buffer, packing, background prefetch), FSDP2 + DCP checkpoints."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model import Llamalet
from stream import VOCAB, PackedStream, Prefetcher


def save(folder, step, model, opt, loader):
    path = os.path.join(folder, f"step-{step:05d}")
    model_sd, opt_sd = get_state_dict(model, opt)
    dcp.save({"model": model_sd, "opt": opt_sd}, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({"step": step, "loader": loader.state_dict()}, os.path.join(path, "loop.pt"))
    dist.barrier()


def resume(folder, model, opt, stream):
    done = [d for d in sorted(os.listdir(folder)) if os.path.exists(os.path.join(folder, d, "loop.pt"))]
    path = os.path.join(folder, done[-1])
    model_sd, opt_sd = get_state_dict(model, opt)
    state = {"model": model_sd, "opt": opt_sd}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    loop = torch.load(os.path.join(path, "loop.pt"), weights_only=False)
    stream.load_state_dict(loop["loader"])
    return loop["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--global-batch", type=int, default=8)
    ap.add_argument("--row-len", type=int, default=32)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    per = args.global_batch // world

    torch.manual_seed(11)
    model = Llamalet(VOCAB)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)

    stream = PackedStream(args.global_batch, args.row_len, seed=5)
    first = resume(args.resume, model, opt, stream) if args.resume else 0
    loader = Prefetcher(stream).start()  # every rank runs the same stream and takes its rows

    for step in range(first, args.steps):
        rows = next(loader)[rank * per:(rank + 1) * per]
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"step {step + 1} loss {mean.item():.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
