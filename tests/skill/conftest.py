"""Fixtures of the tests of scaffolds."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint_project import Modules
from data_project import MODULES, Project
from scripts import Command
from trees import Generate, Patch, Workshop, write_project


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: Patch, command: Command) -> Workshop:
    """What `new`, `diff` and `update` work on."""
    return Workshop(tmp_path, monkeypatch, command)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: Patch) -> Iterator[Project]:
    yield Project(tmp_path, monkeypatch)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: Patch) -> Iterator[Generate]:
    """generate(spec, name, *settings) -> this module of the project of the spec; the others can be
    imported then.
    """

    def imported(written: dict[str, Any], name: str, *settings: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(write_project(tmp_path, written, *settings)))
        return importlib.import_module(name)

    yield imported
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.fixture
def modules(generate: Generate) -> Modules:
    return Modules(generate)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
