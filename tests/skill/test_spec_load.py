"""From a file to a Spec: defaults, derived values, overrides, files that cannot be read."""

import os
from pathlib import Path
from typing import Any

import pytest

from records import cases
from scripts import written
from verified_fsdp2.skill.spec import SpecError, build, data_files, load
from verified_fsdp2.skill.spec.model import decoder_parameters
from verified_fsdp2.verifier.errors import UserError

MINIMAL = """\
version: 1
model: {kind: decoder, layers: 2, width: 64, heads: 4, vocabulary: 256, sequence_length: 32}
data: {kind: synthetic}
train: {steps: 20, global_batch: 8}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return written(tmp_path, MINIMAL, "spec.yaml")


def refused(path: Path, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(path, overrides)
    return caught.value


def problems(path: Path, *overrides: str) -> list[str]:
    return [problem.message for problem in refused(path, *overrides).problems]


def test_derived_values_are_numbers(minimal: Path) -> None:
    spec = load(minimal)
    assert (spec["model"]["kv_heads"], spec["model"]["ffn"]) == (4, 192)
    assert spec["parallel"]["dp_shard"] == "auto"
    assert spec.tokens_per_step == 8 * 32
    assert spec.gradient_accumulation_steps() == 4
    assert spec.gradient_accumulation_steps(world_size=1) == 8


@cases("width, ffn", (128, 352), (96, 256), (12, 32), (4096, 10944))
def test_ffn_size(width: int, ffn: int) -> None:
    assert build.ffn_size(width) == ffn
    assert ffn % 32 == 0 and 0 <= ffn - 8 * width / 3 < 32


def test_parameters_of_llama_3_8b() -> None:
    model = {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocabulary": 128256,
    }
    assert decoder_parameters({**model, "tied_embeddings": False}) == 8_030_261_248


def test_tied_embeddings_count_once(minimal: Path) -> None:
    tied, untied = load(minimal), load(minimal, ["model.tied_embeddings=false"])
    assert tied.parameters is not None
    assert untied.parameters == tied.parameters + 256 * 64


def test_plain_data_of_a_spec_is_a_copy_with_floats(minimal: Path) -> None:
    spec = load(minimal)
    spec.to_dict()["verify"]["reshard_to"].append(3)
    assert spec == load(minimal)
    spec = load(minimal, ["optimizer.lr=1", "train.max_norm=2", "model.rope_theta=500000"])
    values = (spec["optimizer"]["lr"], spec["train"]["max_norm"], spec["model"]["rope_theta"])
    assert all(isinstance(value, float) for value in values)


@cases(
    "override, expected",
    ("optimizer.lr=1e-3", ("optimizer", "lr", 1e-3)),
    (" optimizer.kind = sgd", ("optimizer", "kind", "sgd")),
    ("verify.reshard_to=[]", ("verify", "reshard_to", [])),
    ("verify.reshard_to=[1, 2]", ("verify", "reshard_to", [1, 2])),
    ("train.max_norm=null", ("train", "max_norm", None)),
    ("train.max_norm=", ("train", "max_norm", None)),
    ("checkpoint={directory: a=b, keep: 1}", ("checkpoint", "directory", "a=b")),
    ('checkpoint.directory="{{ x }}"', ("checkpoint", "directory", "{{ x }}")),
)
def test_override(minimal: Path, override: str, expected: tuple[str, str, Any]) -> None:
    section, key, value = expected
    assert load(minimal, [override]).to_dict()[section][key] == value
    minimal.write_text(MINIMAL.replace("steps: 20", "steps: many"))
    assert load(minimal, ["train.steps=1", "train.steps=20"])["train"]["steps"] == 20, (
        "the last one repairs a value"
    )


def test_an_override_of_the_kind_takes_the_keys_of_the_other_kind_away(minimal: Path) -> None:
    minimal.write_text(
        minimal.read_text() + "optimizer: {kind: adamw, lr: 0.5, betas: [0, 0], epps: 1}\n"
    )
    (unknown,) = problems(minimal, "optimizer.kind=sgd", "optimizer.momentum=0.5")
    assert unknown.startswith(
        "unknown key 'epps' in optimizer; known keys: kind, lr, weight_decay, momentum"
    )
    minimal.write_text(minimal.read_text().replace(", epps: 1", ", eps: x"))
    optimizer = load(minimal, ["optimizer.momentum=0.5", "optimizer.kind=sgd"]).to_dict()[
        "optimizer"
    ]
    assert (optimizer["kind"], optimizer["lr"], optimizer["momentum"]) == ("sgd", 0.5, 0.5)
    (asked,) = problems(minimal, "optimizer.eps=1", "optimizer.kind=sgd")
    assert all(word in asked for word in ("'eps'", "'sgd'", "adamw"))


@cases(
    "override, text",
    (
        "optimizer.lr=fast",
        "--set optimizer.lr: optimizer.lr must be a number, found the text 'fast'",
    ),
    ("optimizer.rl=1", "--set optimizer.rl: unknown key 'rl' in optimizer; did you mean 'lr'?"),
    ("train.steps", "--set train.steps: expected KEY=VALUE, as in --set optimizer.lr=1e-3"),
    ("=3", "--set : expected KEY=VALUE, as in --set optimizer.lr=1e-3"),
    ("train..steps=3", "--set train..steps: expected KEY=VALUE, as in --set optimizer.lr=1e-3"),
    ("name=[a", "--set name: not valid YAML: this bracket is not closed"),
    ("name=*a", "--set name: aliases ('*a') are not used in a spec; write the value out"),
    (
        "version.x=1",
        "--set version.x: cannot set version.x: version is not a mapping; set version as a whole",
    ),
    ("model.heads=3", "--set model.heads: model.heads must divide model.width 64, found 3"),
)
def test_wrong_override(minimal: Path, override: str, text: str) -> None:
    error = refused(minimal, override)
    first, written, _caret = str(error).splitlines()
    assert (first, written) == (text, f"    {override}")
    assert [problem.to_dict()["line"] for problem in error.problems] == [None]
    _, written, caret = str(refused(minimal, "verify.reshard_to=[1, two]")).splitlines()
    assert written[caret.index("^") :] == "two]", "the caret is under the value"


def test_problems_of_the_file_come_before_those_of_overrides(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "nmae: x\n")
    found = refused(minimal, "train.steps=x", "optimizer.lr=x").problems
    assert [problem.key for problem in found] == ["nmae", "train.steps", "optimizer.lr"]


def test_missing_file_folder_and_huge_file(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == ["no such file"]
    assert problems(tmp_path) == ["this is a folder, not a spec file"]
    assert problems(Path("/dev/zero")) == [
        "cannot be read: it is a character device, not a regular file"
    ]
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(1 << 32)
    assert problems(tmp_path / "huge.yaml") == ["larger than 64 KiB; this is not a spec"]
    assert issubclass(SpecError, UserError)


def test_many_problems_are_cut(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f"k{number}: 1\n" for number in range(500)), "spec.yaml")
    error = refused(path)
    assert str(error).endswith("... and 404 more problems") and len(error.problems) == 504


def text_spec(folder: Path, *files: str) -> Path:
    path = folder / "spec.yaml"
    path.write_text(MINIMAL.replace("{kind: synthetic}", f"{{kind: text, files: {list(files)!r}}}"))
    return path


def test_data_files_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a [b]"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "one.txt").write_text("one")
    path = text_spec(folder, "texts", "texts/*.txt", "texts/../texts/one.txt", "{stdlib}/abc.py")
    monkeypatch.chdir(tmp_path)
    files = load(Path("a [b]") / "spec.yaml").to_dict()["data"]["files"]
    assert files[3] == "{stdlib}/abc.py"
    monkeypatch.chdir("/")
    one = os.path.realpath(folder / "texts" / "one.txt")
    for pattern in files[:3]:
        assert [os.path.realpath(path) for path in data_files.matches(pattern)] == [one]
    assert path.exists()


def test_what_of_a_data_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").touch()
    (tmp_path / "texts" / "full.txt").write_text("text")
    load(text_spec(tmp_path, "texts", "texts/*.txt"))
    assert problems(text_spec(tmp_path, "texts/empty.txt")) == ["data.files[0] is an empty file"]
    os.mkfifo(tmp_path / "texts" / "pipe")
    load(text_spec(tmp_path, "texts"))
    text = "x" + "\u00e9" * data_files.MAX_READ  # the first mebibyte may end in a character
    (tmp_path / "long.txt").write_bytes(text.encode() + b"\xff")
    load(text_spec(tmp_path, "long.txt"))


@cases(
    "settings, found",
    (
        ["model.heads=3.0", "model.width=5", "train.micro_batch=x", "train.global_batch=7"],
        [
            "model.heads must be a whole number, found 3.0",
            "train.micro_batch must be a whole number, found the text",
        ],
    ),
    (
        ["parallel.dp_shard=1", "parallel.dp_replicat=2"],
        ["unknown key 'dp_replicat' in parallel; did you mean"],
    ),
)
def test_cross_checks_keep_quiet_about_invalid_values(
    minimal: Path, settings: list[str], found: list[str]
) -> None:
    assert all(a.startswith(b) for a, b in zip(problems(minimal, *settings), found, strict=True))


def test_one_rank_fits_every_mesh(minimal: Path) -> None:
    load(minimal, ["parallel.dp_replicate=2", "verify.reshard_to=[1, 4]"])
