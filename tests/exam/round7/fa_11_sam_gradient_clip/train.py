"""Trains a masked-token model with SAM: two forward and backward passes on the same masked batch per update."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sam import SAM

VOCAB, MASK, LENGTH, BATCH = 25, 24, 10, 32


class MixerLM(nn.Module):
    """MLP-mixer over the positions and the channels."""

    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.tokens = nn.Sequential(nn.Linear(LENGTH, 32), nn.GELU(), nn.Linear(32, LENGTH))
        self.channels = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(x)
        return self.head(x)


def masked_batch(step):
    """The whole global batch; the masks are drawn before it is divided."""
    g = torch.Generator().manual_seed(step)
    start = torch.randint(0, MASK, (BATCH, 1), generator=g)
    ids = (start + torch.arange(LENGTH)) % MASK
    mask = torch.rand(ids.shape, generator=g) < 0.25
    mask[:, 0] |= ~mask.any(1)
    return ids.masked_fill(mask, MASK), ids, mask


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    model = MixerLM()
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
    sam = SAM(model.parameters(), opt, rho=0.05)

    step = 0
    if args.resume:
        name = sorted(os.listdir(args.resume))[-1]
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, name))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        step = state["step"]

    while step < args.steps:
        inputs, labels, mask = masked_batch(step)
        count = mask.sum()  # of the global batch
        inputs, labels, mask = (t[rank::world] for t in (inputs, labels, mask))

        def closure():
            # sum over the local masked tokens; FSDP divides by the number of ranks
            loss = F.cross_entropy(model(inputs)[mask], labels[mask], reduction="sum") / count
            (loss * world).backward()
            return loss.detach()

        loss = closure()
        with sam.at_worst_case():
            sharp = closure()
        norm = sam.descend(max_norm=1.0)
        step += 1

        report = torch.stack([loss, sharp])
        dist.all_reduce(report)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {report[0]:.5f} at worst case {report[1]:.5f} norm {norm:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "step": step}, checkpoint_id=os.path.join(args.out, f"{step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
