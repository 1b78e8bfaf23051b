"""For the tests of generated checkpoint modules: a small model, its training state, and runs with
checkpoints of it.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from trees import Generate

SPEC = {
    "version": 1,
    "model": {
        "kind": "import",
        "import": "own:Net",
        "shard": ["Linear"],
        "vocabulary": 8,
        "sequence_length": 8,
    },
    "data": {"kind": "synthetic"},
    "train": {"steps": 20, "global_batch": 4},
    "verify": {"reshard_to": [4]},
}


class Modules:
    """`load(mode, setting, ...)` renders a project and imports its checkpoint.py; the others can be
    imported then.
    """

    def __init__(self, generate: Generate) -> None:
        self.generate = generate

    def load(self, mode: str = "sync", *settings: str) -> ModuleType:
        return self.generate(SPEC, "checkpoint", f"checkpoint.mode={mode}", *settings)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(8, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 8, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def train_state(module: ModuleType, seed: int = 0, lr: float = 0.1) -> Any:
    torch.manual_seed(seed)
    model = fully_shard(Net())
    optimizer = AdamW(model.parameters(), lr=lr)
    state = module.TrainState(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    forward(state)
    update(state)
    return state


def forward(state: Any) -> None:
    state.model(torch.arange(8)).square().sum().backward()


def update(state: Any) -> None:
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.step, state.samples = state.step + 1, state.samples + 4


def held(state: Any) -> dict[str, Any]:
    """All that a checkpoint must bring back, copied."""
    found: dict[str, Any] = {"step": state.step, "samples": state.samples}
    for name, value in state.model.state_dict().items():
        found[name] = getattr(value, "full_tensor", lambda value=value: value)().tolist()
    for number, slot in enumerate(state.optimizer.state.values()):
        found |= {
            f"{number}.{k}": getattr(v, "full_tensor", lambda v=v: v)().tolist()
            for k, v in slot.items()
        }
    found["lr"] = [group["lr"] for group in state.optimizer.param_groups]
    found["schedule"] = state.scheduler.last_epoch
    return found


def started(module: ModuleType, run: Path, keep: int) -> tuple[Any, Any]:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text("{}")
    return train_state(module), module.Checkpointer(run, keep, 0)


def saved(module: ModuleType, run: Path, steps: int, keep: int = 9) -> None:
    state, checkpoints = started(module, run, keep)
    checkpoints.save(state)
    for _ in range(steps - 1):
        forward(state)
        update(state)
        checkpoints.save(state)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(file: Path, place: int = 40) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
