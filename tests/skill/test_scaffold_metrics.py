"""The generated metrics.py, flops.py and profiling.py: imported, and once launched on two
ranks.
"""

import io
import json
import math
import re
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from records import Capsys, Patch, cases
from scripts import TORCHRUN, python
from trees import SMALL, Generate, write_project

Clock = SimpleNamespace
SPEC = {
    **SMALL,
    "name": "sample",
    "train": {"steps": 40, "global_batch": 8},
    "verify": {"reshard_to": []},
}


@pytest.fixture
def load(generate: Generate, monkeypatch: Patch) -> Generate:
    """Imports a generated module of the spec with these settings, as on the only rank."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op=None: None)
    return partial(generate, SPEC)


@pytest.fixture
def clock(monkeypatch: Patch) -> Clock:
    """Seconds that pass only when a test says so."""
    fixed = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: fixed.now)
    return fixed


class Scalar:
    """Stands in for a tensor on a device: to read it means to wait for the device."""

    reads = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        Scalar.reads += 1
        return self.value


def train(metrics: Any, steps: range, clock: Clock | None = None) -> None:
    """Each step has 10 tokens and takes 2 seconds; between them lies a validation of 50."""
    for step in steps:
        metrics.step_begins()
        if clock:
            clock.now += 2.0
        metrics.train_step(step, 0.1, Scalar(1 / (3 * step)), 10, Scalar(step))
        if clock:
            clock.now += 50.0


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_lines_are_whole_not_rounded_and_appended(
    load: Generate, tmp_path: Path, capsys: Any
) -> None:
    module = load("metrics")
    train(module.Metrics(tmp_path, 0, 9), range(1, 3))
    again = module.Metrics(tmp_path, 2, 9)
    train(again, range(3, 4))
    again.write(3, {"validation_loss": 2 / 7})
    found = records(tmp_path)
    assert [record["step"] for record in found] == [1, 2, 3, 3]
    assert [record.get("loss") for record in found] == [1 / 3, 1 / 6, 1 / 9, None]
    assert abs(found[-1].pop("time") - time.time()) < 60
    assert found[-1] == {"step": 3, "validation_loss": 2 / 7}
    assert found[0]["grad_norm"] == 1 and found[0]["lr"] == 0.1 and found[0]["peak_memory_mib"] > 10
    shown = capsys.readouterr().out.splitlines()
    assert (
        shown[0].startswith("step      1  loss 0.3333  norm 1.0000  lr 1.00e-01")
        and len(shown) == 4
    )
    assert re.fullmatch(r"step      3  validation loss 0.2857  \d\d:\d\d:\d\d", shown[3])


@cases("interval, step, seen", (1, 4, 40), (3, 7, 70), (3, 4, 40), (1, 0, 0))
def test_tokens_seen_are_those_up_to_the_checkpoint(
    load: Generate, tmp_path: Path, interval: int, step: int, seen: int
) -> None:
    """Those after the last line too."""
    module, more = load("metrics", f"train.log_interval={interval}"), [interval] * (interval > 1)
    train(module.Metrics(tmp_path, 0, 9, *more), range(1, 8))
    assert module.Metrics(tmp_path, step, 9, *more).seen == seen


@cases("interval, rates", (3, [5.0] * 3), (1, [None, *[5.0] * 8]))
def test_throughput_counts_steps_alone(
    load: Generate, tmp_path: Path, clock: Clock, interval: int, rates: list[float | None]
) -> None:
    """Not the first of a start, not what lies between them."""
    module = load("metrics", f"train.log_interval={interval}")
    train(module.Metrics(tmp_path, 0, 9, *[interval] * (interval > 1)), range(1, 10), clock)
    assert [record.get("tokens_per_second") for record in records(tmp_path)] == rates


def test_nothing_waits_for_the_device_between_two_lines(
    load: Generate, tmp_path: Path, monkeypatch: Patch
) -> None:
    module = load(
        "metrics", "train.log_interval=4", "operation.tensorboard=true", "operation.mfu=true"
    )
    monkeypatch.setattr(Scalar, "reads", 0)
    train(module.Metrics(tmp_path, 0, 40, 4, 1.0), range(1, 8))
    assert Scalar.reads == 2  # loss and norm of step 4
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    train(module.Metrics(tmp_path, 0, 40, 4, 1.0), range(1, 8))
    assert Scalar.reads == 2 and len(records(tmp_path)) == 1


@cases("interval", 1, 3)
def test_each_device_and_the_retries_of_its_allocator(
    load: Generate, tmp_path: Path, clock: Clock, monkeypatch: Patch, interval: int
) -> None:
    """Projects that are launched on GPUs have them; where nothing was tried again, no line says
    so.
    """
    module = load("metrics", "launch.engines=[torchrun]", f"train.log_interval={interval}")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    counts = iter([0.0, 3.0, 0.0] * 3)
    monkeypatch.setattr(module, "allocator_retries", lambda: next(counts))
    train(module.Metrics(tmp_path, 0, 9, *[interval] * (interval > 1)), range(1, 10), clock)
    found = records(tmp_path)
    assert [record.get("alloc_retries") for record in found[:3]] == [None, 3.0, None]
    assert found[1]["tokens_per_second_per_device"] == 5.0 / 4 and found[1]["step_seconds"] == 2.0


def test_retries_are_counted_anew_and_so_is_the_peak(load: Generate, monkeypatch: Patch) -> None:
    module, calls = load("devices", "launch.engines=[torchrun]"), list[str]()
    assert (module.allocator_retries(), module.device_name(torch.device("cpu"))) == (0.0, "cpu")
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda value, device: tensor(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 2})
    for name in ("reset_accumulated_memory_stats", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    assert module.allocator_retries() == 2.0
    assert calls == ["reset_accumulated_memory_stats", "reset_peak_memory_stats"]


def test_what_is_not_finite_is_null(load: Generate, tmp_path: Path, capsys: Any) -> None:
    metrics = load("metrics").Metrics(tmp_path, 0, 9)
    metrics.train_step(1, 0.1, Scalar(math.nan), 10, Scalar(math.inf))
    assert records(tmp_path)[0]["loss"] is None and records(tmp_path)[0]["grad_norm"] is None
    assert "loss nan  norm inf" in capsys.readouterr().out


@cases(
    "settings, present, said",
    (["tensorboard"], [], "a package is missing: pip install tensorboard"),
    (
        ["tensorboard", "wandb", "progress"],
        ["tqdm"],
        "packages are missing: pip install tensorboard wandb",
    ),
)
def test_a_missing_package_is_said_with_its_fix(
    load: Generate, monkeypatch: Patch, settings: list[str], present: list[str], said: str
) -> None:
    module = load("metrics", *(f"operation.{setting}=true" for setting in settings))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in present else None)
    with pytest.raises(module.SetupError) as caught:
        module.check_packages()
    assert str(caught.value) == said


def test_tensorboard_has_each_step_once_after_a_resume(load: Generate, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = load("metrics", "operation.tensorboard=true")
    train(module.Metrics(tmp_path, 0, 8), range(1, 7))  # is killed, so not closed
    resumed = module.Metrics(tmp_path, 4, 8)
    train(resumed, range(5, 9))
    resumed.write(8, {"validation_loss": 0.25})
    resumed.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    scalars = board.Scalars("loss")
    assert [scalar.step for scalar in scalars] == list(range(1, 9))
    assert [scalar.value for scalar in scalars] == pytest.approx(
        [1 / (3 * step) for step in range(1, 9)]
    )
    assert [scalar.step for scalar in board.Scalars("validation_loss")] == [8]


class FakeRun:
    """Keeps what W&B is given; benchmarks/operation.py runs the real package."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.logged, self.finished = settings, [], False
        self.id = settings["id"] or "k3f9"
        started = len(list(settings["dir"].glob("wandb/*")))
        kind = "offline-run" if settings["mode"] == "offline" else "run"
        (settings["dir"] / "wandb" / f"{kind}-2026_{started}-{self.id}").mkdir(parents=True)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, dict(values)))

    def finish(self) -> None:
        self.finished = True


