"""`fsdp2 plan --explore`, and the plan of `fsdp2 new` and `fsdp2 spec check` where the spec names
the device.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import Command, written
from verified_fsdp2.skill.capacity import lower_bound
from verified_fsdp2.skill.capacity.made_up_data import planned
from verified_fsdp2.skill.capacity.settings import OfSpec, shortened
from verified_fsdp2.skill.spec import SpecError, load
from verified_fsdp2.verifier.analysis.capacity import RESERVE

SPEC = """
version: 1
name: one
model: {kind: decoder, layers: 2, width: 256, heads: 4, vocabulary: 256, sequence_length: 1024}
data: {kind: synthetic}
precision: {param_dtype: bfloat16}
optimizer: {lr: 1.0e-3}
train: {steps: 20, global_batch: 128, micro_batch: 32, dry_run: false}
"""
LAUNCH = "launch: {engines: [torchrun], nodes: 1, devices_per_node: 2, device_memory: %s}\n"


def spec_at(folder: Path, memory: float | None = None) -> Path:
    return written(folder, SPEC + (LAUNCH % memory if memory is not None else ""), "spec.yaml")


def of(path: Path, ranks: int, *changes: str, per_node: int = 8) -> OfSpec:
    return OfSpec(path, changes, load(path, changes), ranks, per_node)


def knobs(found: OfSpec) -> dict[str, tuple[Any, ...]]:
    return {knob.name.partition(".")[2]: knob.values for knob in found.knobs()}


def test_what_is_compared_on_one_node(tmp_path: Path) -> None:
    assert knobs(of(spec_at(tmp_path), 8)) == {
        "activation_checkpointing": ("none", "op-selective", "full"),
        "micro_batch": (16, 2, 4, 8),  # 32 on each of 8 ranks are more than the global batch
        "chunked_loss": (False, True),
        "reshard_after_forward": (True, False),
        "tp": (1, 2, 4, 8),
        "cpu_offload": (False, True),
    }


def test_what_is_compared_on_several_nodes(tmp_path: Path) -> None:
    found = knobs(of(spec_at(tmp_path), 64, "train.micro_batch=1"))
    assert found["dp_replicate"] == (1, 8, 4, 2) and found["reshard_after_forward"] == (
        True,
        False,
        8,
    )
    assert found["micro_batch"] == (1, 2)


def test_an_imported_model_has_no_tensor_parallelism(tmp_path: Path) -> None:
    path = spec_at(tmp_path)
    changes = (
        (
            "model={kind: import, import: 'own:make', shard: [Block], vocabulary: 9,"
            " sequence_length: 8}"
        ),
    )
    found = knobs(of(path, 8, *changes))
    assert "tp" not in found and "chunked_loss" not in found


def test_the_mesh_and_the_nodes_follow(tmp_path: Path) -> None:
    path = spec_at(tmp_path, 80)
    node = ("parallel.dp_shard=8", "train.micro_batch=4", "launch.devices_per_node=8")
    fixed, nodes = of(path, 16, *node), {"launch.nodes": "2"}
    assert fixed.written({}) == {"parallel.dp_replicate": "2", **nodes}  # the size of a shard stays
    assert fixed.written({"parallel.dp_replicate": 1}) == {"parallel.dp_shard": "16", **nodes}
    assert fixed.written({"parallel.tp": 2, "parallel.dp_replicate": 2})["parallel.dp_shard"] == "4"
    one = of(path, 8, *node, "parallel.dp_replicate=2", "launch.nodes=2")
    assert one.written({}) == {"parallel.dp_replicate": "1", "launch.nodes": "1"}
    assert of(path, 2).written({"train.micro_batch": 4, "memory.chunked_loss": True}) == {
        "train.micro_batch": "4",
        "memory.chunked_loss": "true",
    }


def test_the_extremes_need_least(tmp_path: Path) -> None:
    lean = {
        "memory.activation_checkpointing": "full",
        "memory.chunked_loss": True,
        "parallel.reshard_after_forward": True,
        "train.micro_batch": 1,
    }
    found = of(spec_at(tmp_path), 64, "train.micro_batch=2", "parallel.dp_replicate=2")
    assert found.extremes() == [
        lean,
        {**lean, "parallel.dp_replicate": 1},
        {**lean, "parallel.dp_replicate": 1, "parallel.cpu_offload": True},
    ]
    keys = [choice for knob in found.knobs() for choice in ((knob.name, v) for v in knob.values)]
    assert all(item in keys for item in found.extremes()[-1].items())


def test_what_the_spec_refuses_is_not_possible(tmp_path: Path) -> None:
    found = of(spec_at(tmp_path), 8)
    with pytest.raises(SpecError, match="micro_batch"):
        found.read({"train.micro_batch": "3"})
    spec, keys = found.read({"parallel.tp": "4"})
    assert spec["parallel"]["tp"] == 4 and keys["parallel.tp"] == "4"


def test_many_forward_passes_are_counted_not_run(tmp_path: Path) -> None:
    found = of(spec_at(tmp_path), 2, "train.micro_batch=4")
    small, passes = shortened(found.spec, 2)
    assert (small["train"]["global_batch"], passes) == (16, 16)
    assert found.spec["train"]["global_batch"] == 128
    whole, passes = shortened(load(found.path), 2)
    assert (whole["train"]["global_batch"], passes) == (128, 2)


@pytest.mark.launch
def test_counted_passes_are_those_of_a_whole_step(tmp_path: Path, command: Command) -> None:
    """8 forward passes, run one by one by a project, and counted from two for its spec."""
    path, project = spec_at(tmp_path), tmp_path / "out"
    keys = ("--set", "train.micro_batch=8", "--set", "parallel.dp_replicate=2")
    words = ("--nproc", 2, "--gpu", "h100", "--steps", 2, "--json")
    command("new", path, project, *keys, code=0)
    record = (whole := command("plan", project, *words, code=0).data)["rehearsal"]
    grid = ("--explore", "train.micro_batch=8,16")
    counted = command("plan", path, *words, *keys, *grid, code=0).data
    row = next(
        row for row in counted["explored"]["rows"] if row["settings"] == {"train.micro_batch": "8"}
    )
    assert row["peak"] == whole["peak"] and row["needed"] == whole["needed"]
    assert counted["peak"] == whole["peak"]
    assert counted["bound"]["step"] == pytest.approx(whole["bound"]["step"])
    assert row["sent_bytes"] == sum(
        one["count"] * one["bytes"]
        for one in record["collectives"]
        if one["step"] == 2 and one["group_size"] > 1
    )
    assert row["tokens_per_second"] * row["bound"] == pytest.approx(record["tokens"])
    assert whole["bound"]["step"] == pytest.approx(row["bound"])


@pytest.mark.launch
@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ((), []),
        (("train.on_nonfinite=skip", "parallel.dp_replicate=2", "train.validate_interval=50"), []),
        (("optimizer.kind=muon",), ["    if finite:  # the host waits for it"]),
    ],
)
def test_a_step_that_is_not_logged_waits_for_no_device(
    tmp_path: Path, command: Command, keys: tuple[str, ...], lines: list[str]
) -> None:
    path, quiet = spec_at(tmp_path), ("train.log_interval=50", "train.micro_batch=8", *keys)
    changes = [word for key in quiet for word in ("--set", key)]
    found = command("plan", path, "--nproc", 2, *changes, "--steps", 4, "--json", code=0).data
    reads = [one for one in found["rehearsal"]["reads"] if one["in_step"] and one["synchronizes"]]
    assert [one["at_line"]["code"].strip() for one in reads] == [one.strip() for one in lines]
    assert found["rehearsal"]["steps"] == 4


@pytest.mark.launch
def test_expert_parallelism_waits_once_in_a_layer_and_pass(
    tmp_path: Path, command: Command
) -> None:
    path = spec_at(tmp_path)
    keys = (
        "model.experts={number: 4}",
        "parallel.ep=2",
        "train.micro_batch=32",
        "train.log_interval=50",
        "memory.activation_checkpointing=full",
    )
    changes = [word for key in keys for word in ("--set", key)]
    found = command("plan", path, "--nproc", 2, *changes, "--steps", 3, "--json", code=0).data
    (wait,) = (one for one in found["rehearsal"]["reads"] if one["in_step"] and one["synchronizes"])
    assert wait["at_line"]["file"].endswith("expert_parallel.py")
    layers, passes, micro_batches = 2, 2, 2  # each block is recomputed
    assert wait["count"] == 3 * layers * passes * micro_batches


def test_spec_check_refuses_what_cannot_fit(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By arithmetic: nothing is launched, and that something fits is not said."""
    from verified_fsdp2.verifier.launch import client

    monkeypatch.setattr(client.Launcher, "__init__", None)
    path = spec_at(tmp_path, 1.6)
    (problem,) = command("spec", "check", path, "--json", code=2).data["problems"]
    assert problem["key"] == "launch.device_memory" and problem["line"] == path.read_text().count(
        "\n"
    )
    assert "needs at least" in problem["message"] and "--explore" in problem["message"]
    assert command("spec", "check", path, "--no-plan", code=0).out.startswith(str(path))
    said = command("spec", "check", path, "--set", "train.micro_batch=4", code=0).out
    assert "needs at least" in said and "fsdp2 plan" in said and "fits in" not in said


