"""Day-ahead forecast of electric load from the hours before (GRU encoder, linear decoder)."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HISTORY, HORIZON = 48, 12
HIDDEN, LAYERS = 24, 2
BATCH, EPOCHS = 32, 5
LR, CLIP, SEED = 4e-3, 1.0, 77


def make_series(hours):
    g = torch.Generator().manual_seed(SEED)
    t = torch.arange(hours, dtype=torch.float32)
    day = torch.sin(2 * math.pi * t / 24) + 0.4 * torch.sin(4 * math.pi * t / 24 + 0.7)
    week = 0.3 * torch.cos(2 * math.pi * t / 168)
    noise = torch.zeros(hours)
    shock = 0.1 * torch.randn(hours, generator=g)
    for i in range(1, hours):
        noise[i] = 0.8 * noise[i - 1] + shock[i]
    return day + week + noise


class Windows(Dataset):
    def __init__(self, series, first, last, stride):
        self.series = series
        self.starts = list(range(first, last - HISTORY - HORIZON, stride))

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        s = self.starts[i]
        window = self.series[s:s + HISTORY + HORIZON]
        return window[:HISTORY].unsqueeze(-1), window[HISTORY:]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.GRU(1 if i == 0 else HIDDEN, HIDDEN, batch_first=True) for i in range(LAYERS)
        )
        self.decoder = nn.Sequential(nn.Linear(HIDDEN, 48), nn.Tanh(), nn.Linear(48, HORIZON))

    def forward(self, x):
        base = x[:, -1, 0]
        for layer in self.layers:
            x, _ = layer(x)
        return base.unsqueeze(-1) + self.decoder(x[:, -1])


class Trainer:
    def __init__(self, model, train, valid, device):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device, self.model, self.valid = device, model, valid
        self.sampler = DistributedSampler(train, self.world, self.rank, seed=SEED, drop_last=True)
        self.loader = DataLoader(train, BATCH // self.world, sampler=self.sampler, drop_last=True)
        self.loss_fn = nn.SmoothL1Loss(beta=0.5)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LR, total_steps=EPOCHS * len(self.loader)
        )

    def average(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        running = torch.zeros((), device=self.device)
        for history, target in self.loader:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(history.to(self.device)), target.to(self.device))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.schedule.step()
            running += loss.detach()
        return self.average(running / len(self.loader))

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = torch.zeros((), device=self.device)
        own = range(self.rank, len(self.valid) // self.world * self.world, self.world)
        batch = [self.valid[i] for i in own]
        history = torch.stack([h for h, _ in batch]).to(self.device)
        target = torch.stack([t for _, t in batch]).to(self.device)
        total += (self.model(history) - target).abs().mean()
        return self.average(total)

    def fit(self):
        for epoch in range(EPOCHS):
            begin = time.perf_counter()
            train_loss = self.train_epoch(epoch)
            mae = self.validate()
            if self.rank == 0:
                took = time.perf_counter() - begin
                print(f"epoch {epoch}: train {train_loss:.5f}, valid MAE {mae:.5f} ({took:.1f} s)", flush=True)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    hours = 24 * 60
    series = make_series(hours)
    train = Windows(series, 0, hours * 3 // 4, stride=3)
    valid = Windows(series, hours * 3 // 4, hours, stride=5)

    torch.manual_seed(SEED)
    model = Forecaster().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    Trainer(model, train, valid, device).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