def test_calls_of_wandb_after_a_resume(load: Generate, tmp_path: Path, monkeypatch: Patch) -> None:
    """Only the shape of the calls: the package is a fake."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=FakeRun))
    module = load("metrics", "operation.wandb=true")
    first = module.Metrics(tmp_path, 0, 9)
    train(first, range(1, 4))
    again = module.Metrics(tmp_path, 2, 9)
    train(again, range(4, 6))
    again.close()
    settings = again.wandb.settings
    assert (settings["mode"], settings["project"], settings["name"]) == (
        "offline",
        "sample",
        tmp_path.name,
    )
    assert settings["config"]["train"]["steps"] == 40
    assert first.wandb.settings["id"] is None and settings["id"] == first.wandb.id
    assert [step for step, _ in first.wandb.logged] == [1, 2, 3]
    assert [step for step, _ in again.wandb.logged] == [1, 2, 3, 4, 5]
    assert again.wandb.logged[0][1]["loss"] == 1 / 3 and "step" not in again.wandb.logged[0][1]
    assert again.wandb.finished


def test_calls_of_wandb_online(load: Generate, tmp_path: Path, monkeypatch: Patch) -> None:
    """A resumed run has the id of the first, and sends its own steps only."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=FakeRun))
    module = load("metrics", "operation.wandb=online")
    first = module.Metrics(tmp_path, 0, 9)
    train(first, range(1, 4))
    again = module.Metrics(tmp_path, 2, 9)
    train(again, range(4, 6))
    again.close()
    assert [run.wandb.settings["mode"] for run in (first, again)] == ["online", "online"]
    assert (
        again.wandb.settings["id"] == first.wandb.id and again.wandb.settings["resume"] == "allow"
    )
    assert [step for step, _ in again.wandb.logged] == [4, 5] and again.wandb.finished


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_and_lines_elsewhere(
    load: Generate, tmp_path: Path, monkeypatch: Patch
) -> None:
    module = load("metrics", "operation.progress=true")
    out, errors = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    metrics = module.Metrics(tmp_path, 2, 5)
    train(metrics, range(3, 5))
    metrics.write(4, {"validation_loss": 0.25})
    metrics.bar.refresh()
    metrics.close()
    assert "4/5" in errors.getvalue()
    shown = out.getvalue().splitlines()
    assert [line[:24] for line in shown[:2]] == [
        "step      3  loss 0.1111",
        "step      4  loss 0.0833",
    ]
    assert shown[-1].startswith("step      4  validation loss 0.2500  ")
    monkeypatch.setattr(sys, "stdout", lines := io.StringIO())
    metrics = module.Metrics(tmp_path, 4, 5)
    train(metrics, range(5, 6))
    metrics.close()
    assert metrics.bar is None and lines.getvalue().startswith("step      5  loss")


