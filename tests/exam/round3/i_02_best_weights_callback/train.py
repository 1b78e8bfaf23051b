import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from callbacks import EarlyStopping, Exporter, Printer
from trainer import Trainer


def make_data(seed=5):
    """Few and partly mislabelled training samples: the model overfits soon."""
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(20, 4, generator=g)
    x = torch.randn(320, 20, generator=g)
    y = (x @ teacher).argmax(1)
    flip = torch.rand(64, generator=g) < 0.25
    y[:64][flip] = torch.randint(0, 4, (int(flip.sum()),), generator=g)
    return (x[:64], y[:64]), (x[64:], y[64:])


class Net(nn.Module):
    def __init__(self, dim=20, hidden=64, classes=4):
        super().__init__()
        self.inp = nn.Linear(dim, hidden)
        self.mid = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.out = nn.Linear(hidden, classes)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        for layer in self.mid:
            x = x + torch.relu(layer(x))
        return self.out(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--patience", type=int, default=9)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    model = Net()
    for layer in model.mid:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    train, valid = make_data()
    callbacks = [Printer(4), EarlyStopping(args.patience)]
    if args.export:
        callbacks.append(Exporter(args.export))
    Trainer(model, optimizer, train, valid, 16, callbacks).fit(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
