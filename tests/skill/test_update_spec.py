"""`fsdp2 update` and the spec: its values change, and what the user wrote beside them stays."""

from pathlib import Path

import pytest
import yaml

from records import cases
from scripts import Command, written
from trees import SPEC, Workshop, build_file_tree, file_tree
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import load, parse, rewrite

FILES = {"a.py": "STEPS = {steps}\n"}


@pytest.fixture
def workshop(workshop: Workshop) -> Workshop:
    workshop.make(FILES)
    return workshop


def test_an_edit_of_spec_yaml_is_followed_and_left_as_it_is(workshop: Workshop) -> None:
    workshop.edit(
        "spec.yaml",
        "  steps: 20\n",
        "  # long enough\n  steps: 4_0  # epochs\n".replace("4_0", "40"),
    )
    workshop.edit("spec.yaml", "  lr: 0.0003\n", "  lr: 3e-4\n")
    workshop.edit("spec.yaml", "  seed: 0\n", "")
    mine = workshop.read("spec.yaml")
    workshop.update()
    assert (workshop.read("a.py"), workshop.read("spec.yaml")) == (
        "STEPS = 40\n",
        mine,
    ) and workshop.settled()


def test_set_changes_the_value_and_keeps_the_comments(workshop: Workshop) -> None:
    workshop.edit("spec.yaml", "  steps: 20\n", "  # long enough\n  steps: 20  # epochs\n")
    workshop.edit("spec.yaml", "betas: [0.9, 0.95]\n", "betas: [0.9, 0.95]   # as usual\n")
    mine = workshop.read("spec.yaml")
    workshop.update("--set", "train.steps=77", "--set", "optimizer.betas=[0.8, 0.9]")
    assert workshop.read("spec.yaml") == mine.replace("steps: 20", "steps: 77").replace(
        "[0.9, 0.95]", "[0.8, 0.9]"
    )
    assert workshop.read("a.py") == "STEPS = 77\n"
    workshop.diff(code=1)  # the comments


