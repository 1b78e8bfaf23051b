"""Fixtures of the tests of scaffolds."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoint_project import Modules
from data_project import MODULES, Project
from trees import Workshop


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workshop:
    """What `new`, `diff` and `update` work on."""
    return Workshop(tmp_path, monkeypatch, capsys)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    yield Project(tmp_path, monkeypatch)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    found = Modules(tmp_path, monkeypatch)
    yield found
    found.forget()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
