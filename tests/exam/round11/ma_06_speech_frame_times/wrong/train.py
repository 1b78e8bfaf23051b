"""Frame-wise speech event classifier, bfloat16 compute with float32 master weights."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from data import recordings
from model import FrameClassifier


def shard(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


@torch.no_grad()
def accuracy(model, rank, world):
    feats, times, labels = (t[rank::world] for t in recordings(-1, 64))
    hits = (model(feats, times).argmax(-1) == labels).float().sum()
    dist.all_reduce(hits)
    return hits.item() / (64 * labels.shape[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = shard(FrameClassifier())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    start = 0
    if args.resume:
        start = max(int(name) for name in os.listdir(args.resume))
        m, o = get_state_dict(model, opt)
        dcp.load({"model": m, "opt": o}, checkpoint_id=f"{args.resume}/{start}")
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)

    for step in range(start, args.steps):
        feats, times, labels = (t[rank::world] for t in recordings(step, args.batch))
        loss = F.cross_entropy(model(feats, times).flatten(0, 1), labels.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 2:
            print(f"step {step + 1} loss {shown.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o}, checkpoint_id=f"{args.out}/{step + 1}")

    acc = accuracy(model, rank, world)
    if rank == 0:
        print(f"held-out frame accuracy {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
