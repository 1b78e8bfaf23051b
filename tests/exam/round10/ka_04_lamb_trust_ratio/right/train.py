"""Masked language model pre-training with LAMB."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lamb import Lamb

VOCAB, MASK, LEN, DIM = 37, 0, 24, 48


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(LEN, DIM) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_batch(step, size):
    g = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCAB - 1, (size, 1), generator=g)
    stride = torch.randint(1, 3, (size, 1), generator=g)
    ids = (start + stride * torch.arange(LEN)) % (VOCAB - 1) + 1
    # exactly six masked places in every sequence
    places = torch.rand(size, LEN, generator=g).argsort(1)[:, :6]
    return ids, places


def lr_at(step, total, peak, warmup=4):
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 - (step - warmup) / (total - warmup))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    model = MaskedLM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    opt = Lamb([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=args.lr)

    first = 0
    if args.resume:
        first = max(int(n.removeprefix("s")) for n in os.listdir(args.resume))
        state = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"s{first}"))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, opt, state["opt"])

    for step in range(first, args.steps):
        for group in opt.param_groups:
            group["lr"] = lr_at(step, args.steps, args.lr)
        ids, places = (t.chunk(world)[rank] for t in make_batch(step, args.batch))
        logits = model(ids.scatter(1, places, MASK))
        picked = logits.gather(1, places[..., None].expand(-1, -1, VOCAB))
        loss = F.cross_entropy(picked.flatten(0, 1), ids.gather(1, places).flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            state = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"s{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
