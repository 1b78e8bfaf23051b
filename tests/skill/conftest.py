"""Shared by the tests of `new`, `diff` and `update`."""

from __future__ import annotations

from pathlib import Path

import pytest

from trees import Workshop


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)
