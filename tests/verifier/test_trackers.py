"""Stand-ins for the packages that record a run."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from verified_fsdp2.verifier.probe.substitutes import trackers

NAMES = ("wandb", "wandb.sdk.lib", "torch.utils.tensorboard")


def asked(*names: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(stand_ins=names))


@pytest.fixture
def meta_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("wandb", "wandb.sdk", *NAMES):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("meta_path")
def test_a_tracker_takes_every_call() -> None:
    trackers.install(asked("wandb", "tensorboard"))
    try:
        modules = [importlib.import_module(name) for name in NAMES]
        assert importlib.util.find_spec("wandb") is not None
        run = modules[0].init(project="one", mode="online")
        run.log({"loss": 1.0}, step=1)
        run.summary.update({})
        run.finish()
        modules[-1].SummaryWriter("folder", purge_step=1).add_scalar("loss", 1.0, 1)
    finally:
        for name in ("wandb", "wandb.sdk", *NAMES):
            sys.modules.pop(name, None)


@pytest.mark.usefixtures("meta_path")
def test_only_what_was_asked_for_is_stood_in_for() -> None:
    before = len(sys.meta_path)
    trackers.install(asked())
    assert len(sys.meta_path) == before
    trackers.install(asked("wandb"))
    assert importlib.util.find_spec("no_such_tracker") is None
    found = importlib.util.find_spec("json")
    assert found is not None and found.origin is not None
