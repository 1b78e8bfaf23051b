"""Masked language model whose training samples are chosen by their own recent loss."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from sampler import LossSampler

VOCAB, LENGTH, N, BATCH, STEPS, MASK = 24, 12, 240, 24, 26, 23


def corpus():
    """Half of the sentences count up, the others follow a quadratic rule that is harder."""
    g = torch.Generator().manual_seed(2)
    first = torch.randint(0, 22, (N, 1), generator=g)
    t = torch.arange(LENGTH)[None]
    easy = (first + t) % 22
    hard = (first + t * t * 3 + first * t) % 22
    ids = torch.where(torch.arange(N)[:, None] % 2 == 0, easy, hard)
    masks = torch.zeros(N, LENGTH, dtype=torch.bool)
    spots = torch.rand(N, LENGTH, generator=g).argsort(1)[:, :3]
    return ids, masks.scatter(1, spots, True)


class MLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(LENGTH, dim)
        self.enc = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True, bias=False) for _ in range(2)
        )
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids, masked):
        x = self.tok(ids.masked_fill(masked, MASK)) + self.pos.weight
        for layer in self.enc:
            x = layer(x)
        logits = self.out(x)
        loss = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (loss * masked).sum(1) / masked.sum(1)  # one loss per sentence


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    ids, masks = corpus()
    torch.manual_seed(19)
    model = MLM()
    for layer in model.enc:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = LossSampler(N, seed=44)

    def snapshot(step):
        return {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, opt),
            "sampler": sampler.state_dict(),
            "step": torch.tensor(step),
        }

    start = 0
    if args.resume:
        newest = max((d for d in os.listdir(args.resume) if d.isdigit()), key=int)
        state = snapshot(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, opt, state["optim"])
        sampler.load_state_dict(state["sampler"])
        start = int(state["step"])

    for step in range(start, STEPS):
        idx, weight = sampler.draw(BATCH, rank, world)
        losses = model(ids[idx], masks[idx])
        # every rank has BATCH / world samples, FSDP averages over the ranks
        loss = (weight * losses).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sampler.update(idx, losses.detach())
        if rank == 0 and step % 5 == 0:
            t = sampler.table
            print(f"step {step} table: easy {t[::2].mean():.4f} hard {t[1::2].mean():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=os.path.join(args.out, str(step + 1)))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
