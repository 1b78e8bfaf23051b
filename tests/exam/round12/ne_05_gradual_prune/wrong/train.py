#!/usr/bin/env python
# Gradual magnitude pruning of a keyword-spotting classifier during training.
# The sparsity target follows the cubic schedule of Zhu & Gupta; masks are re-drawn every few steps.
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HP = SimpleNamespace(frames=8, mel=8, width=48, depth=2, words=6, batch=32, steps=36, lr=5e-3,
                     prune_from=6, prune_to=26, prune_every=5, sparsity=0.75)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(HP.frames * HP.mel, HP.width)
        self.stack = nn.ModuleList(nn.Linear(HP.width, HP.width) for _ in range(HP.depth))
        self.words = nn.Linear(HP.width, HP.words)
        for layer in self.stack:                       # wide fan: later units start smaller
            layer.weight.data *= torch.linspace(1.6, 0.4, HP.width).unsqueeze(1)

    def forward(self, clip):
        x = torch.relu(self.front(clip.flatten(1)))
        for layer in self.stack:
            x = x + torch.relu(layer(x))
        return self.words(x)


def clips(step):
    g = torch.Generator().manual_seed(60 + step)
    word = torch.randint(0, HP.words, (HP.batch,), generator=g)
    proto = torch.randn(HP.words, HP.frames, HP.mel, generator=torch.Generator().manual_seed(6))
    return proto[word] + 1.2 * torch.randn(HP.batch, HP.frames, HP.mel, generator=g), word


class Pruner:
    def __init__(self, model):
        self.layers = {f"stack.{i}.weight": layer.weight for i, layer in enumerate(model.stack)}
        self.masks = {n: torch.ones_like(w.detach()) for n, w in self.layers.items()}

    def target(self, step):
        done = min(max((step - HP.prune_from) / (HP.prune_to - HP.prune_from), 0.0), 1.0)
        return HP.sparsity * (1 - (1 - done) ** 3)

    @torch.no_grad()
    def update(self, step):
        if HP.prune_from < step <= HP.prune_to and (step - HP.prune_from) % HP.prune_every == 0:
            for name, weight in self.layers.items():
                magnitude = weight.to_local().abs().flatten()
                cut = magnitude.kthvalue(max(1, int(self.target(step) * magnitude.numel()))).values
                self.masks[name].to_local().copy_(weight.to_local().abs() > cut)
        for name, weight in self.layers.items():
            weight.to_local().mul_(self.masks[name].to_local())


def checkpoint(model, optim, pruner, step):
    m, o = get_state_dict(model, optim)
    return {"model": m, "optim": o, "masks": pruner.masks, "step": step}


def main(save_steps, folder, restart):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Spotter()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.stack:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.SGD(model.parameters(), lr=HP.lr * 6, momentum=0.9, nesterov=True)
    pruner = Pruner(model)
    start = 0
    if restart:
        state = checkpoint(model, optim, pruner, 0)
        dcp.load(state, checkpoint_id=f"{restart}/at{max(int(d[2:]) for d in os.listdir(restart))}")
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]
    for step in range(start + 1, HP.steps + 1):
        clip, word = (t.chunk(world)[rank] for t in clips(step))
        loss = nn.functional.cross_entropy(model(clip), word)
        loss.backward()
        optim.step()
        optim.zero_grad()
        pruner.update(step)
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 6 == 0:
            print(f"{step:>3} loss {loss.item() / world:.4f} target sparsity {pruner.target(step):.3f}", flush=True)
        if step in save_steps:
            dcp.save(checkpoint(model, optim, pruner, step), checkpoint_id=f"{folder}/at{step}")
    kept = [m.full_tensor().mean() for m in pruner.masks.values()]
    if rank == 0:
        print("kept", " ".join(f"{k:.3f}" for k in kept))
    dist.destroy_process_group()


if __name__ == "__main__":
    args = dict(a.split("=", 1) for a in sys.argv[1:])
    main([int(s) for s in args.get("save_steps", "").split(",") if s], args.get("folder"), args.get("restart"))
