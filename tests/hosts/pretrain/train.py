"""Pretrain a decoder: torchrun --standalone --nproc-per-node 4 train.py --config debug.toml"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lmkit.checkpoint import AppState, Checkpointer, Progress
from lmkit.config import Config, parse
from lmkit.data import IGNORE, Corpus, Loader
from lmkit.data.loader import label_count
from lmkit.metrics import Meter
from lmkit.models import Transformer
from lmkit.models.llama import count
from lmkit.optim import build_optimizer, build_scheduler
from lmkit.parallelize import build_mesh, data_coordinates, parallelize
from torch import Tensor


def start() -> torch.device:
    """Join the other ranks on this rank's own device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, summed over the labels that count."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def train_step(
    model: torch.nn.Module, batches: list[tuple[Tensor, Tensor]], device: torch.device, parts: int
) -> tuple[Tensor, int]:
    """Gradients of the mean over the labels of the whole world; returns that mean and the number of labels."""
    labels_here = torch.tensor(label_count(batches), device=device)
    dist.all_reduce(labels_here)
    total = int(labels_here)
    summed = torch.zeros((), device=device)
    for index, (tokens, labels) in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        loss = token_sum(model(tokens.to(device)), labels.to(device))
        # FSDP averages over the ranks; the mean is over the labels of all of them.
        (loss * parts / total).backward()
        summed += loss.detach()
    dist.all_reduce(summed)
    return summed / total, total


def run(config: Config) -> None:
    """The whole run."""
    device = start()
    mesh = build_mesh(config.parallel, device.type)
    part, parts = data_coordinates(mesh)

    with torch.device("meta"):
        model = Transformer(config.model)
    parallelize(model, mesh, config.parallel)
    model.to_empty(device=device)
    model.init_weights(config.train.seed)
    model.train()

    corpus = Corpus(config.data, config.model.vocabulary)
    loader = Loader(corpus, config.model.context, config.train.global_batch, config.data.seed, part, parts)
    optimizer = build_optimizer(model, config.optim)
    scheduler = build_scheduler(optimizer, config.optim, config.train.steps)
    progress = Progress()
    checkpointer = Checkpointer(config.checkpoint, AppState(model, optimizer, scheduler, loader, progress))
    resumed = checkpointer.load()
    if dist.get_rank() == 0:
        print(f"{count(model)} parameters on {tuple(mesh.shape)}, step {progress.step}, resumed: {resumed}", flush=True)

    meter = Meter(config.metrics)
    while progress.step < config.train.steps:
        batches = loader.step(config.train.micro_batch)
        loss, tokens = train_step(model, batches, device, parts)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.tokens += tokens
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        meter.log(
            progress.step,
            tokens,
            loss=loss.item(),
            grad_norm=norm.item(),
            lr=scheduler.get_last_lr()[0],
            seen=progress.tokens,
        )
        checkpointer.maybe_save(last=progress.step == config.train.steps)
    dist.barrier()


if __name__ == "__main__":
    try:
        run(parse(sys.argv[1:]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
