"""Signals in classes: the head alone first, then the backbone too, with a lower learning rate."""
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

CLASSES, LENGTH = 6, 32


class Backbone(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 5, padding=2)
        self.second = nn.Conv1d(channels, channels, 5, padding=2, stride=2)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        x = F.gelu(self.first(x))
        return self.norm(F.gelu(self.second(x))).mean(2)


class Classifier(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.backbone = Backbone(channels)
        self.head = nn.Sequential(nn.Linear(channels, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, x):
        return self.head(self.backbone(x))


def signals(step, rows):
    g = torch.Generator().manual_seed(600 + step)
    kind = torch.randint(CLASSES, (rows,), generator=g)
    phase = 2 * torch.pi * torch.rand(rows, 1, generator=g)
    wave = torch.sin((kind.unsqueeze(1) + 1) * torch.arange(LENGTH) * 0.35 + phase)
    return (wave + 0.3 * torch.randn(rows, LENGTH, generator=g)).unsqueeze(1), kind


def freeze(model, frozen):
    for p in model.backbone.parameters():
        p.requires_grad_(not frozen)


def export(model, path, rank):
    """The head alone, whole, for the service that has a backbone already."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if rank == 0:
        head = {name: w for name, w in weights.items() if name.startswith("head.")}
        torch.save(head, path)


def arguments():
    ap = ArgumentParser()
    ap.add_argument("--steps", type=int, default=70)
    ap.add_argument("--batch", type=int, default=36)
    ap.add_argument("--head-steps", type=int, default=38)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--smooth", type=float, default=0.0)
    ap.add_argument("--export")
    return ap.parse_args()


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = Classifier()
    fully_shard(model.backbone)
    fully_shard(model)
    freeze(model, True)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=args.lr, momentum=0.9)
    for step in range(args.steps):
        if step == args.head_steps:
            freeze(model, False)
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": args.lr / 3})
        x, kind = (t[rank::world] for t in signals(step, args.batch))
        loss = F.cross_entropy(model(x), kind, label_smoothing=args.smooth)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / world:.5f}", flush=True)
    if args.export:
        export(model, args.export, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
