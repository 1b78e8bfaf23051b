"""Denoise curves.

torchrun --standalone --nproc-per-node 4 denoise.py train small --into out
torchrun --standalone --nproc-per-node 2 denoise.py sample small --into out --count 4
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from curves.average import Average
from curves.drawing import Numbers, batch, signal
from curves.network import Denoiser
from curves.presets import PRESETS, Preset
from curves.spread import mean_over_data, mesh_of, settle, spread
from curves.store import restore, save
from torch.distributed.device_mesh import DeviceMesh

UNSEEN = 500_000_000


def command_line() -> argparse.Namespace:
    """Two commands with their options."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("--save-every", type=int, default=50)
    train.add_argument("--look-every", type=int, default=4)
    train.add_argument("--pieces", type=int)
    train.add_argument("--continue", dest="go_on", action="store_true")
    draw = commands.add_parser("sample")
    draw.add_argument("--count", type=int, default=2)
    for command in (train, draw):
        command.add_argument("preset", choices=PRESETS)
        command.add_argument("--into", type=Path, required=True)
    return parser.parse_args()


class Workshop:
    """Both networks and the optimizer of this rank."""

    def __init__(self, preset: Preset, device: torch.device) -> None:
        self.preset, self.device = preset, device
        self.mesh: DeviceMesh = mesh_of(dist.get_world_size(), preset.tensor, device.type)
        torch.manual_seed(preset.seed)
        self.network = spread(Denoiser(preset.shape).to(device), self.mesh)
        self.average = Average(preset.shape, self.mesh, device, preset.keep)
        self.average.copy(self.network)
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": preset.decay}, {"params": others, "weight_decay": 0.0}],
            lr=preset.rate,
        )
        self.numbers = Numbers(preset.batch, self.mesh.get_local_rank("data"), self.mesh.size(0))

    def draw(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Noised curves on the device."""
        return batch(numbers, self.preset.seed, self.preset.shape.points, self.preset.noises).to(self.device)

    def step(self, number: int, pieces: int) -> dict[str, float]:
        """One update."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.preset.rate * min(1.0, (number + 1) / self.preset.warmup)
        parts = self.numbers.next(pieces)
        error = torch.zeros((), device=self.device)
        for index, part in enumerate(parts):
            self.network.set_requires_gradient_sync(index == len(parts) - 1)
            points, level, noise = self.draw(part)
            loss = F.mse_loss(self.network(points, level), noise) / len(parts)
            loss.backward()
            error += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.preset.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.follow(self.network)
        return {"error": mean_over_data(error, self.mesh), "norm": float(norm.full_tensor())}

    @torch.no_grad()
    def look(self) -> float:
        """The error of the averaged network on curves that are never trained on."""
        each = 16 // self.mesh.size(0)
        first = UNSEEN + self.mesh.get_local_rank("data") * each
        points, level, noise = self.draw(range(first, first + each))
        error = F.mse_loss(self.average.network(points, level), noise)
        settle(self.average.network)
        return mean_over_data(error, self.mesh)

    @torch.no_grad()
    def sample(self, count: int) -> torch.Tensor:
        """Curves out of noise, from the averaged network, without new noise on the way; alike on every rank."""
        levels = self.preset.noises
        points = torch.randn(count, self.preset.shape.points, 2, generator=torch.Generator().manual_seed(1))
        points = points.to(self.device)
        for level in range(levels - 1, -1, -1):
            now = torch.full((count,), level, device=self.device)
            noise = self.average.network(points, now)
            share, after = signal(now[0], levels), signal(now[0] - 1, levels) if level else torch.ones(())
            clean = (points - (1 - share).sqrt() * noise) / share.sqrt()
            points = after.sqrt() * clean + (1 - after).sqrt() * noise
        settle(self.average.network)
        return points


def train(shop: Workshop, options: argparse.Namespace) -> None:
    """To the preset's last step."""
    number = 0
    if options.go_on:
        number, shop.numbers.drawn = restore(options.into, shop.network, shop.average.network, shop.optimizer)
    while number < shop.preset.steps:
        report = shop.step(number, options.pieces or shop.preset.pieces)
        number += 1
        if number % options.look_every == 0:
            report["unseen"] = shop.look()
        if dist.get_rank() == 0:
            print(f"step {number} " + " ".join(f"{key} {value:.6f}" for key, value in report.items()), flush=True)
        if number % options.save_every == 0 or number == shop.preset.steps:
            save(options.into, shop.network, shop.average.network, shop.optimizer, number, shop.numbers.drawn)


def main() -> None:
    """Join, do what was asked, leave."""
    options = command_line()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    shop = Workshop(PRESETS[options.preset](), device)
    if options.command == "train":
        train(shop, options)
    else:
        restore(options.into, shop.network, shop.average.network, shop.optimizer)
        curves = shop.sample(options.count)
        if dist.get_rank() == 0:
            print(curves.cpu().tolist())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
