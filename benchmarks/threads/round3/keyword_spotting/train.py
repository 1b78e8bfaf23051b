# Keyword spotting on synthetic one-second "recordings".
# Each keyword is a sequence of three chirps; the network is a strided 1-d CNN over
# the raw waveform. Large batches are split into micro-batches.
import argparse
import math
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

RATE = 1024
KEYWORDS = 6


def recordings(step, count, seed):
    gen = torch.Generator().manual_seed(seed + 7001 * step)
    label = torch.randint(0, KEYWORDS, (count,), generator=gen)
    table = torch.tensor([[60, 120, 60], [120, 60, 120], [180, 180, 60], [60, 60, 180], [180, 120, 90], [90, 180, 180]])
    pitch = table[label].float() * (1 + 0.05 * torch.randn(count, 1, generator=gen))
    t = torch.arange(RATE) / RATE
    segment = (t * 3).long().clamp_max(2)
    freq = pitch[:, segment]
    phase = 2 * math.pi * torch.rand(count, 1, generator=gen)
    loudness = 0.6 + 0.8 * torch.rand(count, 1, generator=gen)
    wave = loudness * torch.sin(2 * math.pi * freq * t + phase)
    return wave + 0.2 * torch.randn(count, RATE, generator=gen), label


class ConvStage(nn.Module):
    def __init__(self, cin, cout, kernel, stride):
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, kernel, stride=stride, padding=kernel // 2)
        self.norm = nn.GroupNorm(1, cout)
        self.mix = nn.Conv1d(cout, cout, 1)

    def forward(self, x):
        x = F.gelu(self.norm(self.conv(x)))
        return x + self.mix(x)


class Spotter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stages = nn.ModuleList(
            [ConvStage(1, width, 31, 4), ConvStage(width, 2 * width, 9, 4), ConvStage(2 * width, 2 * width, 9, 4)]
        )
        self.classify = nn.Linear(2 * width * 4, KEYWORDS)

    def forward(self, wave):
        x = wave.unsqueeze(1)
        for stage in self.stages:
            x = stage(x)
        return self.classify(F.adaptive_avg_pool1d(x, 4).flatten(1))


class Session:
    """One training session: model, optimizer and schedule."""

    def __init__(self, opts, device):
        self.opts, self.device = opts, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(opts.seed)
        self.model = Spotter(opts.width).to(device)
        for stage in self.model.stages:
            fully_shard(stage)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=opts.lr, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=opts.lr, total_steps=opts.updates, pct_start=0.2, cycle_momentum=False
        )

    def micro_batches(self, update):
        wave, label = recordings(update, self.opts.batch, self.opts.seed)
        for w, l in zip(wave.chunk(self.opts.accumulation), label.chunk(self.opts.accumulation)):
            yield w.chunk(self.world)[self.rank].to(self.device), l.chunk(self.world)[self.rank].to(self.device)

    def micro_step(self, wave, label, last):
        self.model.set_requires_gradient_sync(last)
        loss = F.cross_entropy(self.model(wave), label, label_smoothing=0.05)
        loss = loss / self.opts.accumulation
        loss.backward()
        return loss.detach()

    def update(self, index):
        total = torch.zeros((), device=self.device)
        for i, (wave, label) in enumerate(self.micro_batches(index)):
            total += self.micro_step(wave, label, last=i == self.opts.accumulation - 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        dist.all_reduce(total)
        return total.item() / self.world

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        wave, label = recordings(100_000, 128, self.opts.seed)
        wave, label = wave.chunk(self.world)[self.rank], label.chunk(self.world)[self.rank]
        hits = (self.model(wave.to(self.device)).argmax(1) == label.to(self.device)).sum()
        dist.all_reduce(hits)
        return hits.item() / 128


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--updates", type=int, default=25)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--accumulation", type=int, default=4)
    p.add_argument("--width", type=int, default=12)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=41)
    return p.parse_args()


def main():
    opts = options()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    session = Session(opts, device)
    for index in range(opts.updates):
        loss = session.update(index)
        if session.rank == 0:
            print(f"update {index:02d}  loss {loss:.6f}", flush=True)
    score = session.accuracy()
    if session.rank == 0:
        print(f"held-out accuracy {score:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
