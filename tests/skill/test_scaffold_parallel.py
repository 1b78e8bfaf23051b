"""How a generated model is laid out: what one step of it sends and computes again, and what is
refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_scaffold_launch import assert_close, run

from scripts import python
from trees import DECODER, SMALL
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.skill.spec import SpecError

WORLD = 8
LAYERS = 3
GROUPS = LAYERS + 1  # the blocks and the root
# matrix products of a block that are computed again: nothing needs the result of the seventh
AGAIN = 6
EVERY_SECOND = 3  # of them, with selective activation checkpointing
SPEC: dict[str, Any] = {
    **SMALL,
    "model": {**DECODER, "layers": LAYERS, "heads": 4},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 20, "global_batch": 8, "max_norm": 0.5},
    "verify": {"nproc": 8, "reshard_to": []},
}
GIVEN = yaml.safe_load(
    Path(__file__).with_name("scaffold_layouts.yaml").read_text(encoding="utf-8")
)
VARIANTS: dict[str, list[str]] = GIVEN["variants"]


def load(folder: Path, settings: Sequence[str] = ()) -> spec.Spec:
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    return spec.load(folder / "spec.yaml", settings)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, once: Any) -> Mapping[str, Any]:
    """What one rank of a made-up world of 8 has seen of each variant, in one process."""
    return once("variants", lambda: see(tmp_path_factory.mktemp("variants")))


def see(folder: Path) -> dict[str, Any]:
    for number, settings in enumerate(VARIANTS.values()):
        scaffold.write(scaffold.render(load(folder, settings)), folder / str(number))
    folders = [folder / str(number) for number in range(len(VARIANTS))]
    done = python(Path(__file__).with_name("made_up_world.py"), WORLD, *folders)
    return dict(zip(VARIANTS, json.loads(done.stdout), strict=True))


@pytest.mark.full
def test_names_are_those_of_the_default(seen: Mapping[str, Any]) -> None:
    for name, found in seen.items():
        if "refused" not in found:
            like = seen["untied" if "untied" in name else "default"]
            assert (found["names"], found["keys"]) == (like["names"], like["keys"]), name


@pytest.mark.full
def test_what_is_gathered_and_reduced(seen: Mapping[str, Any]) -> None:
    """The root is not gathered again in backward; with `false` nothing is; with a number each block
    is, in its group.
    """
    names = ("default", "kept", "last kept", "first pair", "pairs", "ahead", "full", "split")
    gathers = {name: seen[name]["gathers"] for name in names}
    again = {"kept": 0, "last kept": LAYERS - 1, "first pair": 1}
    assert gathers == {name: [GROUPS, again.get(name, LAYERS)] for name in gathers}
    assert {seen[name]["scatters"] for name in gathers} == {GROUPS}


@pytest.mark.full
def test_a_smaller_mesh_for_each_block(seen: Mapping[str, Any]) -> None:
    """torch 2.13 makes process groups of its own for each `fully_shard` with a number."""
    assert seen["pairs"]["groups"] > seen["first pair"]["groups"] > seen["default"]["groups"]


@pytest.mark.full
def test_what_backward_computes_again(seen: Mapping[str, Any]) -> None:
    again = {name: seen[name]["backward"] for name in ("default", "full", "every", "selective")}
    attention = "_scaled_dot_product_flash_attention_for_cpu.default"
    plain = again["default"]["mm.default"]
    assert again["default"] == {"mm.default": plain, "silu.default": 0, attention: 0}
    assert again["full"] == {
        "mm.default": plain + LAYERS * AGAIN,
        "silu.default": LAYERS,
        attention: LAYERS,
    }
    assert again["every"] == {"mm.default": plain + AGAIN, "silu.default": 1, attention: 1}
    assert again["selective"] == {
        "mm.default": plain + LAYERS * EVERY_SECOND,
        "silu.default": LAYERS,
        attention: 0,
    }


@pytest.mark.full
def test_each_block_is_compiled(seen: Mapping[str, Any]) -> None:
    assert seen["compiled"]["compiled"] == [True] * LAYERS
    assert seen["default"]["compiled"] == [False] * LAYERS


@pytest.mark.full
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


@pytest.mark.full
def test_refused_at_start(seen: Mapping[str, Any]) -> None:
    assert "fp8: false" in seen["float8"]["refused"]
    assert "parallel.reshard_after_forward to a divisor" in seen["does not divide"]["refused"]
    assert re.search("8 ranks .* 3 copies", seen["does not split"]["refused"])


@pytest.mark.parametrize("row", GIVEN["refused"], ids=lambda row: " ".join(row["settings"]))
def test_refused_in_the_spec(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, row["settings"])
    assert row["message"] in str(caught.value)


@pytest.mark.parametrize(
    "row", GIVEN["present"], ids=lambda row: " ".join([row["file"], *row["settings"]])
)
def test_what_is_on_is_there_and_nothing_else(tmp_path: Path, row: dict[str, Any]) -> None:
    text, present = scaffold.render(load(tmp_path, row["settings"]))[row["file"]], row["words"]
    words = (
        "data_part loss_parallel tp_size ColwiseParallel PrepareModuleOutput split_matrices"
        " RESHARD_TO SAVED_OPS "
    )
    words += (
        "PREFETCH_FORWARD PREFETCH_BACKWARD prefetch( use_reentrant .compile() CPUOffloadPolicy"
        " torchao find_spec GC_INTERVAL"
    )
    words += " own_part sequence_part cp_size split_sequences cp_mesh"
    others = {'"tp"', '"cp"', "gc.", 'device="cpu"', "float8", *words.split()}
    assert [word for word in present if word not in text] == []
    assert (
        sorted(
            word for word in others if word in text and not any(word in known for known in present)
        )
        == []
    )


def test_a_step_of_parallelize_comes_after_the_other(tmp_path: Path) -> None:
    """Float8, tensor or context parallelism, activation checkpointing, compile, FSDP: what the spec
    asks for, in this order.
    """
    behind = ["checkpoint_activations(", "block.compile()", "fully_shard(", "prefetch("]
    for first, settings in (
        ("split_matrices(", [*VARIANTS["split"], *VARIANTS["full"], *VARIANTS["ahead"]]),
        ("split_sequences(", ["parallel.cp=2", *VARIANTS["full"], *VARIANTS["ahead"]]),
        ("compute_in_float8(", [*VARIANTS["float8"], *VARIANTS["compiled"], *VARIANTS["ahead"]]),
    ):
        code = scaffold.render(load(tmp_path, settings))["model.py"].partition("def parallelize(")[
            2
        ]
        steps = [step for step in (first, *behind) if step in code]
        assert len(steps) >= 4
        assert steps == sorted(steps, key=code.index)


@pytest.mark.full
@pytest.mark.launch
def test_a_checkpoint_of_split_matrices_goes_on_unsplit(tmp_path: Path) -> None:
    """Two ranks with tp 2, then two ranks of FSDP alone: the losses of one rank that was never
    stopped.
    """
    worlds = ["verify.nproc=2", "model.tied_embeddings=false"]
    for name, settings in (("split", ["parallel.tp=2"]), ("whole", [])):
        scaffold.write(scaffold.render(load(tmp_path, [*worlds, *settings])), tmp_path / name)
    wanted = run(tmp_path / "whole", 1, tmp_path / "straight", 4)
    found = run(tmp_path / "split", 2, tmp_path / "out", 2)
    assert_close(found, wanted[:2])
    assert_close(run(tmp_path / "whole", 2, tmp_path / "out", 4, "--resume"), wanted, 1e-5)


@pytest.mark.full
@pytest.mark.launch
def test_ranks_that_share_sequences_make_one_trajectory(tmp_path: Path) -> None:
    """Two ranks with cp 2, two of FSDP alone from their checkpoint, a mesh of 2 x 2, and one rank:
    the same losses.
    """
    settings = ["verify.nproc=4", "model.kv_heads=2", *VARIANTS["full"]]
    for name, more in (("split", ["parallel.cp=2"]), ("whole", [])):
        scaffold.write(scaffold.render(load(tmp_path, [*settings, *more])), tmp_path / name)
    wanted = run(tmp_path / "whole", 1, tmp_path / "straight", 4)
    assert_close(run(tmp_path / "split", 2, tmp_path / "out", 2), wanted[:2])
    assert_close(run(tmp_path / "whole", 2, tmp_path / "out", 4, "--resume"), wanted, 1e-5)
    assert_close(run(tmp_path / "split", 4, tmp_path / "grid", 4), wanted)
    assert_close(run(tmp_path / "split", 1, tmp_path / "alone", 4), wanted)


def test_project_without_context_parallelism_has_no_trace_of_it(tmp_path: Path) -> None:
    texts = scaffold.render(load(tmp_path))
    assert "context_parallel.py" not in texts
    assert "context_parallel.py" in scaffold.render(load(tmp_path, ["parallel.cp=2"]))
    traces = [
        path
        for path, text in texts.items()
        if path.endswith(".py") and re.search(r"\bcp\b|context_par", text)
    ]
    assert traces == []
