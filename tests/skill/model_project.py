"""For the tests of generated models: a project of the spec of a model, and its modules,
imported.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trees import SMALL, write_project

OWN = (
    "distributed",
    "context_parallel",
    "expert_parallel",
    "experts",
    "lora",
    "quantised",
    "model",
    "optim",
    "checkpoint",
    "runs",
    "export",
    "huggingface",
    "generate",
    "corpus",
    "data",
    "loss",
    "starting",
    "muon",
    "average",
    "schedule_free",
    "settings",
    "record",
    "metrics",
    "retention",
    "spikes",
)


def write(folder: Path, model: dict[str, Any], *settings: str) -> Path:
    folder.mkdir(exist_ok=True)
    return write_project(
        folder, {**SMALL, "model": model, "train": {"steps": 20, "global_batch": 8}}, *settings
    )


@contextmanager
def imported(project: Path) -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(project))
        for name in OWN:  # of another test
            sys.modules.pop(name, None)
        try:
            yield {name: __import__(name) for name in OWN if (project / f"{name}.py").exists()}
        finally:
            for name in OWN:
                sys.modules.pop(name, None)


def built(modules: dict[str, ModuleType], seed: int = 0) -> Any:
    """The model, as train.py builds it, on this rank alone."""
    mesh = modules["distributed"].build_mesh(torch.device("cpu"))
    config = [modules["model"].ModelConfig()] if hasattr(modules["model"], "ModelConfig") else []
    return modules["model"].build_model(*config, mesh, torch.device("cpu"), seed)


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()
