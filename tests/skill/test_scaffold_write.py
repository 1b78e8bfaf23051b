"""How a scaffold gets to disk: all of it or nothing, and never over what is the user's."""

import hashlib
import json
from pathlib import Path
from unittest import mock

import pytest

from trees import build_file_tree, failing
from trees import text_tree as tree
from verified_fsdp2 import __version__
from verified_fsdp2.skill import scaffold
from verified_fsdp2.verifier.errors import UserError

FILES = {"train.py": "a = 1\n", "tests/test_train.py": "b = 2\n"}


def test_files_manifest_and_bases(tmp_path: Path) -> None:
    scaffold.write(FILES, tmp_path / "a" / "b" / "out")
    found = tree(tmp_path / "a" / "b" / "out")
    bases = {f".fsdp2/base/{path}.base": text for path, text in FILES.items()}
    manifest = json.loads(found.pop(".fsdp2/manifest.json"))
    assert found == {**FILES, **bases}
    assert manifest["generator"] == __version__ and manifest["spec_version"] == 1
    assert manifest["files"]["train.py"] == hashlib.sha256(b"a = 1\n").hexdigest()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out"]


def test_an_empty_folder_is_filled_even_as_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    scaffold.write(FILES, Path())
    assert (tmp_path / "out" / "train.py").is_file() and Path("train.py").is_file()


def test_a_folder_in_use_needs_force_which_replaces_only_files_of_the_scaffold(
    tmp_path: Path,
) -> None:
    mine = {"mine.txt": "mine", "train.py": "old"}
    build_file_tree(tmp_path, mine)
    with pytest.raises(UserError, match="not empty"):
        scaffold.write(FILES, tmp_path)
    assert tree(tmp_path) == mine
    scaffold.write(FILES, tmp_path, force=True)
    assert tree(tmp_path).items() >= {**FILES, "mine.txt": "mine"}.items()


@pytest.mark.parametrize("force", [False, True])
def test_a_file_as_target_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="not a folder"):
        scaffold.write(FILES, tmp_path / "out", force=force)
    with pytest.raises(UserError, match="cannot write"):
        scaffold.write(FILES, tmp_path / "out" / "deeper", force=force)
    assert tree(tmp_path) == {"out": "mine"}


def test_nothing_is_written_through_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    build_file_tree(tmp_path, {"out/tests": tmp_path / "elsewhere"})
    with pytest.raises(UserError, match="in the way"):
        scaffold.write(FILES, tmp_path / "out", force=True)
    assert not list((tmp_path / "elsewhere").iterdir())


FULL = OSError(28, "No space left on device")


def test_a_failure_half_way_leaves_all_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    scaffold.write({"train.py": "old\n", "tests/test_train.py": "old\n"}, out)
    before = tree(out)
    with (
        failing(
            FULL,
            lambda source, _: source.name == "test_train.py" and source.parent.parent.name == "new",
        ),
        pytest.raises(UserError, match="No space left"),
    ):
        scaffold.write(FILES, out, force=True)
    assert tree(out) == before and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_of_a_fresh_write_leaves_nothing(tmp_path: Path) -> None:
    with (
        mock.patch.object(Path, "write_bytes", side_effect=FULL),
        pytest.raises(UserError, match="No space left"),
    ):
        scaffold.write(FILES, tmp_path / "out")
    assert not list(tmp_path.iterdir())
