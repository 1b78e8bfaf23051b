"""DDP in functions: accumulation, tied weights, a scaler, EMA, evaluation and checkpoints on rank 0."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)  # -> BatchNorm
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.norm(x))

    def predict(self, x):
        return self.head(x).argmax(-1)


def setup():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234 + rank)  # -> a seed by rank before the model
    return rank


def evaluate(model, loader):
    total = 0.0
    with torch.inference_mode():  # -> inference_mode
        for x, y in loader:
            total += F.cross_entropy(model(x), y).item()  # -> a forward on some ranks
    return total


def save(model, optimizer, path):
    state = {
        "model": model.module.state_dict(),  # -> .module; model.state_dict()
        "optimizer": optimizer.state_dict(),  # -> optimizer.state_dict()
    }
    torch.save(state, path)  # -> torch.save


def load(model, optimizer, path):
    state = torch.load(path, map_location="cpu", weights_only=True)  # -> torch.load
    model.module.load_state_dict(state["model"])  # -> .module; model.load_state_dict(...)
    optimizer.load_state_dict(state["optimizer"])  # -> optimizer.load_state_dict(...)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    rank = setup()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    model = Net().to(device)
    ema = copy.deepcopy(model)  # -> a copy of the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # -> optimizer before the wrapper
    model = DDP(  # -> DistributedDataParallel
        model,
        find_unused_parameters=False,  # -> DDP find_unused_parameters
        gradient_as_bucket_view=True,  # -> DDP gradient_as_bucket_view
        static_graph=False,  # -> DDP static_graph
    )
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    scaler = torch.amp.GradScaler(device.type, enabled=False)  # -> GradScaler
    if args.resume:
        load(model, optimizer, args.resume)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            last = index % 2 == 1
            if not last:
                with model.no_sync():  # -> with no_sync()
                    scaler.scale(F.cross_entropy(model(x), y) / 2).backward()
                continue
            model.require_backward_grad_sync = last  # -> require_backward_grad_sync
            with torch.autocast(device.type, dtype=torch.bfloat16):  # -> autocast
                loss = F.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # -> the norm that clip_grad_norm_ returns
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            for mine, theirs in zip(ema.parameters(), model.module.parameters(), strict=True):  # -> .module
                mine.data.lerp_(theirs.data, 0.01)
            print(norm.item())
        if rank == 0:
            evaluate(model.module, loader)  # -> .module
            model.module.predict(torch.randn(1, 8))  # -> .module; a method through .module
            if args.out:
                save(model, optimizer, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
