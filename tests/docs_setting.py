"""The setting in which the code blocks of the documents are run: gloo, a decoder with two blocks.

`python docs_setting.py FOLDER` runs every NAME.N.py there on N ranks, each in its own namespace,
and prints as JSON {"failed": {NAME: error}, "raised": {NAME: message}}. A block with a comment `#
raises ErrorName` must raise that error.
"""

# ruff: noqa: F401, F811  # what is imported here is there for the blocks

import copy
import json
import os
import re
import runpy
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from zlib import crc32

import torch

# once, before the ranks are forked: blocks that compile would import it on each
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DistributedSampler

VOCABULARY, WIDTH, LENGTH = 16, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("rope", torch.linspace(0, 1, WIDTH), persistent=False)

    def init_weights(self) -> None:
        for _, param in self.named_parameters():
            nn.init.normal_(param, std=0.1)

    def init_buffers(self) -> None:
        self.rope.copy_(torch.linspace(0, 1, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.rope
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.layer(noisy + time[:, None].to(noisy.dtype))


def shard(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """The loss on samples that are the same on every rank."""
    return loss_of(model, torch.arange(4 * LENGTH).view(4, LENGTH) % VOCABULARY).item()


def setting(path: Path, block: str) -> dict[str, object]:
    """New names for one block: the model is sharded unless the block shards it, and has gradients
    after one step.
    """
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dataset = torch.randint(0, VOCABULARY, (64, LENGTH))
    batch = dataset[4 * rank : 4 * rank + 4]
    model = Decoder()
    optimizer = loss = None
    if "fully_shard(" not in block and "shard(model" not in block:
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        loss = loss.detach()
    path.mkdir(exist_ok=True)
    names: dict[str, object] = {
        **globals(),
        "model": model,
        "optimizer": optimizer,
        "average": {
            name: tensor.detach().clone() for name, tensor in model.state_dict().items()
        },  # of the weights
        "teacher": shard(Decoder().requires_grad_(False)),  # of the same parameters
        "student": shard(Decoder()),
        "layers_of": get_model_state_dict,
        "init_weights": lambda module: (
            nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None
        ),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer) if optimizer else None,
        "mesh": init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp_replicate", "dp_shard")),
        "device": torch.device("cpu"),
        "rank": rank,
        "world": ranks,  # how many ranks there are
        "world_size": ranks,
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(
            batch, batch_size=2
        ),  # this rank's samples, for loss_of
        "batch": batch[:, :-1],
        "micros": list(batch.split(2)),
        "accumulation_steps": 2,
        "batch_size": 4,
        "sequence_length": LENGTH,
        "vocabulary": VOCABULARY,
        "step": 0,
        "steps": 2,  # that a loop makes
        "epoch": 0,  # the current one
        "loss": loss,  # of this rank in the last step, without its graph
        "best_loss": float("inf"),  # of an evaluation, so far
        "seed": 0,
        "samples_seen": 64,
        "max_norm": 1.0,
        "path": str(path),
        "model_state": {},
        "optimizer_state": {},
        "denoiser": Denoiser(),
        "noisy": torch.randn(4, WIDTH),
        "inputs": torch.randn(4, WIDTH),
        "words": ["one", "two", "one", "three"],
        "image": torch.randn(4, WIDTH),
        "text": torch.randn(4, WIDTH),
        "logits": torch.randn(8, VOCABULARY, requires_grad=True),
        "targets": torch.randint(0, VOCABULARY, (8,)),
    }
    if optimizer is not None:
        names["model_state"], names["optimizer_state"] = get_state_dict(model, optimizer)
        if "dcp.load(" in block and "dcp.save(" not in block:
            saved = {"model": names["model_state"], "optimizer": names["optimizer_state"]}
            if "optimizer.state_dict()" in block:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if "full_state_dict" in block:
                saved = {
                    "model": get_model_state_dict(
                        model, options=StateDictOptions(full_state_dict=True)
                    )
                }
            dcp.save(saved, checkpoint_id=path)
    if "loss_of(" in block:
        names["batch"] = batch
    if "torch.save(" in block:
        names["path"] = str(path / "state.pt")
    return names


def run_block(file: Path, outcome: dict[str, dict[str, str]]) -> None:
    """Run one block, and add to `outcome` what went wrong, or the message of the error that it has
    to raise.
    """
    block = file.read_text(encoding="utf-8")
    name = file.name.split(".")[0]
    expected = re.search(r"# raises (\w+)", block)
    try:
        runpy.run_path(str(file), init_globals=setting(file.with_suffix(".files"), block))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if expected and expected[1] == type(error).__name__:
            outcome["raised"][name] = message
        else:
            outcome["failed"][name] = message[:400]
    else:
        if expected:
            outcome["failed"][name] = "ran to its end"


def rank_main(rank: int, ranks: int, files: list[Path], folder: Path) -> None:
    """All blocks for this number of ranks, one after the other; ends the process."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.FileStore(str(folder / f"store{ranks}"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )
    warnings.simplefilter("ignore")
    outcome: dict[str, dict[str, str]] = {"failed": {"setting": "a rank ended early"}, "raised": {}}
    result = folder / f"outcome.{ranks}.{rank}.json"
    for file in files:
        outcome["failed"]["setting"] = f"a rank ended in {file.name}"
        result.write_text(json.dumps(outcome), encoding="utf-8")
        run_block(file, outcome)
        dist.barrier()
    del outcome["failed"]["setting"]
    result.write_text(json.dumps(outcome), encoding="utf-8")
    dist.destroy_process_group()
    os._exit(0)


def main(folder: Path) -> None:
    by_ranks: dict[int, list[Path]] = {}
    for file in sorted(folder.glob("*.py")):
        by_ranks.setdefault(int(file.name.split(".")[1]), []).append(file)
    for ranks, files in sorted(by_ranks.items()):
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                rank_main(rank, ranks, files, folder)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    merged: dict[str, dict[str, str]] = {"failed": {}, "raised": {}}
    for result in sorted(folder.glob("outcome.*.json")):
        for kind, messages in json.loads(result.read_text(encoding="utf-8")).items():
            merged[kind].update(
                {name: text for name, text in messages.items() if name not in merged[kind]}
            )
    print(json.dumps(merged))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
