"""`fsdp2 update`: what only one side changed is taken, what both changed is marked, and nothing of
the user is lost.
"""

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from trees import Patch, Workshop, build_file_tree, failing, file_tree
from verified_fsdp2.skill.update import project

TEXT = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
MINE = TEXT.replace("two", "my two")
NEW = TEXT.replace("six", "new six")
BOTH = TEXT.replace("two", "my two").replace("six", "new six")
CLASH = TEXT.replace("two", "new two")
MARKED = f"""\
one
<<<<<<< a.py, yours
my two
=======
new two
>>>>>>> a.py, from its spec by fsdp2 {project.__version__}
three
four
five
six
seven
"""
EMPTIED = (
    f"<<<<<<< a.py, yours\n=======\n{NEW}>>>>>>> a.py, from its spec by fsdp2"
    f" {project.__version__}\n"
)
# as it was written, as the user left it, as it is rendered now -> what is said, what stands there,
# the exit code
CASES: dict[str, tuple[str | None, str | None, str | None, str, str | None, int]] = {
    "nothing changed": (TEXT, TEXT, TEXT, "", TEXT, 0),
    "only the user": (TEXT, MINE, TEXT, "kept", MINE, 0),
    "only the templates": (TEXT, TEXT, NEW, "updated", NEW, 0),
    "both, in other lines": (TEXT, MINE, NEW, "merged", BOTH, 0),
    "both, in the same lines": (TEXT, MINE, CLASH, "conflict", MARKED, 1),
    "both, alike": (TEXT, NEW, NEW, "", NEW, 0),
    "a new file": (None, None, NEW, "added", NEW, 0),
    "a new file where the user has one": (None, MINE, NEW, "in the way", MINE, 1),
    "a new file that is there already": (None, NEW, NEW, "", NEW, 0),
    "no longer needed": (TEXT, TEXT, None, "removed", None, 0),
    "no longer needed, but edited": (TEXT, MINE, None, "kept", MINE, 0),
    "no longer needed, and deleted": (TEXT, None, None, "", None, 0),
    "deleted": (TEXT, None, TEXT, "deleted", None, 0),
    "deleted, and changed": (TEXT, None, NEW, "deleted", None, 0),
    "emptied": (TEXT, "", NEW, "conflict", EMPTIED, 1),
    "an end without a line break": (
        TEXT,
        TEXT.removesuffix("\n"),
        CLASH,
        "merged",
        CLASH.removesuffix("\n"),
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("crlf", [False, True], ids=["lf", "crlf"])
def test_what_becomes_of_a_file(workshop: Workshop, name: str, crlf: bool) -> None:
    base, ours, theirs, action, expected, code = CASES[name]
    end = "\r\n" if crlf and ours else "\n"
    workshop.make(
        {"a.py": base, "tests/b.py": TEXT},
        {"a.py": ours and ours.replace("\n", end)},
        {"a.py": theirs},
    )
    dry = workshop.update("--dry-run", "--json", code=code).data
    report = workshop.update("--json", code=code).data
    assert dry == {**report, "dry_run": True}
    assert [(file["path"], file["action"]) for file in report["files"]] == (
        [("a.py", action)] if action else []
    )
    assert report["open"] == (["a.py"] if code else [])
    found = file_tree(workshop.out)
    base_files = {f".fsdp2/base/{path}.base" for path in ("tests/b.py", "spec.yaml")}
    assert found.get("a.py") == (expected.replace("\n", end).encode() if expected else None)
    assert found["tests/b.py"] == TEXT.encode()
    assert found.get(".fsdp2/base/a.py.base") == (theirs.encode() if theirs else None)
    beside = {"tests/b.py", "spec.yaml", ".fsdp2/manifest.json"} | base_files
    assert set(found) - {"a.py", ".fsdp2/base/a.py.base"} == beside
    if action == "conflict":
        build_file_tree(workshop.out, {"a.py": "solved\n"})
    assert workshop.settled()


def test_unsolved_conflicts_are_refused_by_line(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT, "b.py": TEXT}, {"a.py": MINE}, {"a.py": CLASH})
    assert "conflict    a.py  line 2: " in workshop.update(code=1).out
    assert f"{workshop.out}/a.py:2: a conflict" in workshop.refused(
        "update", "--set", "train.steps=30"
    )
    workshop.edit("a.py", "<<<<<<< a.py, yours\n", "")
    assert f"{workshop.out}/a.py:5: a conflict" in workshop.refused("update")


def test_random_edits_survive_a_change_of_the_spec(workshop: Workshop) -> None:
    """The spec changes every tenth line; the user edits, deletes and adds lines that lie
    between.
    """
    chance = random.Random(0)
    template = [f"line {number}" + ("" if number % 10 else " of {steps}") for number in range(60)]
    for round_ in range(10):
        workshop.out = workshop.out.with_name(f"run-{round_}")
        workshop.make({"a.py": "\n".join(template)})
        ours, expected = [], []
        for number, line in enumerate(template):
            what = (
                chance.choice(("keep", "edit", "delete", "add"))
                if number % 10 in range(2, 9)
                else "keep"
            )
            mine = f"mine {chance.random()}"
            edited = {"keep": [line], "edit": [mine], "delete": [], "add": [line, mine]}[what]
            ours += [text.replace("{steps}", "20") for text in edited]
            expected += [text.replace("{steps}", "77") for text in edited]
        build_file_tree(workshop.out, {"a.py": "\n".join(ours)})
        workshop.update("--set", "train.steps=77")
        assert workshop.read("a.py") == "\n".join(expected)


BYTES = b"one\n\xe9t\xe9\nthree\nfour\nfive\nsix\nseven\n"


def test_bytes_that_are_no_utf_8_survive(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT}, {"a.py": BYTES}, {"a.py": NEW})
    workshop.diff(code=1)
    workshop.update()
    assert file_tree(workshop.out)["a.py"] == BYTES.replace(b"six", b"new six")


