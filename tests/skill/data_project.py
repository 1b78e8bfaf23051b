"""For the tests of generated data modules: the project of a small spec, imported."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from verified_fsdp2.skill import scaffold, spec

MODULES = (
    "data",
    "corpus",
    "mixture",
    "prepare",
    "remote",
    "chat",
    "model",
    "images",
    "distributed",
    "settings",
    "loss",
    "muon",
    "average",
    "schedule_free",
    "starting",
)
DECODER = {
    "kind": "decoder",
    "layers": 1,
    "width": 32,
    "heads": 2,
    "vocabulary": 256,
    "sequence_length": 8,
}
IMPORTED = {"kind": "import", "import": "models:build", "shard": ["Block"], "vocabulary": 2}


class SameProcess(contextlib.nullcontext["SameProcess"]):
    """What prepare.py uses of a ProcessPoolExecutor."""

    def __init__(self, *_: object) -> None:
        super().__init__(self)

    def map(self, work: Callable[..., None], jobs: Iterable[object]) -> Iterator[None]:
        return map(work, jobs)


class Project:
    """`load(data)` renders a project with this section `data` and imports its data.py."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.out = folder / "out"
        monkeypatch.syspath_prepend(str(folder / "project"))

    def load(self, data: dict[str, Any], model: dict[str, Any] = DECODER) -> ModuleType:
        path = self.folder / "spec.yaml"
        train = {"steps": 20, "global_batch": 8}
        path.write_text(
            yaml.safe_dump({"version": 1, "model": model, "data": data, "train": train})
        )
        for name, text in scaffold.render(spec.load(path)).items():
            if name.endswith(".py") and "/" not in name:
                (self.folder / "project").mkdir(exist_ok=True)
                (self.folder / "project" / name).write_text(text)
        for name in MODULES:
            self.monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("data")

    def prepare(self) -> ModuleType:
        """Run the generated prepare.py of what `load` has rendered, in this process."""
        prepare = importlib.import_module("prepare")
        self.monkeypatch.setattr(prepare, "ProcessPoolExecutor", SameProcess)
        prepare.prepare(1)
        return prepare

    def rank(self, data: ModuleType, rank: int, world_size: int) -> None:
        """From here on data.py sees this rank."""
        fake = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: world_size)
        self.monkeypatch.setattr(data, "dist", fake)
