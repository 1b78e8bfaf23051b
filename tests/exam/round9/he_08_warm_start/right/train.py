"""Fine-tune a pretrained encoder as a classifier under FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pretrain import encoder, images, pretrain

STEPS, BATCH = 24, 32


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


def build(rank, load_pretrained):
    torch.manual_seed(4)
    model = Classifier()
    if load_pretrained:
        # only rank 0 has the pretrained encoder, the others get it from there
        if rank == 0:
            model.encoder.load_state_dict(pretrain())
        for t in model.encoder.state_dict().values():
            dist.broadcast(t, src=0)
    fully_shard(model.encoder)
    fully_shard(model)
    return model


@torch.no_grad()
def accuracy(model, rank, world):
    x, y = images(256, 5)
    hits = (model(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(hits)
    return hits.item() / 256


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(rank, load_pretrained=not args.resume)
    opt = torch.optim.SGD(
        [{"params": model.encoder.parameters(), "lr": 0.02}, {"params": model.head.parameters(), "lr": 0.2}], momentum=0.9
    )

    first = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        first = state["step"]

    for step in range(first, STEPS):
        x, y = images(BATCH, 10_000 + step)
        loss = F.cross_entropy(model(x[rank::world]), y[rank::world])
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "step": step + 1}, checkpoint_id=os.path.join(args.out, str(step + 1)))

    acc = accuracy(model, rank, world)
    if rank == 0:
        print(f"test accuracy {acc:.3f}", flush=True)
    if args.export:
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
