"""Next-event model trained without an optimizer step in the loop: every parameter is updated inside backward,
as soon as its reduced gradient is there, by an optimizer of its own, and the gradient is freed at once."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS, BATCH, EVENTS, T = 14, 16, 24, 18


class Cell(nn.Module):
    """Minimal gated recurrence."""

    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.zh = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        z, h = self.zh(self.norm(x)).chunk(2, -1)
        z, h = torch.sigmoid(z), torch.tanh(h)
        s, ys = torch.zeros_like(h[:, 0]), []
        for t in range(x.shape[1]):
            s = (1 - z[:, t]) * s + z[:, t] * h[:, t]
            ys.append(s)
        return x + self.out(torch.stack(ys, 1))


class EventModel(nn.Module):
    def __init__(self, d=36):
        super().__init__()
        self.kind = nn.Embedding(EVENTS, d)
        self.gap = nn.Linear(1, d)
        self.cells = nn.ModuleList([Cell(d), Cell(d), Cell(d)])
        self.next_kind = nn.Linear(d, EVENTS, bias=False)
        self.next_gap = nn.Linear(d, 1, bias=False)

    def forward(self, kind, gap):
        h = self.kind(kind) + self.gap(gap)
        for c in self.cells:
            h = c(h)
        return self.next_kind(h), self.next_gap(h)


def events(step):
    g = torch.Generator().manual_seed(step * 7 + 1)
    kind = [torch.randint(0, EVENTS, (BATCH,), generator=g)]
    for _ in range(T):
        jump = torch.rand(BATCH, generator=g) < 0.1
        kind.append(torch.where(jump, torch.randint(0, EVENTS, (BATCH,), generator=g), (kind[-1] * 5 + 3) % EVENTS))
    kind = torch.stack(kind, 1)
    gap = (kind.float() / EVENTS + 0.05 * torch.randn(kind.shape, generator=g)).unsqueeze(-1)
    return kind, gap


def attach(model, lr):
    opts = {}

    def hook(p):
        o = opts[p]
        o.step()
        p.grad = None

    for p in model.parameters():
        opts[p] = torch.optim.AdamW([p], lr=lr, eps=1e-6, foreach=False)
        p.register_post_accumulate_grad_hook(hook)
    return opts


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = EventModel()
    for c in model.cells:
        fully_shard(c)
    fully_shard(model)
    opts = attach(model, 4e-3)
    names = {p: n for n, p in model.named_parameters()}

    step = 0
    if args.resume:
        step = max(int(f.split("_")[1]) for f in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, f"step_{step}_rank_{rank}"), weights_only=False)
        model.load_state_dict(ck["model"])
        for p, o in opts.items():
            o.load_state_dict(ck["opts"][names[p]])

    for step in range(step, STEPS):
        for o in opts.values():
            o.param_groups[0]["lr"] = 4e-3 * (1 - step / STEPS)
        kind, gap = (z.chunk(world)[rank] for z in events(step))
        logits, g = model(kind[:, :-1], gap[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), kind[:, 1:].flatten()) + F.mse_loss(g, gap[:, 1:])
        loss.backward()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "opts": {names[p]: o.state_dict() for p, o in opts.items()}},
                       os.path.join(args.out, f"step_{step + 1}_rank_{rank}"))
            dist.barrier()

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
