"""How a generated model is laid out: what one step of it sends and computes again, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_scaffold_launch import assert_close, run

from trees import DECODER, SMALL
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.skill.spec import SpecError

WORLD = 8
LAYERS = 3
GROUPS = LAYERS + 1  # the blocks and the root
AGAIN = 6  # matrix products of a block that are computed again: nothing needs the result of the seventh
SPEC: dict[str, Any] = {
    **SMALL,
    "model": {**DECODER, "layers": LAYERS, "heads": 4},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 20, "global_batch": 8, "max_norm": 0.5},
    "verify": {"nproc": 8, "reshard_to": []},
}
CHECKPOINTED = "memory.activation_checkpointing"
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "kept": ["parallel.reshard_after_forward=false"],
    "pairs": ["parallel.reshard_after_forward=2"],
    "ahead": ["parallel.prefetch={forward: 1, backward: 2}"],
    "full": [f"{CHECKPOINTED}=full"],
    "every": [f"{CHECKPOINTED}=every-nth", "memory.every=3"],
    "selective": [f"{CHECKPOINTED}=op-selective"],
    "compiled": ["memory.compile=true", f"{CHECKPOINTED}=full"],
    "offloaded": ["parallel.cpu_offload=true"],
    "split": ["parallel.tp=2"],
    "split untied": ["parallel.tp=4", "model.tied_embeddings=false", "parallel.dp_replicate=2"],
    "untied": ["model.tied_embeddings=false"],
    "float8": ["precision.fp8=true", "precision.param_dtype=bfloat16"],
    "does not divide": ["verify.nproc=9", "parallel.reshard_after_forward=3", "train.global_batch=9"],
    "does not split": ["verify.nproc=6", "parallel.tp=2", "parallel.dp_replicate=3", "train.global_batch=9"],
}


def load(folder: Path, settings: Sequence[str] = ()) -> spec.Spec:
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    return spec.load(folder / "spec.yaml", settings)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, once: Any) -> Mapping[str, Any]:
    """What one rank of a made-up world of 8 has seen of each variant, in one process."""
    found: Mapping[str, Any] = once("variants", lambda: see(tmp_path_factory.mktemp("variants")))
    return found


def see(folder: Path) -> dict[str, Any]:
    for number, settings in enumerate(VARIANTS.values()):
        scaffold.write(scaffold.render(load(folder, settings)), folder / str(number))
    command = [sys.executable, str(Path(__file__).with_name("made_up_world.py")), str(WORLD)]
    command += [str(folder / str(number)) for number in range(len(VARIANTS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(VARIANTS, json.loads(done.stdout), strict=True))


def test_names_are_those_of_the_default(seen: Mapping[str, Any]) -> None:
    for name, found in seen.items():
        if "refused" not in found:
            like = seen["untied" if "untied" in name else "default"]
            assert (found["names"], found["keys"]) == (like["names"], like["keys"]), name


def test_what_is_gathered_and_reduced(seen: Mapping[str, Any]) -> None:
    """The root is not gathered again in backward; with `false` nothing is; with a number each block is, in its group."""
    gathers = {name: seen[name]["gathers"] for name in ("default", "kept", "pairs", "ahead", "full", "split")}
    assert gathers == {name: [GROUPS, 0 if name == "kept" else LAYERS] for name in gathers}
    assert {seen[name]["scatters"] for name in gathers} == {GROUPS}


def test_a_smaller_mesh_for_each_block(seen: Mapping[str, Any]) -> None:
    """torch 2.13 makes process groups of its own for each `fully_shard` with a number."""
    assert seen["pairs"]["groups"] > seen["default"]["groups"]


def test_what_backward_computes_again(seen: Mapping[str, Any]) -> None:
    again = {name: seen[name]["backward"] for name in ("default", "full", "every", "selective")}
    attention = "_scaled_dot_product_flash_attention_for_cpu.default"
    plain = again["default"]["mm.default"]
    assert again["default"] == {"mm.default": plain, "silu.default": 0, attention: 0}
    assert again["full"] == {"mm.default": plain + LAYERS * AGAIN, "silu.default": LAYERS, attention: LAYERS}
    assert again["every"] == {"mm.default": plain + AGAIN, "silu.default": 1, attention: 1}
    assert again["selective"] == {"mm.default": plain, "silu.default": LAYERS, attention: 0}


def test_each_block_is_compiled(seen: Mapping[str, Any]) -> None:
    assert seen["compiled"]["compiled"] == [True] * LAYERS
    assert seen["default"]["compiled"] == [False] * LAYERS


def test_parts_of_tensor_parallelism(seen: Mapping[str, Any]) -> None:
    """Rank 0 of 4 x 2, and of 2 x 1 x 4 with two copies."""
    shapes = {name: seen[name]["shapes"] for name in ("split", "split untied")}
    block = "blocks.0.attention."
    assert shapes["split"][f"{block}query.weight"] == [32 // 2 // 4, 32]
    assert shapes["split"][f"{block}output.weight"] == [32 // 4, 32 // 2]
    assert shapes["split"]["embedding.weight"] == [64 // 2 // 4, 32]
    assert shapes["split"]["norm.weight"] == [32 // 4]
    assert shapes["split untied"][f"{block}query.weight"] == [32 // 4, 32]
    assert shapes["split untied"]["head.weight"] == [64 // 4, 32]


def test_refused_at_start(seen: Mapping[str, Any]) -> None:
    assert "fp8: false" in seen["float8"]["refused"]
    assert "parallel.reshard_after_forward to a divisor" in seen["does not divide"]["refused"]
    assert "8 ranks do not divide into 3 copies" in seen["does not split"]["refused"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.tp=8"], "parallel.tp must divide model.heads 4, found 8"),
        (["parallel.tp=4", "model.kv_heads=2"], "parallel.tp must divide model.kv_heads 2, found 4"),
        (["parallel.tp=4", "model.ffn=90"], "parallel.tp must divide model.ffn 90, found 4"),
        (["parallel.tp=4", "model.vocabulary=66"], "parallel.tp must divide model.vocabulary 66, found 4"),
        (["parallel.tp=4", "model.sequence_length=18"], "parallel.tp must divide model.sequence_length 18, found 4"),
        (["parallel.tp=3"], "parallel.tp must divide verify.nproc 8, found 3"),
        (["parallel.tp=4", "parallel.dp_replicate=4"], "must divide verify.nproc 8 / dp_replicate 4, found 4"),
        (["parallel.tp=2", "parallel.dp_shard=2"], "2 x dp_replicate 1 x tp 2 is 4 ranks; verify.nproc 8"),
        (["parallel.tp=2", "verify.reshard_to=[3]"], "must be a multiple of parallel.tp 2, found 3"),
        (["parallel.tp=2", "train.micro_batch=4"], "train.micro_batch 4 x (verify.nproc 8 / parallel.tp 2) = 16"),
        (
            ["model={kind: import, import: 'a:b', shard: [B], vocabulary: 9, sequence_length: 9}", "parallel.tp=2"],
            "parallel.tp must be 1 for model.kind import",
        ),
        (["parallel.reshard_after_forward=3"], "must divide the 8 ranks that share a copy of the model on 8 ranks"),
        (["parallel.reshard_after_forward=4", "verify.reshard_to=[2]"], "must divide the 2 ranks"),
        (["parallel.reshard_after_forward=2", "parallel.tp=2"], "must be true or false with parallel.tp 2"),
        (["parallel.reshard_after_forward=1"], "parallel.reshard_after_forward must be at least 2"),
        (
            ["parallel.reshard_after_forward=false", "parallel.prefetch.backward=1"],
            "parallel.prefetch.backward does nothing",
        ),
        (["parallel.prefetch={forwards: 1}"], "did you mean 'forward'"),
        (["memory.compile=true", "parallel.tp=2"], "memory.compile must be false with parallel.tp 2"),
        (["memory.every=3"], "memory.every does nothing with memory.activation_checkpointing: none"),
        (["memory.checkpointing=full"], "did you mean 'activation_checkpointing'"),
        (["memory.activation_checkpointing=all"], "must be 'none', 'full', 'every-nth' or 'op-selective'"),
        (["precision.fp8=true"], "precision.fp8 needs precision.param_dtype: bfloat16"),
        (["precision={fp8: true}", "parallel.tp=2"], "precision.fp8 needs parallel.tp: 1"),
        (["precision={fp8: true}", "model.ffn=90"], "needs multiples of 16: model.ffn is 90"),
        (
            ["precision={fp8: true}", "model.kv_heads=1"],
            "needs multiples of 16: model.kv_heads is 1 (matrices of 8 rows)",
        ),
    ],
)
def test_refused_in_the_spec(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "path", "present"),
    [
        ([], "model.py", []),
        ([], "train.py", []),
        ([], "data.py", []),
        ([], "distributed.py", []),
        (VARIANTS["split"], "train.py", ["data_part", "loss_parallel", "tp_size"]),
        (VARIANTS["split"], "data.py", ["data_part"]),
        (VARIANTS["split"], "distributed.py", ["TP = 2", "data_part", "tp_size", '"tp"']),
        (VARIANTS["split"], "model.py", ["split_matrices", "ColwiseParallel", '"tp"', "PrepareModuleOutput"]),
        (VARIANTS["split untied"], "model.py", ["split_matrices", "ColwiseParallel", '"tp"']),
        (VARIANTS["pairs"], "model.py", ["RESHARD_TO", "SetupError"]),
        (VARIANTS["ahead"], "model.py", ["PREFETCH_FORWARD", "PREFETCH_BACKWARD", "prefetch("]),
        (["parallel.prefetch.forward=1"], "model.py", ["PREFETCH_FORWARD", "prefetch("]),
        (VARIANTS["full"], "model.py", ["use_reentrant"]),
        (VARIANTS["selective"], "model.py", ["use_reentrant", "SAVED_OPS"]),
        (["memory.compile=true"], "model.py", [".compile()"]),
        (VARIANTS["offloaded"], "model.py", ["CPUOffloadPolicy", 'device="cpu"']),
        (VARIANTS["float8"], "model.py", ["float8", "torchao", "find_spec", "SetupError"]),
        (["memory.gc_interval=9"], "train.py", ["gc.", "GC_INTERVAL = 9"]),
    ],
)  # fmt: skip
def test_what_is_on_is_there_and_nothing_else(
    tmp_path: Path, settings: list[str], path: str, present: list[str]
) -> None:
    text = scaffold.render(load(tmp_path, settings))[path]
    words = "data_part loss_parallel tp_size ColwiseParallel PrepareModuleOutput split_matrices RESHARD_TO SAVED_OPS "
    words += "PREFETCH_FORWARD PREFETCH_BACKWARD prefetch( use_reentrant .compile() CPUOffloadPolicy torchao find_spec GC_INTERVAL"
    others = {'"tp"', "gc.", 'device="cpu"', "float8", *words.split()}
    assert [word for word in present if word not in text] == []
    assert sorted(word for word in others if word in text and not any(word in known for known in present)) == []


def test_a_step_of_parallelize_comes_after_the_other(tmp_path: Path) -> None:
    """Float8 or tensor parallelism, activation checkpointing, compile, FSDP: what the spec asks for, in this order."""
    behind = ["checkpoint_activations(", "block.compile()", "fully_shard(", "prefetch("]
    for first, settings in (
        ("split_matrices(", [*VARIANTS["split"], *VARIANTS["full"], *VARIANTS["ahead"]]),
        ("compute_in_float8(", [*VARIANTS["float8"], *VARIANTS["compiled"], *VARIANTS["ahead"]]),
    ):
        code = scaffold.render(load(tmp_path, settings))["model.py"].partition("def parallelize(")[2]
        steps = [step for step in (first, *behind) if step in code]
        assert len(steps) >= 4
        assert steps == sorted(steps, key=code.index)


@pytest.mark.full
@pytest.mark.launch
def test_a_checkpoint_of_split_matrices_goes_on_unsplit(tmp_path: Path) -> None:
    """Two ranks with tp 2, then two ranks of FSDP alone: the losses of one rank that was never stopped."""
    worlds = ["verify.nproc=2", "model.tied_embeddings=false"]
    for name, settings in (("split", ["parallel.tp=2"]), ("whole", [])):
        scaffold.write(scaffold.render(load(tmp_path, [*worlds, *settings])), tmp_path / name)
    wanted = run(tmp_path / "whole", 1, tmp_path / "straight", 4)
    found = run(tmp_path / "split", 2, tmp_path / "out", 2)
    assert_close(found, wanted[:2])
    assert_close(run(tmp_path / "whole", 2, tmp_path / "out", 4, "--resume"), wanted, 1e-5)
