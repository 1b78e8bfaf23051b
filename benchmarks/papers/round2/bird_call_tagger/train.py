"""Multi-label tagging of bird calls in short synthetic recordings."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SPECIES, SAMPLES, FRAME = 6, 512, 32


class Patches(nn.Module):
    """Windowed log power spectrum of frames, projected."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("window", torch.hann_window(FRAME), persistent=False)
        self.project = nn.Linear(FRAME // 2 + 1, dim)

    def forward(self, wave):
        frames = wave.unfold(-1, FRAME, FRAME // 2) * self.window
        power = torch.fft.rfft(frames).abs().square()
        return self.project(torch.log(power + 1e-2))


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.over_time = nn.Sequential(nn.Linear(tokens, tokens), nn.GELU(), nn.Linear(tokens, tokens))
        self.over_dim = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.over_time(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_dim(self.norm2(x))


class Tagger(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        tokens = (SAMPLES - FRAME) // (FRAME // 2) + 1
        self.patches = Patches(dim)
        self.blocks = nn.ModuleList(MixerBlock(tokens, dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, SPECIES)

    def forward(self, wave):
        x = self.patches(wave)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).amax(1))


def recordings(count, seed):
    """Each species has a carrier and a trill; one to three of them call in a recording."""
    g = torch.Generator().manual_seed(seed)
    present = torch.rand(count, SPECIES, generator=g) < 0.3
    t = torch.arange(SAMPLES) / SAMPLES
    wave = 0.3 * torch.randn(count, SAMPLES, generator=g)
    for s in range(SPECIES):
        start = torch.rand(count, 1, generator=g) * 0.6
        envelope = ((t > start) & (t < start + 0.4)).float()
        pitch = 2 * math.pi * (30 + 34 * s) * t + 2 * torch.sin(2 * math.pi * (4 + s) * t)
        phase = 2 * math.pi * torch.rand(count, 1, generator=g)
        wave += present[:, s:s + 1] * envelope * torch.sin(pitch + phase)
    return wave, present.float()


class Engine:
    """Holds what belongs to a distributed run."""

    def __init__(self):
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.mesh = init_device_mesh(self.device.type, (self.world,))

    def shard(self, model):
        model.to(self.device)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    def rows(self, batch):
        n = batch // self.world
        return slice(self.rank * n, (self.rank + 1) * n)

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def print(self, text):
        if self.rank == 0:
            print(text, flush=True)


def decay_groups(model, weight_decay):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--weight-decay", type=float, default=0.05)
    args = p.parse_args()

    engine = Engine()
    torch.manual_seed(44)
    model = Tagger(args.dim, args.layers)
    model = engine.shard(model)
    opt = torch.optim.AdamW(decay_groups(model, args.weight_decay), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps)

    wave, tags = (t.to(engine.device) for t in recordings(256, 1))
    valid_wave, valid_tags = (t.to(engine.device) for t in recordings(64, 2))
    own = engine.rows(args.batch)
    for step in range(1, args.steps + 1):
        pick = torch.randint(0, len(wave), (args.batch,), generator=torch.Generator().manual_seed(step))[own]
        logits = model(wave[pick.to(engine.device)])
        loss = F.binary_cross_entropy_with_logits(logits, tags[pick.to(engine.device)])
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 12 == 0:
            part = engine.rows(len(valid_wave))
            with torch.no_grad():
                logits = model(valid_wave[part])
            valid = engine.mean(F.binary_cross_entropy_with_logits(logits, valid_tags[part]))
            hit = engine.mean(((logits > 0) == (valid_tags[part] > 0.5)).float().mean())
            shown = engine.mean(loss)
            engine.print(f"step {step:3d} loss {shown:.5f} valid {valid:.5f} tags right {hit:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
