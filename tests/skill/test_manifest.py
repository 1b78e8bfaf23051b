"""`.fsdp2`: what of it is refused, where, and with which fix."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from records import cases
from trees import Workshop, build_file_tree, file_tree
from verified_fsdp2 import __version__
from verified_fsdp2.skill.scaffold import manifest

HASH = "0" * 64
RIGHT: dict[str, Any] = {"manifest": 1, "spec_version": 1, "generator": __version__, "files": {}}
NEWER = (
    f"this project was written by the newer version 99.0; this is {__version__}: update"
    " verified-fsdp2 first"
)
PATH_WRONG = "is not a path of a file in the project"
BROKEN: dict[str, tuple[object, str]] = {
    "newer format": ({**RIGHT, "manifest": 2, "generator": "99.0"}, NEWER),
    "newer spec": ({**RIGHT, "spec_version": 2, "generator": "99.0"}, NEWER),
    "newer version": ({**RIGHT, "generator": "99.0"}, NEWER),
    "newer in all": ({"manifest": 7, "generator": "99.0"}, NEWER),
    "a list": ([], "it must be an object with the key 'manifest'"),
    "no format": ({}, "it must be an object with the key 'manifest'"),
    "format 0": ({**RIGHT, "manifest": 0}, "expected manifest 1, spec_version 1"),
    "no version": (
        {**RIGHT, "generator": None},
        "expected manifest 1, spec_version 1 and the generator's version",
    ),
    "no spec version": ({**RIGHT, "spec_version": "1"}, "expected manifest 1, spec_version 1"),
    "no files": ({**RIGHT, "files": ["a.py"]}, "'files' must map paths to hashes"),
    "no hash": ({**RIGHT, "files": {"a.py": 1}}, "'files' must map paths to hashes"),
    "upwards": ({**RIGHT, "files": {"../a.py": HASH}}, f"'../a.py' {PATH_WRONG}"),
    "upwards inside": ({**RIGHT, "files": {"b/../../a.py": HASH}}, PATH_WRONG),
    "absolute": ({**RIGHT, "files": {"/etc/passwd": HASH}}, f"'/etc/passwd' {PATH_WRONG}"),
    "its own folder": ({**RIGHT, "files": {".fsdp2/manifest.json": HASH}}, PATH_WRONG),
    "dot": ({**RIGHT, "files": {".": HASH}}, PATH_WRONG),
    "empty": ({**RIGHT, "files": {"": HASH}}, PATH_WRONG),
    "two spellings": ({**RIGHT, "files": {"./a.py": HASH}}, PATH_WRONG),
    "an escape": ({**RIGHT, "files": {"a\x1b[0m": HASH}}, PATH_WRONG),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manifest(workshop: Workshop, name: str) -> None:
    content, message = BROKEN[name]
    workshop.make({"a.py": "{steps}\n"}, {manifest.MANIFEST: json.dumps(content)})
    for command in ("diff", "update"):
        error = workshop.refused(command)
        assert error.startswith(f"{workshop.out}/.fsdp2/manifest.json: ") and message in error
        assert message == NEWER or "; restore .fsdp2/manifest.json" in error


@cases(
    "text, where",
    (b'{\n  "manifest": 1\nx}', ":3:1"),
    *((text, "") for text in (b"\xe9", b"[" * 100_000)),
    (b"", ":1:1"),
)
def test_a_manifest_that_is_no_json(workshop: Workshop, text: bytes, where: str) -> None:
    workshop.make({}, {manifest.MANIFEST: text})
    assert f"manifest.json{where}: not valid JSON: " in workshop.refused("update")


def test_no_project(workshop: Workshop, tmp_path: Path) -> None:
    assert workshop.refused("update") == f"{workshop.out}: no such folder\n"
    workshop.out.mkdir()
    assert "no .fsdp2/manifest.json" in workshop.refused("diff")
    workshop.out.rmdir()
    workshop.out.write_text("")
    assert workshop.refused("diff") == f"{workshop.out}: not a folder\n"


def test_a_base_that_is_missing_or_edited(workshop: Workshop) -> None:
    workshop.make({"a.py": "a\n", "b.py": "b\n", "c.py": "c\n", "d.py": "d\n"})
    bases = {f".fsdp2/base/{name}.py.base": None for name in "ac"} | {
        ".fsdp2/base/b.py.base": "edited\n"
    }
    build_file_tree(
        workshop.out,
        {**bases, ".fsdp2/base/d.py.base": "d\r\n", "a.py": "mine\n", "b.py": "mine\n"},
    )
    for command in ("diff", "update"):
        lines = workshop.refused(command).splitlines()
        fix = (
            "; without it fsdp2 cannot distinguish your edits of the file from its own text;"
            " restore .fsdp2 from version control"
        )
        assert lines == [
            f"{workshop.out}/.fsdp2/base/a.py.base is missing{fix}",
            (
                f"{workshop.out}/.fsdp2/base/b.py.base is not what the manifest says: it was"
                f" edited{fix}"
            ),
        ]


def test_the_base_of_a_file_that_nobody_edited_is_the_file(workshop: Workshop) -> None:
    workshop.make({"a.py": "a\n"})
    whole = file_tree(workshop.out)
    build_file_tree(workshop.out, {".fsdp2/base/a.py.base": None})
    workshop.diff()
    workshop.update()
    assert file_tree(workshop.out) == whole


@cases(
    "version, newer",
    ("0.0.9", False),
    (__version__, False),
    ("copy " + __version__, False),
    ("10.0", True),
)
def test_versions_are_numbers(tmp_path: Path, version: str, newer: bool) -> None:
    build_file_tree(tmp_path, {manifest.MANIFEST: json.dumps({**RIGHT, "generator": version})})
    with (
        pytest.raises(manifest.UserError, match=r"newer version 10\.0") if newer else nullcontext()
    ):
        assert manifest.read(tmp_path).generator == version
