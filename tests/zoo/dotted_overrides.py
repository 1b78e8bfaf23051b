"""Settings by dotted overrides (a.b=c) as hydra takes them; the run works in a folder of its own, with relative paths.

args: run.dir={checkpoint} model.width=24 optimizer.lr=0.05
save_args: checkpoint.every=3
resume_args: +checkpoint.resume=true
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEFAULTS = {
    "run": {"dir": ".", "steps": 20, "batch": 32},
    "model": {"width": 16, "depth": 2},
    "optimizer": {"lr": 0.01, "momentum": 0.9},
    "checkpoint": {"every": 0},
}


def compose(overrides):
    config = {group: dict(values) for group, values in DEFAULTS.items()}
    for word in overrides:
        path, _, text = word.partition("=")
        group, _, key = path.lstrip("+").partition(".")
        if key not in config[group] and not path.startswith("+"):
            raise SystemExit(f"no key {path}; add one with +{path}")
        kind = type(config[group].get(key, text))
        config[group][key] = kind(text)
    return config


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


def batch_of(step, size):
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.sin(x.sum(dim=1, keepdim=True))


def app(config):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    run = Path(config["run"]["dir"])
    run.mkdir(parents=True, exist_ok=True)
    os.chdir(run)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    model = Net(config["model"]["width"], config["model"]["depth"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings = config["optimizer"]
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=settings["momentum"])

    done = 0
    if config["checkpoint"].get("resume") == "true":
        complete = Path("saved").glob("step*/.metadata")  # written last
        done = max(int(path.parent.name.removeprefix("step")) for path in complete)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"saved/step{done}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    size = config["run"]["batch"] // world
    for step in range(done, config["run"]["steps"]):
        x, y = batch_of(step, config["run"]["batch"])
        mine = slice(rank * size, (rank + 1) * size)
        loss = F.mse_loss(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        every = config["checkpoint"]["every"]
        if every and (step + 1) % every == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"saved/step{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    app(compose(sys.argv[1:]))
