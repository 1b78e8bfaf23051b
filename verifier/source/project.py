"""The files of a verification, each read and parsed once, and a script with the modules of its
repository that it imports.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..config.reading import inputs, script
from ..errors import UserError
from ..evidence import Sources
from . import roots
from .values import Value

# Files that are followed from one script: what lies beyond is reported as not followed, and is no
# pass.
LIMIT = 200  # files that are followed from one script

# Old and private paths of what is public today; the longest match counts. Detectors compare with
# the short prefixes.
_DIST, _DCP = "torch.distributed", "torch.distributed.checkpoint"
_PATHS = {
    "fsdp": (f"{_DIST}._composable.fsdp", f"{_DIST}.fsdp", f"{_DIST}.fsdp._fully_shard"),
    "ac": (
        *(
            f"{_DIST}._composable.checkpoint_activation",
            f"{_DIST}.algorithms._checkpoint.checkpoint_wrapper",
        ),
        "torch.utils.checkpoint",
    ),
    "dsd": (f"{_DCP}.state_dict",),
    "dcp": (
        _DCP,
        *(
            f"{_DCP}.{n}"
            for n in ("state_dict_saver", "state_dict_loader", "default_planner", "filesystem")
        ),
    ),
    "tensor": (f"{_DIST}._tensor", f"{_DIST}.tensor"),
    "tp": (f"{_DIST}.tensor.parallel",),
    "dist": (_DIST, f"{_DIST}.device_mesh", f"{_DIST}.distributed_c10d"),
    "dist.nn": (f"{_DIST}.nn.functional",),
    "data": ("torch.utils.data", "torch.utils.data.distributed", "torch.utils.data.dataloader"),
    "F": ("torch.nn.functional",),
    "torch.nn.utils": ("torch.nn.utils.clip_grad",),
    "torch.nn": ("torch.nn.parameter", "torch.nn.modules"),
    "torch.nn.parallel": ("torch.nn.parallel.distributed",),
    "torch.optim": ("torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd"),
    "torch.amp": ("torch.cuda.amp",),
}
_CANONICAL = {path: short for short, paths in _PATHS.items() for path in paths}


@functools.lru_cache(maxsize=1 << 15)
def canonical(name: str) -> str:
    """`torch.distributed._composable.fsdp.fully_shard` -> `fsdp.fully_shard`."""
    if not name.startswith("torch."):
        return name
    head = name
    while head:
        if head in _CANONICAL:
            short = _CANONICAL[head] + name[len(head) :]
            return "fsdp." + short.rpartition(".")[2] if short.startswith("fsdp.") else short
        head = head.rpartition(".")[0]
    return name


class ClassInfo:
    """A class of the project: its own methods, its annotated fields and all its variables by name,
    and its bases.
    """

    def __init__(self, node: ast.ClassDef, home: Module) -> None:
        self.node, self.home, self.name, self.bases = node, home, node.name, node.bases
        if node not in home.classes:
            home.classes[node] = _members(node)
        self.methods, self.fields, self.variables, self._marks = home.classes[node]
        # the class and its project bases, once all of them are known
        self.line: list[ClassInfo] = []
        self.strange: list[Value] | None = None  # the other bases

    def marks(self, name: str) -> set[str]:
        """The last parts of the names of a method's decorators."""
        if name not in self._marks:
            self._marks[name] = {
                ast.unparse(d).rpartition(".")[2] for d in self.methods[name].decorator_list
            }
        return self._marks[name]

    def method(self, name: str, bound: Any) -> Value:
        """One of its methods, bound to an object or class, or to None."""
        return Value(
            "def",
            f"{self.name}.{name}",
            const=bound,
            node=self.methods[name],
            home=(self.home, None),
        )


_Methods = dict[str, ast.FunctionDef | ast.AsyncFunctionDef]
_Values = dict[str, ast.expr | None]
_Members = tuple[_Methods, _Values, _Values, dict[str, set[str]]]


def _members(node: ast.ClassDef) -> _Members:
    """(methods, annotated fields, variables, names of the methods' decorators as they are asked
    for) of a class.
    """
    methods: _Methods = {}
    fields: _Values = {}
    variables: _Values = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            methods[item.name] = item
        elif isinstance(item, ast.Assign | ast.AnnAssign):
            for target in item.targets if isinstance(item, ast.Assign) else [item.target]:
                if isinstance(target, ast.Name):
                    variables.setdefault(target.id, item.value)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields[item.target.id] = item.value
    return methods, fields, variables, {}


def parse(path: Path) -> Module:
    """The parsed file. Raises UserError, with the place, if it cannot be read as Python."""
    return Module(path, *script.parse(path))