@pytest.mark.parametrize("tied", ["true", "false"])
def test_flops_are_what_torch_counts(load: Generate, tied: str) -> None:
    """But for the norms, whose weights the formula counts as if they multiplied matrices."""
    flops = load("flops", "operation.mfu=true", f"model.tied_embeddings={tied}", "model.kv_heads=1")
    from model import Decoder, ModelConfig  # type: ignore[import-not-found]

    with torch.device("meta"):
        model = Decoder(ModelConfig())
        tokens = torch.zeros(3, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    norms = sum(param.numel() for param in model.parameters() if param.ndim == 1)
    assert flops.flops_per_sample(model) - 6 * 16 * norms == counter.get_total_flops() / 3


@cases(
    "name, dtype, peak",
    ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
    ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
    ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
    ("NVIDIA H100 PCIe", "bfloat16", 756),
    ("NVIDIA H200", "bfloat16", 989),
    ("NVIDIA GB200", "bfloat16", 2500),
    ("NVIDIA B200", "float32", 75),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
    ("NVIDIA H200 NVL", "bfloat16", None),
    ("NVIDIA H100 PCIe", "float32", None),
    ("NVIDIA H20", "bfloat16", None),
    ("a CPU", "bfloat16", None),
)
def test_peak_of_a_device(load: Generate, name: str, dtype: str, peak: float | None) -> None:
    flops = load("flops", "operation.mfu=true", f"precision.param_dtype={dtype}")
    assert flops.peak_tflops(name) == peak


@cases("interval", 1, 2)
def test_without_a_peak_a_run_goes_on_without_mfu(
    load: Generate, tmp_path: Path, capsys: pytest.CaptureFixture[str], interval: int
) -> None:
    settings = ["operation.mfu=true", f"train.log_interval={interval}"]
    ideal = load("flops", *settings).ideal_seconds(None, 8)
    (line,) = capsys.readouterr().out.splitlines()
    assert "the peak of a CPU is unknown: set operation.peak_tflops" in line
    module = __import__("metrics")
    train(module.Metrics(tmp_path, 0, 6, *[interval] * (interval > 1), ideal), range(1, 7))
    found = records(tmp_path)
    assert "tokens_per_second" in found[-1]
    assert not any("mfu" in record for record in found)
    assert "MFU" not in capsys.readouterr().out


def test_mfu_is_the_ideal_time_of_a_step_over_its_own(
    load: Generate, tmp_path: Path, clock: Clock
) -> None:
    settings = ["operation.mfu=true", "operation.peak_tflops=2", "train.log_interval=2"]
    flops = load("flops", *settings)
    model = SimpleNamespace(
        parameters=lambda: iter([torch.empty(1000, 100)]),
        config=SimpleNamespace(layers=2, width=50, sequence_length=16),
    )
    ideal = flops.ideal_seconds(model, 8)
    assert ideal == pytest.approx(8 * 16 * (6 * 100_000 + 12 * 2 * 50 * 16) / 2e12)
    module = __import__("metrics")
    train(module.Metrics(tmp_path, 0, 6, 2, 0.5), range(1, 7), clock)
    assert [record["mfu"] for record in records(tmp_path)] == [0.25, 0.25, 0.25]


def event(
    name: str, start: float, end: float, category: str = "cpu_op", thread: int = 1
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "tid": thread,
    }


STEPS = [
    event("ProfilerStep#2", 0, 100, "user_annotation"),
    event("ProfilerStep#3", 100, 290, "user_annotation"),
]
ON_CPU = [
    {"ph": "M", "name": "process_name"},
    *STEPS,
    event("aten::linear", 10, 60),
    event("aten::mm", 20, 50),
    event("c10d::_allgather_base_", 60, 70),
    event("gloo:all_gather", 40, 80, "user_annotation", 2),
    event("gloo:all_reduce", 250, 300, "user_annotation", 2),
]
ON_GPU = [
    *STEPS,
    event("aten::mm", 0, 290),
    event("gloo:all_reduce", 0, 290, "user_annotation", 2),
    event("sgemm", 10, 60, "kernel", 7),
    event("ncclDevKernel_AllGather_RING_LL", 40, 80, "kernel", 9),
    event("ncclDevKernel_ReduceScatter", 250, 300, "kernel", 9),
]


@pytest.mark.parametrize(("events", "cuda"), [(ON_CPU, False), (ON_GPU, True)])
def test_shares_of_the_traced_time(
    load: Generate, monkeypatch: Patch, events: list[dict[str, Any]], cuda: bool
) -> None:
    module = load("profiling", "operation.profile=true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    shares = {
        "computation_share": 50 / 300,
        "communication_share": 90 / 300,
        "exposed_communication_share": 70 / 300,
    }
    assert module.shares(events) == pytest.approx({"step_seconds": 1e-4, **shares})


def test_time_of_an_operator_without_what_it_calls(load: Generate) -> None:
    module = load("profiling", "operation.profile=true")
    found = module.own_seconds(
        [*ON_CPU[3:5], event("aten::mm", 20, 25, thread=2), event("aten::mm", 60, 70)]
    )
    assert found == pytest.approx({"aten::linear": 20e-6, "aten::mm": 45e-6})


SETS = (
    (
        "data={kind: text, files: ['{stdlib}/abc.py'], validation: {wiki: '{stdlib}/this.py', code:"
        " '{stdlib}/ast.py'}}"
    ),
    "model.vocabulary=256",
)


def test_each_set_of_validation_has_its_values_and_its_row(
    load: Generate, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "out/run-001"
    run.mkdir(parents=True)
    metrics = load("metrics", *SETS).Metrics(run, 0, 4)
    train(metrics, range(1, 3))
    metrics.validation(2, {"wiki": 2.0, "code": 800.0})
    train(metrics, range(3, 5))
    metrics.validation(4, {"wiki": 2.5, "code": math.nan})
    first, second = (record for record in records(run) if "perplexity/wiki" in record)
    assert first["validation_loss/wiki"] == 2.0 and first["perplexity/wiki"] == math.exp(2)
    assert first["validation_loss/code"] == 800.0 and first["perplexity/code"] is None  # infinite
    assert second["validation_loss/code"] is None
    metrics.summary(4, run)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["wiki", "2.5000", "12.18", "2.0000", "2"] in rows
    assert ["code", "800.0000", "inf", "800.0000", "2"] in rows


@pytest.mark.full
@pytest.mark.launch
def test_a_profile_changes_nothing_and_says_where_the_time_goes(tmp_path: Path) -> None:
    folder = write_project(tmp_path, SPEC, "operation.profile=true")
    words = ("train.py", "--steps", 6, "--out")
    done = python(*TORCHRUN, 2, *words, "profiled", "--profile", cwd=folder, status=None)
    assert "step      6  validation loss" in done.stdout, done.stderr[-3000:]
    python(*words, "plain", cwd=folder, status=None)
    profiled, plain = (records(folder / out / "run-001") for out in ("profiled", "plain"))
    shares = [record for record in profiled if "communication_share" in record]
    rest = [record for record in profiled if record not in shares]
    assert [record["step"] for record in rest] == [1, 2, 3, 4, 5, 6, 6]
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [r.get(key, 0) for r in rest] == pytest.approx(
            [r.get(key, 0) for r in plain], rel=1e-6
        )

    traces = folder / "profiled" / "run-001" / "profile_steps_3_to_5"
    ranks = ["trace-rank-0.json.gz", "trace-rank-1.json.gz"]
    assert sorted(path.name for path in traces.iterdir()) == ["summary.json", *ranks]
    summary = json.loads((traces / "summary.json").read_text())
    assert summary["steps"] == [3, 5] and len(summary["ranks"]) == 2
    for found in summary["ranks"]:
        assert 0 < found["exposed_communication_share"] <= found["communication_share"] < 1
        assert 0 < found["computation_share"] < 1 and 0 < found["step_seconds"] < 60
    assert {"gloo:all_gather", "aten::mm"} < set(summary["top_seconds"])
    (written,) = shares
    mean = {key: value for key, value in summary["mean"].items() if key.endswith("share")}
    assert written == {"step": 5, **mean}
    assert "profile  communication_share" in done.stdout
