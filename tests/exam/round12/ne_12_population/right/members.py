from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class TabularNet(nn.Module):
    def __init__(self, inputs, width, depth):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.rest = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.rest:
            x = x + torch.tanh(layer(x))
        return self.last(x)


@dataclass
class Member:
    name: str
    model: nn.Module
    optim: torch.optim.Optimizer
    fitness: float = float("inf")
    lineage: list = field(default_factory=list)

    @classmethod
    def create(cls, name, seed, lr, mesh, inputs=8, width=24, depth=2):
        torch.manual_seed(seed)
        net = TabularNet(inputs, width, depth)
        for layer in net.rest:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return cls(name, net, torch.optim.AdamW(net.parameters(), lr=lr, eps=1e-6))

    @property
    def lr(self):
        return self.optim.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value):
        for group in self.optim.param_groups:
            group["lr"] = value

    @torch.no_grad()
    def inherit(self, other):
        """Takes over weights and moments of a fitter member."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters()):
            mine.copy_(theirs)
            for key, value in other.optim.state[theirs].items():
                self.optim.state[mine][key].copy_(value)
        self.lineage.append(other.name)

    def state(self):
        m, o = get_state_dict(self.model, self.optim)
        return {"model": m, "optim": o, "fitness": self.fitness, "lr": self.lr, "lineage": ",".join(self.lineage)}

    def restore(self, state):
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.fitness, self.lr = state["fitness"], state["lr"]
        self.lineage = [n for n in state["lineage"].split(",") if n]