@pytest.mark.launch
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ((), 0.7),
        pytest.param(
            ("memory.activation_checkpointing=full", "optimizer.kind=adamw8bit"),
            0.6,
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("memory.activation_checkpointing=op-selective", "memory.chunked_loss=true"),
            0.5,
            marks=pytest.mark.full,
        ),
        (("precision.param_dtype=float32", "parallel.tp=2"), 0.4),
    ],
)
def test_the_least_is_less_than_the_plan(
    tmp_path: Path, changes: tuple[str, ...], part: float
) -> None:
    """And not much less, where few buffers are left out."""
    path = spec_at(tmp_path, 80)
    spec = load(path, changes)
    found, plan = lower_bound.of_launch(spec), planned(path, changes, spec)
    assert found is not None and plan is not None and plan.found is not None
    assert plan.found.highest is not None
    assert part * plan.found.highest.bytes < found.bytes - RESERVE <= plan.found.highest.bytes


@pytest.mark.launch
def test_what_shows_a_run_does_not_keep_it_from_being_planned(tmp_path: Path) -> None:
    """The peak of the device is unknown, and trackers are not installed."""
    path = spec_at(tmp_path, 1.6)
    keys = [f"operation.{key}=true" for key in ("mfu", "progress", "tensorboard", "wandb")]
    plain, shown = (planned(path, changes, load(path, changes)) for changes in ([], keys))
    assert plain is not None and plain.refused
    assert shown is not None and shown.refused and shown.lines() == plain.lines()


