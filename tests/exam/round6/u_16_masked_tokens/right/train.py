"""Masked image modelling with a batch that grows. The number of hidden patches differs from image to image and a
rank may get more pictures than another; each step accumulates as many micro-batches as the batch needs."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from objective import hidden_total, partial_loss

STEPS, MICRO = 16, 10
PATCHES, PIXELS = 12, 9


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Linear(PATCHES, PATCHES)
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.n2(x))


class Inpainter(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.inp = nn.Linear(PIXELS, dim)
        self.hole = nn.Parameter(torch.zeros(dim))
        self.layers = nn.ModuleList(Mixer(dim) for _ in range(2))
        self.out = nn.Linear(dim, PIXELS)

    def forward(self, x, mask):
        h = torch.where(mask[..., None] > 0, self.hole, self.inp(x))
        for layer in self.layers:
            h = layer(h)
        return 1.2 * torch.tanh(self.out(h))


def strips(n, gen):
    t = torch.arange(PATCHES * PIXELS) * 0.15
    f = 0.5 + torch.rand(n, 1, generator=gen)
    x = torch.sin(f * t + 6.28 * torch.rand(n, 1, generator=gen)).view(n, PATCHES, PIXELS)
    rate = 0.2 + 0.6 * torch.rand(n, 1, generator=gen)
    return x, (torch.rand(n, PATCHES, generator=gen) < rate).float()


def micro_batches_at(step):
    return 1 + step // 5


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Inpainter()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(6)
    state = {"step": 0}
    if args.resume:
        m, o = get_state_dict(model, opt)
        sd = {"m": m, "o": o, "gen": gen.get_state(), "step": 0}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)
        gen.set_state(sd["gen"])
        state["step"] = sd["step"]

    while state["step"] < STEPS:
        step = state["step"]
        micro = [strips(MICRO, gen) for _ in range(micro_batches_at(step))]
        micro = [tuple(t.tensor_split(world)[rank] for t in pair) for pair in micro]
        total = hidden_total([mask for _, mask in micro])
        shown = torch.zeros(())
        opt.zero_grad()
        for i, (x, mask) in enumerate(micro):
            model.set_requires_gradient_sync(i + 1 == len(micro))
            loss = partial_loss(model(x, mask), x, mask, total, world)
            loss.backward()
            shown += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        dist.all_reduce(shown)
        state["step"] += 1
        if rank == 0:
            print(f"step {state['step']} hidden {int(total)} loss {shown.item() / world:.5f}", flush=True)
        if args.out and args.save_every and state["step"] % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o, "gen": gen.get_state(), "step": state["step"]},
                     checkpoint_id=os.path.join(args.out, f"{state['step']:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