OBSTACLES = {
    "not text": ({"a.py": "one\0two\n"}, "it is not text, so it is left as it is"),
    "a link": ({"elsewhere/a.py": TEXT, "a.py": Path("elsewhere/a.py")}, "a.py is a symbolic link"),
    "a dangling link": ({"a.py": Path("nowhere")}, "a.py is a symbolic link"),
    "a folder": ({"a.py": None, "a.py/mine.txt": "mine"}, "a.py is in the way: it must be a file"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_merged_is_left_alone_and_reported(workshop: Workshop, name: str) -> None:
    tree, message = OBSTACLES[name]
    workshop.make({"a.py": TEXT, "b.py": "{steps}\n"}, tree)
    mine = {
        path: data
        for path, data in file_tree(workshop.out).items()
        if path.startswith(("a.py", "elsewhere"))
    }
    workshop.update()
    workshop.diff(code=1)
    workshop.templates["a.py"] = NEW
    said = " ".join(workshop.update("--set", "train.steps=30", code=1).out.split())
    assert all(part in said for part in ("in the way a.py", message, ".fsdp2/base/a.py.base"))
    found = file_tree(workshop.out)
    assert mine.items() <= found.items()
    assert (found["b.py"], found[".fsdp2/base/a.py.base"]) == (b"30\n", NEW.encode())
    workshop.update()


def test_nothing_is_written_through_a_link_but_to_the_project(
    workshop: Workshop, tmp_path: Path
) -> None:
    workshop.make({"tests/a.py": TEXT})
    workshop.out.rename(tmp_path / "project")
    workshop.out.symlink_to(tmp_path / "project")
    workshop.templates["tests/a.py"] = MINE
    workshop.update()
    assert workshop.out.is_symlink() and workshop.read("tests/a.py") == MINE
    (workshop.out / "tests").rename(tmp_path / "elsewhere")
    (workshop.out / "tests").symlink_to(tmp_path / "elsewhere")
    workshop.templates["tests/a.py"] = NEW
    workshop.update(code=1)
    (tmp_path / "away").mkdir()
    (workshop.out / ".fsdp2").rename(tmp_path / "away" / ".fsdp2")
    (workshop.out / ".fsdp2").symlink_to(tmp_path / "away" / ".fsdp2")
    workshop.refused("update", "--set", "train.steps=30")


def test_without_git_only_what_was_not_edited_is_updated(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT, "b.py": TEXT}, {"a.py": MINE}, {"a.py": NEW, "b.py": NEW})
    with mock.patch("shutil.which", return_value=None):
        said = workshop.update(code=1).out
        assert "not merged  a.py  " in said and "install git" in said
        assert (workshop.read("a.py"), workshop.read("b.py")) == (MINE, NEW)
    workshop.update()
    assert workshop.read("a.py") == BOTH


def test_settings_of_git_and_repositories_around_have_no_say(
    workshop: Workshop, monkeypatch: Patch
) -> None:
    config = workshop.out.with_name("gitconfig")
    config.write_text("[merge]\n\tconflictStyle = diff3\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    workshop.make({"a.py": TEXT}, {"a.py": MINE}, {"a.py": CLASH})
    workshop.update(code=1)
    assert workshop.read("a.py") == MARKED


def test_permissions_and_empty_folders(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT, "deep/er/b.py": TEXT, "tests/c.py": TEXT})
    (workshop.out / "a.py").chmod(0o755)
    build_file_tree(workshop.out, {"tests/mine.py": MINE})
    workshop.templates = {"a.py": NEW}
    workshop.update()
    assert (workshop.out / "a.py").stat().st_mode & 0o777 == 0o755
    assert not (workshop.out / "deep").exists() and (workshop.out / "tests" / "mine.py").is_file()
    assert not (workshop.out / ".fsdp2" / "base" / "deep").exists()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("path", ["a.py", "new/b.py", ".fsdp2/manifest.json"])
def test_a_failure_half_way_leaves_all_as_it_was(
    workshop: Workshop, error: BaseException, path: str
) -> None:
    workshop.make({"a.py": TEXT, "c.py": TEXT, "d.py": TEXT}, {"d.py": MINE})
    workshop.templates = {"a.py": NEW, "new/b.py": NEW, "d.py": NEW}
    before = file_tree(workshop.out.parent)
    with failing(
        error, lambda source, target: str(target).endswith(path) and "new" in source.parts
    ):
        workshop.update(code={OSError: 2, KeyboardInterrupt: 130}[type(error)])
    assert file_tree(workshop.out.parent) == before and not (workshop.out / "new").exists()
    workshop.update()
    assert workshop.read("d.py") == BOTH


FAILURES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not moved aside": (
        lambda out: failing(PermissionError(1, "Not permitted"), lambda _, new: "old" in new.parts),
        "",
    ),
    "a folder that may not be written": (
        lambda out: mock.patch(
            "tempfile.mkdtemp", side_effect=PermissionError(13, "Permission denied", str(out))
        ),
        "cannot write {0}: Permission denied ({0})\n",
    ),
    "a full disk": (
        lambda out: mock.patch.object(
            Path, "write_bytes", side_effect=OSError(28, "No space left on device")
        ),
        "No space left on device",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_leaves_all_as_it_was(workshop: Workshop, name: str) -> None:
    make, said = FAILURES[name]
    workshop.make({"a.py": TEXT}, theirs={"a.py": NEW})
    with make(workshop.out):
        assert said.format(workshop.out) in workshop.refused("update")


def test_what_cannot_be_put_back_is_kept_and_reported(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT}, {"a.py": MINE}, {"a.py": NEW})
    with failing(
        OSError(5, "Input/output error"),
        lambda _, new: new.name == "a.py" and "old" not in new.parts,
    ):
        folder = Path(workshop.update(code=2).err.split("are in ")[1].strip())
    assert (folder / "a.py").read_text() == MINE


