"""The files of a project, and the texts of all files that runs name. Runs nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..evidence import Sources
from ..trace import Run
from .project import Files, text_of
from .roots import added, is_known, roots

_LIMIT = 200
_FILE = re.compile(r'File "([^"<]+)", line')


def project_files(
    script: Path, root: Path | None = None, files: Files | None = None
) -> tuple[Path, ...]:
    """The script and the files of its repository that it imports, directly or through one another;
    at most 200.

    `root` is where absolute imports are looked up first, where that is not the script's folder (a
    script run as a module).
    """
    files = Files() if files is None else files
    found = [script]
    if root is not None:
        packages = [
            folder / "__init__.py" for folder in script.parents if folder.is_relative_to(root)
        ]
        found += [file for file in packages if file.is_file() and file != script]
    bases = [*([root] if root is not None else []), *roots(script)]
    queue = list(found)
    while queue and len(found) < _LIMIT:
        path = queue.pop()
        module = files.module(path)
        if module is None:
            continue
        if more := [folder for folder in added(module.tree, path) if folder not in bases]:
            bases += more
            queue = [file for file in found if file != path]  # their imports may lead further now
        for file in _imported(module.tree, path, bases):
            if file not in found:
                found.append(file)
                queue.append(file)
    return tuple(found)


def _imported(tree: ast.Module, path: Path, bases: Sequence[Path]) -> Iterator[Path]:
    """The files that the imports of a file may run; for `from a import b` both a and a/b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _below(bases, alias.name)
        elif isinstance(node, ast.ImportFrom):
            inside = [path.parents[min(node.level, len(path.parents)) - 1]] if node.level else bases
            if node.module:
                yield from _below(inside, node.module)
            for alias in node.names:
                if alias.name != "*":
                    yield from _below(inside, f"{node.module or ''}.{alias.name}".strip("."))


def _below(bases: Sequence[Path], name: str) -> Iterator[Path]:
    """The files of `a` and `a.b` for `a.b`, in the first folder that has one of them: an import
    also runs the packages above.
    """
    parts = name.split(".")
    own = bases[:1] if is_known(parts[0]) else bases
    for base in own:
        steps = [base.joinpath(*parts[: number + 1]) for number in range(len(parts))]
        files = [
            [file for file in (step.with_suffix(".py"), step / "__init__.py") if file.is_file()]
            for step in steps
        ]
        if any(files):
            yield from (file for step in files for file in step)
            return


def with_named_files(sources: Sources, runs: Iterable[Run]) -> Sources:
    """The sources of a project, with every file that a frame of the runs names; what was read is
    not read again.
    """
    runs = list(runs)
    logs = [events for run in runs for events in run.progress.values()]
    calls = [events for run in runs for events in run.calls.values()]
    frames = [frame for events in logs for event in events for frame in event.frames]
    frames += [frame for events in calls for event in events for frame in event.frames]
    stacks = (text for run in runs for text in run.stacks.values())
    named = {str(frame[0]) for frame in frames} | {
        file for text in stacks for file in _FILE.findall(text)
    }
    files = dict.fromkeys([*sources.project, *sorted(named)])
    # a file that was empty or not there may have been written by a run
    texts = {file: sources.texts.get(file) or text_of(Path(file)) for file in files}
    return replace(sources, texts=texts)