def text_of(path: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return inputs.text(path, inputs.SCRIPT)
    except (OSError, ValueError):
        return ""


class Module:
    """One parsed file."""

    def __init__(self, path: Path, source: str, tree: ast.Module) -> None:
        self.path, self.source, self.tree = path, source, tree
        self.lines = source.splitlines()
        self.names: dict[str, Any] = {}  # the module's globals, once it has been followed
        self.state = ""  # "", "running", "done"
        self.classes: dict[ast.ClassDef, _Members] = {}
        self.adds_folders = "sys.path" in source or "addsitedir" in source

    @property
    def installed(self) -> bool:
        """Whether it is a library's file, of which only the calls that a script makes are
        followed.
        """
        return not {"site-packages", "dist-packages"}.isdisjoint(self.path.parts)

    def code(self, line: int) -> str:
        """The text of a line, stripped."""
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""


class Files:
    """The files of one verification, each read and parsed once, and where modules lie: what all
    its projects ask.
    """

    def __init__(self, scripts: Iterable[Path] = ()) -> None:
        """Raises UserError if one of the scripts cannot be read as Python."""
        self._read: dict[Path, Module | None] = {path: parse(path) for path in scripts}
        self.places: dict[tuple[str, str], Path | None] = {}
        self.packages: dict[tuple[str, str], bool] = {}
        self.roots: dict[Path, list[Path]] = {}  # of the scripts in a folder
        self._entries: dict[str, frozenset[str]] = {}

    @classmethod
    def of(cls, sources: Sources) -> Files:
        """Those of the project that were read before; what lies where is looked up anew."""
        files = cls()
        for name in sources.project:
            tree, path = sources.tree(name), Path(name)
            if tree.body:  # else it may be no Python
                files._read[path] = Module(path, sources.texts[name], tree)
        return files

    def module(self, path: Path) -> Module | None:
        """The parsed file, or None if it cannot be read as Python."""
        if path not in self._read:
            try:
                self._read[path] = parse(path)
            except UserError:
                self._read[path] = None
        return self._read[path]

    def text(self, path: Path) -> str:
        """The text of a file, Python or not; "" if it cannot be read."""
        module = self.module(path)
        return text_of(path) if module is None else module.source

    def sources(self, project: Sequence[Path]) -> Sources:
        """What judging needs of the files of a project, the script first."""
        texts = {str(path): self.text(path) for path in project}
        read = (module for path in project if (module := self.module(path)) is not None)
        return Sources(texts, tuple(texts), {module.source: module.tree for module in read})

    def has(self, base: Path, top: str) -> bool:
        """Whether a package or module of that name lies in a folder."""
        key = (str(base), top)
        if key not in self.packages:
            self.packages[key] = self.may_have(base, top) and (
                (base / top).is_dir() or (base / f"{top}.py").is_file()
            )
        return self.packages[key]

    def may_have(self, base: Path, top: str) -> bool:
        """Whether a folder has an entry of a module's name: most imports are looked up in many
        folders, and are in none.
        """
        key = str(base)
        if key not in self._entries:
            readable = os.access(base, os.R_OK) and base.is_dir()
            self._entries[key] = frozenset(os.listdir(base) if readable else ())  # noqa: PTH208
        return top in self._entries[key] or f"{top}.py" in self._entries[key]

    def file_of(self, base: Path, dotted: str) -> Path | None:
        """The file of a module below a folder."""
        key = (str(base), dotted)
        if key not in self.places:
            place = base.joinpath(*dotted.split(".")) if dotted else base
            files = [place.with_suffix(".py")] if dotted else []
            self.places[key] = next(
                (path for path in (*files, place / "__init__.py") if path.is_file()), None
            )
        return self.places[key]


class Project:
    """A script and what can be imported from its repository, parsed when it is needed.

    A `lazy` project follows what it imports only as far as it uses it.
    """

    def __init__(self, script: Path, files: Files | None = None, lazy: bool = False) -> None:
        self.folder, self.lazy = script.parent, lazy
        self.files = Files() if files is None else files
        if self.folder not in self.files.roots:
            self.files.roots[self.folder] = roots.roots(script)
        self.bases = [*self.files.roots[self.folder]]
        self.modules: list[Module] = []
        self._met: set[Module] = set()  # the same
        self.unread: dict[str, str] = {}  # by dotted name: why a file that is there was not read
        # what `find` gave, as long as `bases` stay
        self._found: dict[tuple[str, Path | None, int], Module | None] = {}
        # those of `bases` that may have a module or package of a name
        self._having: dict[str, list[Path]] = {}
        self.script = self.module_at(script)

    def module_at(self, path: Path) -> Module | None:
        """The parsed file, or None if it cannot be read as Python or lies beyond the limit."""
        module = self.files.module(path)
        if module is not None and module not in self._met:
            if len(self.modules) >= LIMIT:
                return None
            self._met.add(module)
            module.names, module.state = {}, ""
            self.modules.append(module)
            if module.adds_folders:
                self.bases += [
                    folder for folder in roots.added(module.tree, path) if folder not in self.bases
                ]
                self._found.clear()
                self._having.clear()
        return module

    def find(self, dotted: str, importer: Path, level: int = 0) -> Module | None:
        """The project's module of that name, as the importer would find it."""
        key = (dotted, importer if level else None, level)
        if key not in self._found:
            found = self._find(dotted, importer, level)  # it may add to `bases`
            self._found[key] = found
        return self._found[key]

    def _find(self, dotted: str, importer: Path, level: int) -> Module | None:
        for base in self._bases(dotted, importer, level):
            path = self.files.file_of(base, dotted)
            if path is not None:
                module = self.module_at(path)
                if module is None:
                    full = self.files.module(path) is not None
                    why = f"lies beyond the limit of {LIMIT} files" if full else "is not Python"
                    self.unread["." * level + dotted] = why
                return module
        return None

    def has(self, top: str) -> bool:
        """Whether a package or module of that name lies in the project."""
        return any(self.files.has(base, top) for base in self.bases)

    def _bases(self, dotted: str, importer: Path, level: int) -> list[Path]:
        """Where a module of this name may lie.

        Names of Python and torch are never those of another folder.
        """
        if level:
            return [importer.parents[level - 1]] if level <= len(importer.parents) else []
        top = dotted.partition(".")[0]
        if top not in self._having:
            bases = [self.folder] if roots.is_known(top) else self.bases
            self._having[top] = [base for base in bases if self.files.may_have(base, top)]
        return self._having[top]