def test_an_interrupt_waits_until_all_is_in_place(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT, "b.py": TEXT})
    workshop.templates = {"a.py": NEW, "b.py": NEW}
    with failing(KeyboardInterrupt(), lambda *_: bool(signal.raise_signal(signal.SIGINT))):
        workshop.update(code=130)
    assert (workshop.read("a.py"), workshop.read("b.py")) == (NEW, NEW) and workshop.settled()


def test_what_is_printed(workshop: Workshop) -> None:
    workshop.make(
        {"a.py": TEXT, "b.py": TEXT, "c.py": TEXT, "README.md": "{steps} steps\n"},
        {"a.py": MINE, "b.py": MINE, "c.py": None},
        {"a.py": NEW, "d.py": NEW},
    )
    report = f"""\
updated {workshop.out}:
  merged      a.py       your edits are in it
  kept        b.py       only you changed it
  deleted     c.py       you deleted it; it stays deleted
  updated     README.md
  added       d.py
  updated     spec.yaml
next:
  fsdp2 verify {workshop.out}
"""
    assert workshop.update("--set", "train.steps=30").out == report
    report = f"""\
{workshop.out} is up to date with its spec
  kept        a.py  only you changed it
  kept        b.py  only you changed it
  deleted     c.py  you deleted it; it stays deleted
"""
    assert workshop.update().out == report


def test_the_version_that_wrote_the_project_is_reported_and_replaced(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT})
    workshop.edit(".fsdp2/manifest.json", f'"{project.__version__}"', '"0.0.9"')
    workshop.edit(".fsdp2/manifest.json", '"manifest": 1,', '"manifest": 1, "mine": {"a": [1]},')
    workshop.templates["a.py"] = NEW
    assert (
        f"updated {workshop.out} (from fsdp2 0.0.9 to {project.__version__}):"
        in workshop.update().out
    )
    report = json.loads(workshop.read(".fsdp2/manifest.json"))
    assert (report["generator"], report["mine"]) == (project.__version__, {"a": [1]})
