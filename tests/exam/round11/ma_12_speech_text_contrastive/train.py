"""Contrastive speech-text training: two sharded towers, a learned temperature and negatives from all ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from gather import GatherRows
from towers import SpeechTower, TextTower

VOCAB, FEATS, WORDS = 20, 8, 5


def pairs(step, batch):
    sound = torch.randn(VOCAB, FEATS, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(50 + step)
    ids = torch.randint(0, VOCAB, (batch, WORDS), generator=g)
    speech = sound[ids.repeat_interleave(3, 1)]
    return speech + 0.3 * torch.randn(speech.shape, generator=g), ids


def contrastive_loss(speech, text, log_scale, rank):
    """Mean over this rank's anchors, in both directions, against the candidates of all ranks."""
    all_speech, all_text = GatherRows.apply(speech), GatherRows.apply(text)
    target = rank * len(speech) + torch.arange(len(speech))
    scale = log_scale.exp()
    a = F.cross_entropy(scale * speech @ all_text.T, target)
    b = F.cross_entropy(scale * text @ all_speech.T, target)
    return (a + b) / 2


class State:
    def __init__(self, lr):
        torch.manual_seed(9)
        self.speech = fully_shard(SpeechTower(FEATS, 24))
        self.text = fully_shard(TextTower(VOCAB, 24))
        # a scalar cannot be sharded, so it is a plain replicated parameter
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.opts = [torch.optim.AdamW(self.speech.parameters(), lr=lr, weight_decay=0.01),
                     torch.optim.Adagrad(self.text.parameters(), lr=3 * lr),
                     torch.optim.SGD([self.log_scale], lr=0.05, momentum=0.5)]
        # the towers warm up one after the other
        self.schedules = [torch.optim.lr_scheduler.LinearLR(self.opts[0], 0.2, 1.0, 6),
                          torch.optim.lr_scheduler.ExponentialLR(self.opts[1], 0.97)]
        self.step = 0

    def parts(self):
        return [self.speech, self.text, *self.opts, *self.schedules]

    def state_dict(self):
        return {"step": self.step, "log_scale": self.log_scale.detach(), "parts": [p.state_dict() for p in self.parts()]}

    def load_state_dict(self, s):
        self.step = s["step"]
        self.log_scale.data.copy_(s["log_scale"])
        for part, sd in zip(self.parts(), s["parts"]):
            part.load_state_dict(sd)


def train_step(st, batch, rank, world):
    speech, ids = batch
    n = len(ids) // world
    mine = slice(rank * n, (rank + 1) * n)
    loss = contrastive_loss(st.speech(speech[mine]), st.text(ids[mine]), st.log_scale, rank)
    loss.backward()
    dist.all_reduce(st.log_scale.grad)
    st.log_scale.grad /= world
    for opt in st.opts:
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        st.log_scale.clamp_(0.0, 4.6)
    for s in st.schedules:
        s.step()
    st.step += 1
    mean = loss.detach() / world
    dist.all_reduce(mean)
    return mean.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="clip")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    st = State(args.lr)
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        st.load_state_dict(torch.load(f"{args.resume}/{newest}/{rank}.pt", weights_only=False))
    while st.step < args.steps:
        loss = train_step(st, pairs(st.step, args.batch), rank, world)
        if rank == 0:
            print(f"step {st.step} loss {loss:.4f} scale {st.log_scale.exp().item():.4f}", flush=True)
        if args.save_every and st.step % args.save_every == 0:
            os.makedirs(f"{args.out}/{st.step}", exist_ok=True)
            torch.save(st.state_dict(), f"{args.out}/{st.step}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