@pytest.mark.launch
def test_new_says_whether_it_fits(tmp_path: Path, command: Command) -> None:
    path = spec_at(tmp_path, 1.6)
    done = command("new", path, tmp_path / "out", code=0)
    plan = [line for line in done.out.splitlines() if line.startswith("plan: ")]
    assert len(plan) == 1 and "does not fit" in plan[0] and "--explore" in done.out
    keys = ("--set", "train.micro_batch=4", "--set", "checkpoint.mode=thread")
    plan = command("new", path, tmp_path / "b", "--json", *keys, code=0).data["plan"]
    assert plan["fits"] is True
    # the shard of this rank, with two moments, in float32
    whole = 12 * (load(path).parameters or 0)
    assert plan["host_copy"]["mode"] == "thread" and plan["host_copy"]["per_node"] == 2
    assert plan["host_copy"]["bytes"] == pytest.approx(whole / 2, rel=0.01)


def test_without_a_device_nothing_is_planned(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verified_fsdp2.verifier.launch import client

    monkeypatch.setattr(client.Launcher, "__init__", None)
    path = spec_at(tmp_path)
    assert "plan" not in command("spec", "check", path, code=0).out
    assert "plan" not in command("new", path, tmp_path / "out", "--json", code=0).data
    path = spec_at(tmp_path, 80)
    assert "plan" not in command("new", path, tmp_path / "c", "--no-plan", "--json", code=0).data


@pytest.mark.parametrize(
    ("launch", "key", "message"),
    [
        ("gpu: h10", "launch.gpu", "h100"),
        ("gpu: h100, device: cpu", "launch.gpu", "does nothing"),
        ("gpu: 8 x h100", "launch.gpu", "name of a GPU"),
    ],
)
def test_the_gpu_is_one_that_is_known(tmp_path: Path, launch: str, key: str, message: str) -> None:
    text = f"{SPEC}launch: {{engines: [torchrun], nodes: 1, devices_per_node: 2, {launch}}}\n"
    with pytest.raises(SpecError) as error:
        load(written(tmp_path, text, "spec.yaml"))
    assert [one.key for one in error.value.problems] == [key]
    assert message in str(error.value)


def test_a_gpu_holds_the_state_or_is_refused(tmp_path: Path) -> None:
    launch = "launch: {engines: [torchrun], nodes: 1, devices_per_node: 2, gpu: t4}\n"
    path = written(tmp_path, SPEC + launch, "spec.yaml")
    load(path)
    with pytest.raises(SpecError, match=r"a device has 14\.56"):
        load(path, ["model={kind: decoder, preset: 8b}"])


@pytest.mark.launch
def test_data_that_are_not_here_are_made_up_for_a_project_too(
    tmp_path: Path, command: Command
) -> None:
    """As for its spec; with edits there are no figures, and it is no error of the project."""
    path, words = spec_at(tmp_path), ("--nproc", 2, "--gpu", "h100", "--steps", 1, "--json")
    command(
        "new", path, tmp_path / "out", "--offline", "--set", "data={kind: tokens, files: [a.bin]}"
    )
    project = tmp_path / "out"
    plan = command("plan", project, *words, code=0)
    assert plan.data["trouble"] is None and plan.data["fits"] and "made-up data" in plan.err
    with (project / "optim.py").open("a") as file:
        file.write("# mine\n")
    plan = command("plan", project, *words, code=4)
    assert plan.data["trouble"]["text"] == "the data are not here"
    assert "data.files[0] matches no file" in plan.data["trouble"]["unfollowed"]
    assert "optim.py" in plan.data["trouble"]["unfollowed"]
    assert (plan.data["fits"], plan.data["bound"], plan.data["rehearsal"]) == (None, None, None)


@pytest.mark.launch
def test_a_script_has_a_grid_of_its_own_arguments(tmp_path: Path, command: Command) -> None:
    text = yaml.safe_dump({**yaml.safe_load(SPEC)})
    command("new", written(tmp_path, text, "spec.yaml"), tmp_path / "out", code=0)
    done = command(
        "plan", tmp_path / "out" / "train.py", "--nproc", 2, "--device-memory", "80GiB", "--json",
        "--explore", "--micro-batch 4,32", "--", "--out", "{checkpoint}", code=0
    )  # fmt: skip
    rows = done.data["explored"]["rows"]
    assert {row["settings"]["--micro-batch"] for row in rows} == {"4", "32"}
    small, large = sorted(rows, key=lambda row: row["needed"])
    assert small["settings"] == {"--micro-batch": "4"} and small["needed"] < large["needed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py", "--nproc", "2", "--explore"), "'--batch 1,2,4'"),
        (("train.py", "--nproc", "2", "--explore", "--batch 1"), "two values"),
        (("spec.yaml", "--nproc", "2", "--html", "."), "--html"),
        (("spec.yaml", "--nproc", "2", "--explore", "optimizer.lr=1e-3,1e-4"), "another training"),
        (("spec.yaml", "--nproc", "2", "--explore", "train.steps=20,40"), "another training"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    spec_at(tmp_path)
    written(tmp_path, "print(1)\n", "train.py")
    assert message in command("plan", *words, code=2).err
