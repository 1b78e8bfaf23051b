"""Folders as dictionaries, and a project whose templates a test can change."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import pytest
import yaml

from records import Patch
from scripts import Command, Done
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import Spec, load
from verified_fsdp2.skill.spec.dump import to_yaml

Generate = Callable[..., ModuleType]  # what the fixture `generate` gives
DECODER = {
    "kind": "decoder",
    "layers": 2,
    "width": 32,
    "heads": 2,
    "vocabulary": 64,
    "sequence_length": 16,
}
SMALL = {  # a decoder that learns quickly
    "version": 1,
    "model": DECODER,
    "data": {"kind": "synthetic", "samples": 128},
    "precision": {"param_dtype": "float32"},
    "optimizer": {"lr": 0.01},
}
SPEC = """\
version: 1
model: {kind: decoder, layers: 1, width: 32, heads: 2, vocabulary: 64, sequence_length: 16}
data: {kind: synthetic}
train: {steps: 20, global_batch: 8}
"""


def build_file_tree(folder: Path, tree: Mapping[str, str | bytes | Path | None]) -> None:
    """Write these files; a Path becomes a symbolic link to it, None removes the file."""
    for name, content in tree.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(place):
            place.unlink()
        if isinstance(content, Path):
            place.symlink_to(content)
        elif content is not None:
            place.write_bytes(content.encode() if isinstance(content, str) else content)


def file_tree(folder: Path) -> dict[str, bytes]:
    """All files below the folder; a link is shown by where it leads."""
    found = {}
    for place in sorted(folder.rglob("*")):
        if place.is_symlink():
            found[str(place.relative_to(folder))] = b"-> " + os.fsencode(place.readlink())
        elif place.is_file():
            found[str(place.relative_to(folder))] = place.read_bytes()
    return found


def text_tree(folder: Path) -> dict[str, str]:
    return {path: data.decode() for path, data in file_tree(folder).items()}


def write_project(folder: Path, written: Mapping[str, Any], *settings: str) -> Path:
    """The project of this spec with these settings, in a folder `project` beside its spec."""
    (folder / "spec.yaml").write_text(yaml.safe_dump(written))
    scaffold.write(scaffold.render(load(folder / "spec.yaml", settings)), folder / "project")
    return folder / "project"


def code_of(script: ModuleType, *arguments: object) -> int:
    """What `main` of a generated script exits with."""
    with mock.patch.object(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)]):
        try:
            script.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@contextmanager
def failing(error: BaseException, fails: Callable[[Path, Path], bool]) -> Iterator[None]:
    """A move for which fails(source, target) holds raises this error."""
    rename = Path.rename

    def raising(self: Path, target: Path) -> Path:
        if fails(self, target):
            raise error
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", raising)
        yield


class Workshop:
    """A project `my-run` of a few small files, written by templates in which {steps} is train.steps
    of the spec.
    """

    def __init__(self, folder: Path, monkeypatch: Patch, command: Command) -> None:
        self.out, self.command = folder / "my-run", command
        self.templates: dict[str, str | None] = {}
        self.header = "# a spec\n"
        monkeypatch.setattr(scaffold, "render", self.render)
        self.spec = folder / "spec.yaml"
        self.spec.write_text(SPEC)

    def render(self, spec: Spec, out: Path | None = None) -> dict[str, str]:
        files = {path: text for path, text in self.templates.items() if text is not None}
        texts = {
            path: text.replace("{steps}", str(spec["train"]["steps"]))
            for path, text in files.items()
        }
        return {**texts, "spec.yaml": self.header + to_yaml(spec.as_written())}

    def make(
        self,
        templates: Mapping[str, str | None],
        ours: Mapping[str, str | bytes | Path | None] = MappingProxyType({}),
        theirs: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        """Write the project with these templates; then the user leaves `ours`, and the templates
        change to `theirs`.
        """
        self.templates = dict(templates)
        scaffold.write(self.render(load(self.spec)), self.out)
        build_file_tree(self.out, ours)
        self.templates |= theirs

    def update(self, *words: object, code: int = 0) -> Done:
        return self.command("update", self.out, *words, code=code)

    def diff(self, *words: object, code: int = 0) -> Done:
        return self.command("diff", self.out, *words, code=code)

    def refused(self, command: str, *words: object) -> str:
        """The error of `update` or `diff`, which changes nothing."""
        before = file_tree(self.out.parent)
        error = self.command(command, self.out, *words, code=2).err
        assert file_tree(self.out.parent) == before
        return error

    def settled(self) -> bool:
        """Whether another update changes nothing."""
        before = file_tree(self.out)
        self.update()
        return file_tree(self.out) == before

    def read(self, path: str) -> str:
        return (self.out / path).read_text()

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace a piece that stands there once."""
        text = self.read(path)
        assert text.count(old) == 1
        (self.out / path).write_text(text.replace(old, new))
