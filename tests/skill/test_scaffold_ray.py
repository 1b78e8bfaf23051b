"""launch/ray_train.py reports to Ray what train.py records.

Ray is played by a few functions here; benchmarks/engines.py runs it.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from test_scaffold import DECODER, load
from verified_fsdp2.skill import scaffold
from verified_fsdp2.verifier.guard.settings import Settings, read

TRAIN = """
import json, pathlib
run = pathlib.Path("out/run-001")
with (run / "metrics.jsonl").open("a") as file:
    for step in (3, 4):
        file.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
    file.write(json.dumps({"step": 4, "validation_loss": 0.5}) + "\\n")
for step, sealed in ((4, True), (5, True), (6, False)):
    folder = run / f"checkpoints/step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / ("SHA256SUMS" if sealed else "data")).touch()
"""


class Ray:
    """What the file uses of Ray, in the worker of this rank; `reported` is what rank 0 broadcasts
    to the others.
    """

    def __init__(self, rank: int, reported: list[tuple[int, bool]]) -> None:
        self.rank, self.reported = rank, reported
        self.reports: list[tuple[dict[str, Any], str | None]] = []

    def report(self, metrics: dict[str, Any], checkpoint: str | None) -> None:
        self.reports.append(
            (metrics, checkpoint and Path(checkpoint, "path.txt").read_text().strip())
        )

    def broadcast(self, data: tuple[int, bool]) -> tuple[int, bool]:
        return self.reported.pop(0) if self.rank else data

    def modules(self) -> dict[str, ModuleType]:
        names: dict[str, dict[str, Any]] = {
            "ray": {},
            "ray.train": (
                dict.fromkeys(("FailureConfig", "RunConfig", "ScalingConfig"), object)
                | {"Checkpoint": str, "report": self.report}
                | {"get_context": lambda: SimpleNamespace(get_world_rank=lambda: self.rank)}
            ),
            "ray.train.collective": {"broadcast_from_rank_zero": self.broadcast},
            "ray.train.torch": dict.fromkeys(("TorchConfig", "TorchTrainer"), object),
        }
        found = {name: ModuleType(name) for name in names}
        for name, values in names.items():
            vars(found[name]).update(values)
        vars(found["ray"])["train"] = found["ray.train"]
        return found


def worker(folder: Path, monkeypatch: pytest.MonkeyPatch, ray: Ray, *settings: str) -> Any:
    """The generated file, imported; train.py is a small script, and an earlier start has left two
    steps.
    """
    launch = {"engines": ["ray"], "devices_per_node": 2}
    made = scaffold.render(load(folder, {**DECODER, "launch": launch}, settings))
    text = made["launch/ray_train.py"]
    (folder / "launch").mkdir()
    (folder / "launch" / "generated_ray_train.py").write_text(text)
    (folder / "train.py").write_text(TRAIN)
    (folder / "out" / "run-001").mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2)]
    (folder / "out" / "run-001" / "metrics.jsonl").write_text("".join(lines))
    for name, module in ray.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(folder / "launch"))
    monkeypatch.delitem(sys.modules, "generated_ray_train", raising=False)
    monkeypatch.setenv("RANK", str(ray.rank))
    module = importlib.import_module("generated_ray_train")
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
    return module


def test_metrics_and_complete_checkpoints_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray(0, [])
    worker(tmp_path, monkeypatch, ray).report_while([sys.executable, "train.py"], tmp_path / "out")
    places = [str(tmp_path / f"out/run-001/checkpoints/step_{step:08d}") for step in (4, 5)]
    metrics = [
        {"step": 3, "loss": 1 / 3},
        {"step": 4, "loss": 0.25},
        {"step": 4, "validation_loss": 0.5},
    ]
    assert [one for one in ray.reports if one[1] is None] == [(one, None) for one in metrics]
    assert [one for one in ray.reports if one[1]] == [
        ({"step": 4, "loss": 0.25}, places[0]),
        ({"step": 5}, places[1]),
    ]


def test_of_many_lines_the_last_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray(0, [])
    module = worker(tmp_path, monkeypatch, ray)
    monkeypatch.setattr(module, "MOST_LINES", 2)
    module.report_while([sys.executable, "train.py"], tmp_path / "out")
    assert [metrics.keys() - {"step"} for metrics, place in ray.reports if place is None] == [
        {"loss"},
        {"validation_loss"},
    ]
    assert len([place for _, place in ray.reports if place]) == 2


def test_other_workers_report_as_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(1, [(0, False), (2, False), (3, True)])
    worker(tmp_path, monkeypatch, ray).report_while(
        [sys.executable, "-c", "pass"], tmp_path / "out"
    )
    assert ray.reports == [({}, None)] * 5 and not ray.reported


@pytest.mark.parametrize("given", [None, "off"])
def test_the_guard_of_a_worker_writes_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """What counts is the environment in which the file is started, not that of the worker."""
    monkeypatch.setenv("FSDP2_GUARD", given or "")
    out = tmp_path / "it's a run"
    module = worker(tmp_path, monkeypatch, Ray(0, []), "operation.guard=true")
    monkeypatch.setenv("FSDP2_GUARD", "of the worker")
    keep = "import os, pathlib; pathlib.Path('words').write_text(os.environ['FSDP2_GUARD'])"
    module.report_while([sys.executable, "-c", keep], out)
    words = (tmp_path / "words").read_text()
    assert words == "off" if given else read(words) == Settings(out=f"{out}/guard.jsonl")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    ray = Ray(rank, [(0, True)])
    with pytest.raises(RuntimeError, match=f"rank {rank} ended with status 3"):
        worker(tmp_path, monkeypatch, ray).report_while(
            [sys.executable, "-c", "exit(3)"], tmp_path / "out"
        )


def test_a_line_that_is_being_written_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = worker(tmp_path, monkeypatch, Ray(0, []))
    with (tmp_path / "out" / "run-001" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [json.loads(line)["step"] for line in module.recorded(tmp_path / "out")] == [1, 2]
