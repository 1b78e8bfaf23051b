"""Fixtures of the tests of scaffolds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_project import MODULES, Project
from trees import Workshop


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """What `new`, `diff` and `update` work on."""
    return Workshop(tmp_path, monkeypatch)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """The generated data modules, imported."""
    yield Project(tmp_path, monkeypatch)
    for name in MODULES:
        sys.modules.pop(name, None)