@cases("git", True, False)
def test_set_of_a_key_that_was_left_out(
    workshop: Workshop, git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.edit("spec.yaml", "  seed: 0\n", "")
    if not git:
        monkeypatch.setattr("shutil.which", lambda name: None)
    workshop.update("--set", "train.seed=5")
    assert load(workshop.out / "spec.yaml")["train"]["seed"] == 5


def test_set_after_a_minimal_spec_was_put_there(workshop: Workshop) -> None:
    (workshop.out / "spec.yaml").write_text(SPEC + "# my comment\n")
    workshop.update()
    workshop.update("--set", "train.steps=30", "--set", "model.width=64")
    text = workshop.read("spec.yaml")
    assert "# my comment" in text and "steps: 30" in text and "width: 64" in text
    assert workshop.read("a.py") == "STEPS = 30\n"


def test_auto_follows_what_it_is_made_from(workshop: Workshop) -> None:
    assert "  ffn: auto\n" in workshop.read("spec.yaml") and "  kv_heads: auto\n" in workshop.read(
        "spec.yaml"
    )
    workshop.update("--set", "model.width=384", "--set", "model.heads=4")
    model = load(workshop.out / "spec.yaml").to_dict()["model"]
    assert (model["ffn"], model["kv_heads"]) == (1024, 4)
    workshop.update("--set", "model.kv_heads=2", "--set", "model.width=192")
    assert "  ffn: auto\n" in workshop.read("spec.yaml") and "  kv_heads: 2\n" in workshop.read(
        "spec.yaml"
    )


def test_another_kind_changes_the_keys(workshop: Workshop) -> None:
    workshop.edit("spec.yaml", "  steps: 20\n", "  steps: 20  # mine\n")
    kind = ["--set", "optimizer.kind=sgd"]
    workshop.update("--set", "optimizer.eps=1e-8", *kind, code=2)
    workshop.update("--set", "optimizer.momentum=0.5", *kind)
    text = workshop.read("spec.yaml")
    assert "momentum: 0.5" in text and "betas" not in text and "steps: 20  # mine" in text

    workshop.edit("spec.yaml", "  lr: 0.0003\n", "  lr: 3e-4  # mine\n")
    workshop.update("--set", "schedule.kind=constant", "--set", "schedule.warmup_steps=3")
    text = workshop.read("spec.yaml")
    assert "lr: 3e-4  # mine\n" in text and "  kind: constant\n  warmup_steps: 3\ntrain:" in text


def test_a_comment_on_a_key_that_goes_is_a_conflict(workshop: Workshop) -> None:
    workshop.edit("spec.yaml", "betas: [0.9, 0.95]\n", "betas: [0.9, 0.95]  # as usual\n")
    sgd = written(
        workshop.spec.parent, SPEC + "optimizer: {kind: sgd, momentum: 0.5}\n", "sgd.yaml"
    )
    assert "conflict    spec.yaml  line " in workshop.update("--spec", sgd, code=1).out
    text = workshop.read("spec.yaml")
    assert "betas: [0.9, 0.95]  # as usual\n" in text and "<<<<<<< spec.yaml, yours\n" in text
    line = text[: text.index("<<<<<<<")].count("\n") + 1
    assert f"{workshop.out}/spec.yaml:{line}: a conflict" in workshop.refused("diff")
    (workshop.out / "spec.yaml").write_bytes(file_tree(workshop.out)[".fsdp2/base/spec.yaml.base"])
    workshop.diff()


def test_values_that_new_templates_add_come_into_an_edited_spec(workshop: Workshop) -> None:
    base = workshop.read("spec.yaml")
    old = base.replace("  seed: 0\n", "").replace("  dry_run: true\n", "")
    workshop.header = "# another version\n"
    # as if written by a version without these two keys
    scaffold.write({"a.py": "STEPS = 20\n", "spec.yaml": old}, workshop.out, force=True)
    workshop.edit("spec.yaml", "  steps: 20\n", "  steps: 20  # mine\n")
    workshop.update()
    new = base.replace("  steps: 20\n", "  steps: 20  # mine\n").replace(
        "# a spec\n", "# another version\n"
    )
    assert workshop.read("spec.yaml") == new


def test_another_spec_with_data_beside_it(workshop: Workshop, tmp_path: Path) -> None:
    text = SPEC.replace("{kind: synthetic}", "{kind: text, files: [a.txt]}").replace("64", "256")
    build_file_tree(tmp_path, {"elsewhere/a.txt": "some text\n" * 10, "elsewhere/spec.yaml": text})
    workshop.update("--spec", tmp_path / "elsewhere/spec.yaml")
    files = yaml.safe_load(workshop.read("spec.yaml"))["data"]["files"]
    assert files == [str(tmp_path / "elsewhere" / "a.txt")]
    build_file_tree(workshop.out, {"b.txt": "other text\n" * 10})
    workshop.edit("spec.yaml", files[0], "b.txt  # mine")
    workshop.update()
    assert "- b.txt  # mine\n" in workshop.read("spec.yaml")
    workshop.update("--set", "train.steps=30")
    assert "- b.txt  # mine\n" in workshop.read("spec.yaml") and "steps: 30\n" in workshop.read(
        "spec.yaml"
    )


def test_a_spec_that_is_not_valid_any_more(workshop: Workshop) -> None:
    workshop.edit("spec.yaml", "  seed: 0\n", "  sead: 0\n")
    line = workshop.read("spec.yaml")[: workshop.read("spec.yaml").index("sead")].count("\n") + 1
    for command in ("diff", "update"):
        error = workshop.refused(command)
        assert (
            f"{workshop.out}/spec.yaml:{line}:3: unknown key 'sead' in train; did you mean 'seed'?"
            in error
        )
        assert error.endswith(": --spec FILE\n")
    workshop.update("--spec", workshop.spec, code=1)
    marked = workshop.read("spec.yaml")
    assert (
        "<<<<<<< spec.yaml, yours\n  sead: 0\n=======\n  seed: 0\n>>>>>>> spec.yaml, from" in marked
    )
    assert marked.count("<<<<<<<") == 1


def test_a_wrong_setting_is_reported_without_the_hint(workshop: Workshop) -> None:
    error = workshop.refused("update", "--set", "train.steps=none")
    assert "--set train.steps: " in error and "--spec" not in error


def test_a_missing_spec(workshop: Workshop) -> None:
    build_file_tree(workshop.out, {"spec.yaml": None})
    assert f"copy {workshop.out}/.fsdp2/base/spec.yaml.base there" in workshop.refused("update")
    workshop.update("--spec", workshop.spec, "--set", "train.steps=30")
    assert load(workshop.out / "spec.yaml")["train"]["steps"] == 30
    build_file_tree(workshop.out, {"spec.yaml": None, "spec.yaml/a": ""})
    assert "spec.yaml is in the way" in workshop.refused("update", "--spec", workshop.spec)


def test_a_spec_that_is_a_link_is_read_but_not_written(workshop: Workshop) -> None:
    (workshop.out / "spec.yaml").unlink()
    (workshop.out / "spec.yaml").symlink_to(workshop.spec)
    workshop.spec.write_text(SPEC.replace("steps: 20", "steps: 30"))
    workshop.update()
    assert workshop.read("a.py") == "STEPS = 30\n" and (workshop.out / "spec.yaml").is_symlink()
    assert f"edit {workshop.spec} yourself" in workshop.refused("update", "--set", "train.steps=40")
    assert "steps: 30" in workshop.spec.read_text()


@cases("setting, code", ("train.steps=30", 0), ("optimizer.groups=[{match: norm, lr: 1e-5}]", 2))
def test_without_git(
    workshop: Workshop, setting: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.edit("spec.yaml", "  steps: 20\n", "  steps: 20  # mine\n")
    before = file_tree(workshop.out)
    monkeypatch.setattr("shutil.which", lambda name: None)
    workshop.update("--set", setting, code=code)
    assert (file_tree(workshop.out) == before) == bool(code)


def test_spec_yaml_with_windows_line_ends(workshop: Workshop) -> None:
    text = (
        workshop.read("spec.yaml")
        .replace("  steps: 20\n", "  steps: 20  # mine\n")
        .replace("\n", "\r\n")
    )
    build_file_tree(workshop.out, {"spec.yaml": text})
    workshop.update("--set", "train.steps=30")
    assert file_tree(workshop.out)["spec.yaml"] == text.replace("steps: 20", "steps: 30").encode()


@cases(
    "text, before, after, expected",
    ("a:\n  b: 1  # c\n", {"a": {"b": 1}}, {"a": {"b": 2}}, "a:\n  b: 2  # c\n"),
    ("a: {b: 1, c: x}\n", {"a": {"b": 1}}, {"a": {"b": 2}}, "a: {b: 2, c: x}\n"),
    ("a:  # empty\n", {"a": None}, {"a": "x"}, "a: x  # empty\n"),
    ("a: 'x'\n", {"a": "x"}, {"a": "1"}, 'a: "1"\n'),
    ("a:\n- x  # one\n- y\n", {"a": ["x", "y"]}, {"a": ["x", "z"]}, "a:\n- x  # one\n- z\n"),
    ("a: [1, 2]  # c\n", {"a": [1, 2]}, {"a": [1, 2, 3]}, "a: [1, 2, 3]  # c\n"),
    ("a:\n- 1\n", {"a": [1]}, {"a": [1, 2]}, "a:\n- 1\n"),
    (
        "# c\na:\n  b: 1\n",
        {"a": {"b": 1, "d": 0}},
        {"a": {"b": 1, "d": 2}},
        "# c\na:\n  d: 2\n  b: 1\n",
    ),
    ("a: 1\n", {"a": 1}, {"b": 1}, "a: 1\n"),
)
def test_rewritten(
    text: str, before: dict[str, object], after: dict[str, object], expected: str
) -> None:
    assert rewrite.rewritten(text, before, after) == expected


def test_real_templates(tmp_path: Path, command: Command) -> None:
    """Two updates of a project with edits give what a new project of the last spec has, and the
    edits.
    """
    build_file_tree(tmp_path, {"spec.yaml": SPEC})
    out = tmp_path / "out"
    command("new", tmp_path / "spec.yaml", out, code=0)
    with (out / "train.py").open("a") as file:
        file.write("# mine\n")
    settings = [
        "train.steps=30",
        "optimizer.kind=adamw",
        "train.max_norm=null",
        "checkpoint.mode=thread",
    ]
    for some in (settings[:1], settings[1:]):
        command("update", out, *[word for text in some for word in ("--set", text)], code=0)
    spec = parse((tmp_path / "spec.yaml").read_bytes(), tmp_path / "spec.yaml", settings)
    for path, text in scaffold.render(spec).items():
        assert (out / path).read_text() == text + ("# mine\n" if path == "train.py" else "")
    assert command("diff", out, "--stat", code=1).out.split() == [
        "edited",
        "train.py",
        "yours",
        "+1",
        "-0",
    ]
