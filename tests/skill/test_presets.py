"""Models by size, the devices that hold them, and the small model on which a large one's project is
verified.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from trees import DECODER, SMALL, write_project
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import Spec, SpecError, load, schema
from verified_fsdp2.skill.spec.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "llama-8b.yaml"
TRAIN = {"steps": 20, "global_batch": 64}


def of(tmp_path: Path, *settings: str) -> Spec:
    spec = {**SMALL, "model": {"kind": "decoder"}, "train": TRAIN}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    return load(tmp_path / "spec.yaml", settings)


# What the model cards and the safetensors of Llama 3.2 1B, 3.1 8B and 3.1 70B count.
@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("1b", 1_235_814_400), ("8b", 8_030_261_248), ("70b", 70_553_706_496)],
)
def test_a_preset_has_the_size_of_its_model(tmp_path: Path, preset: str, parameters: int) -> None:
    assert of(tmp_path, f"model.preset={preset}").parameters == parameters


def test_presets_are_those_of_the_schema() -> None:
    assert sorted(PRESETS) == sorted(schema.at(("model", "preset"))["then"]["enum"])


def test_each_key_replaces_that_of_the_preset(tmp_path: Path) -> None:
    spec = of(tmp_path, "model.preset=8b", "model.layers=4", "model.rope_theta=10000.0")
    assert (spec["model"]["layers"], spec["model"]["rope_theta"], spec["model"]["width"]) == (
        4,
        10000.0,
        4096,
    )
    assert spec.as_written()["model"] == {
        "kind": "decoder",
        "preset": "8b",
        "layers": 4,
        "rope_theta": 10000.0,
    }
    scaffold.write(scaffold.render(spec), tmp_path / "project")
    again = load(tmp_path / "project" / "spec.yaml")
    assert again == spec
    assert load(tmp_path / "project" / "spec.yaml", ["model.preset=1b"])["model"]["width"] == 2048


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        (
            [],
            ["set_requires_all_reduce(number == len(batches))"],
        ),  # each micro-batch is reduced over the shards
        (["parallel.dp_replicate=1", "parallel.dp_shard=16"], []),  # and here over all ranks
        (
            ["model.layers=1", "model.vocabulary=512", "parallel={}"],
            ["set_requires_gradient_sync(number == len(batches))"],
        ),
    ],
)
def test_no_device_keeps_the_whole_gradients_of_a_large_model(
    settings: list[str], calls: list[str]
) -> None:
    text = scaffold.render(load(LLAMA, settings))["train.py"]
    assert re.findall(r"set_requires_\w+\(.*\)", text) == calls


@pytest.mark.parametrize(
    ("settings", "key", "numbers"),
    [
        (["model.preset=70b"], "parallel.dp_shard", ("70,553,706,496", "131.4 GiB", "14 ranks")),
        (["parallel.dp_replicate=16", "parallel.dp_shard=1"], "parallel.dp_shard", ("119.7 GiB",)),
        (["launch.device_memory=14"], "parallel.dp_shard", ("15.0 GiB", "14;", "9 ranks")),
        (
            ["launch.device_memory=10", "optimizer={kind: sgd}"],
            "parallel.dp_shard",
            ("x 12 bytes", "11.2 GiB"),
        ),
        (
            ["launch.device_memory=10", "optimizer={kind: muon}"],
            "parallel.dp_shard",
            ("x 12 bytes", "11.2 GiB"),
        ),
    ],
)
def test_devices_that_cannot_hold_the_state(
    settings: list[str], key: str, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as caught:
        load(LLAMA, settings)
    (problem,) = caught.value.problems
    assert problem.key == key and all(number in problem.message for number in numbers)


def test_devices_that_hold_it_or_are_not_known() -> None:
    spec = load(LLAMA)
    assert (spec.parameters, spec.scaled, spec["verify"]["nproc"]) == (
        8_030_261_248,
        {"dp_shard": 2},
        4,
    )
    load(LLAMA, ["model.preset=70b", "launch.device_memory=null"])
    load(LLAMA, ["model.preset=70b", "parallel.cpu_offload=true"])
    named = [
        "launch.engines=[skypilot]",
        "launch.skypilot_volume=v",
        "launch.slurm_time=null",
        "launch.device_memory=null",
    ]
    load(LLAMA, [*named, "launch.skypilot_accelerator=H100"])
    with pytest.raises(SpecError, match="16 bytes"):
        load(LLAMA, [*named, "launch.skypilot_accelerator=H100", "model.preset=70b"])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["verify.model={heads: 3}"], "verify.model.heads"),
        (["verify.model={heads: 4, kv_heads: 3}"], "verify.model.kv_heads"),
        (
            ["verify.model={vocabulary: 255}", "parallel={dp_shard: 8, tp: 2}"],
            "verify.model.vocabulary",
        ),
        (
            ["verify.model={}", "model={kind: import, import: 'a:b', shard: [B], vocabulary: 9}"],
            "verify.model",
        ),
    ],
)
def test_a_small_model_that_does_not_fit(settings: list[str], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(LLAMA, settings)
    assert key in {problem.key for problem in caught.value.problems}


def test_the_small_model_is_a_flag_and_the_large_one_the_default(tmp_path: Path) -> None:
    written = yaml.safe_load(LLAMA.read_text(encoding="ascii"))
    project = write_project(tmp_path, written)
    settings = yaml.safe_load((project / "verify.yaml").read_text())
    small = "--debug-model --global-batch 8 --micro-batch 1"
    assert settings["args"] == f"--out {{checkpoint}} --dp-shard 2 {small}"
    assert settings["single_args"] == "--micro-batch 8"
    assert "layers: int = 32" in (project / "model.py").read_text()
    assert load(project / "spec.yaml") == load(tmp_path / "spec.yaml")
    small = load(tmp_path / "spec.yaml")["verify"]["model"]
    assert small == {
        "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocabulary": 256,
        "sequence_length": 64,
    }  # fmt: skip


# What divides wherever the sizes of the model do: by tp, by cp.
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ([], {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 128_256}),
        (
            ["parallel.tp=8", "verify.nproc=16", "verify.reshard_to=[1]"],
            {"heads": 16, "kv_heads": 8, "ffn": 512},
        ),
        (["parallel.cp=4", "verify.nproc=8", "verify.reshard_to=[1]"], {"sequence_length": 128}),
        (["model.kv_heads=auto"], {"heads": 4, "kv_heads": 4}),
        (["precision.fp8=true", "precision.param_dtype=bfloat16"], {"width": 64}),
        (["model.layers=2", "model.vocabulary=256"], None),  # less than a billion parameters
        (["verify.model=null"], None),
    ],
)
def test_a_large_model_has_a_small_one(
    tmp_path: Path, settings: list[str], found: dict[str, int] | None
) -> None:
    spec = of(tmp_path, "model.preset=8b", *settings)
    small = spec["verify"]["model"]
    assert small == (found if found is None else {**small, **found})
    assert load(_written(tmp_path, spec)) == spec
    if small is not None:  # the same sizes, written out, are found to be whole
        of(tmp_path, "model.preset=8b", *settings, f"verify.model={json.dumps(small)}")


def _written(folder: Path, spec: Spec) -> Path:
    scaffold.write(scaffold.render(spec), folder / "project")
    return folder / "project" / "spec.yaml"


def test_no_trace_without_it(tmp_path: Path) -> None:
    project = write_project(tmp_path, {**SMALL, "model": DECODER, "train": TRAIN})
    assert not [
        path
        for path in project.rglob("*.*")
        if path.is_file() and "debug" in path.read_text().lower()
    ]
    assert "preset" not in (project / "spec.yaml").read_text()
