import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from model import RecurrentLM
from muon import Muon


def tokens(step, size, vocab=24, length=16):
    g = torch.Generator().manual_seed(50_000 + step)
    a, b = torch.randint(vocab, (2, size, 1), generator=g)
    pos = torch.arange(length + 1)
    return torch.where(pos % 2 == 0, (a + pos // 2) % vocab, (b + pos) % vocab)


class Optimizers:
    """Muon for hidden matrices, AdamW for the tied embedding and vectors, stepped and saved as one."""

    def __init__(self, model):
        named = dict(model.named_parameters())
        hidden = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n]
        other = [p for n, p in named.items() if p.ndim != 2 or "embed" in n]
        self.names = {p: n for n, p in named.items()}
        self.parts = [Muon(hidden, lr=0.03), torch.optim.AdamW(other, lr=4e-3, weight_decay=0.0, eps=1e-6)]

    def step(self):
        for o in self.parts:
            o.step()
            o.zero_grad()

    def state(self):
        return {f"{self.names[p]}.{k}": v for o in self.parts for p, s in o.state.items() for k, v in s.items()}

    def prepare(self, model):
        """Make empty state of the right shapes, to be filled by a load."""
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        lrs = [g["lr"] for o in self.parts for g in o.param_groups]
        for o in self.parts:
            for g in o.param_groups:
                g["lr"] = 0.0
        self.step()
        for g, lr in zip((g for o in self.parts for g in o.param_groups), lrs):
            g["lr"] = lr

    def set_lr(self, factor):
        for o in self.parts:
            for g in o.param_groups:
                g.setdefault("base", g["lr"])
                g["lr"] = g["base"] * factor


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    model = RecurrentLM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = Optimizers(model)

    start = 0
    if args.resume:
        start = max(int(d) for d in os.listdir(args.resume))
        optim.prepare(model)
        weights, moments = model.state_dict(), optim.state()
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=os.path.join(args.resume, str(start)))
        model.load_state_dict(weights)

    for step in range(start, args.steps):
        optim.set_lr(min(1.0, 2 * (1 - step / args.steps)))
        seq = tokens(step, args.batch).chunk(world)[rank]
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        loss.backward()
        optim.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 6 == 0:
            print(f"step {step + 1} loss {mean.item():.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save({"weights": model.state_dict(), "moments": optim.state()},
                     checkpoint_id=os.path.join(args.out, str(step + 1)))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
