"""A script and the modules of its repository that it imports: each parsed once, its imports resolved to dotted names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from ..config.reading import script
from ..errors import UserError
from . import roots

LIMIT = 200  # files that are followed from one script

# Old and private paths of what is public today; the longest match counts. Short prefixes are what the detectors compare with.
_CANONICAL = {
    "torch.distributed._composable.fsdp": "fsdp",
    "torch.distributed.fsdp._fully_shard": "fsdp",
    "torch.distributed.fsdp": "fsdp",
    "torch.distributed._composable.checkpoint_activation": "ac",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "ac",
    "torch.distributed.checkpoint.state_dict": "dsd",
    "torch.distributed.checkpoint.state_dict_saver": "dcp",
    "torch.distributed.checkpoint.state_dict_loader": "dcp",
    "torch.distributed.checkpoint.default_planner": "dcp",
    "torch.distributed.checkpoint.filesystem": "dcp",
    "torch.distributed.checkpoint": "dcp",
    "torch.distributed._tensor": "tensor",
    "torch.distributed.tensor": "tensor",
    "torch.distributed.tensor.parallel": "tp",
    "torch.distributed.device_mesh": "dist",
    "torch.distributed.distributed_c10d": "dist",
    "torch.distributed.nn.functional": "dist.nn",
    "torch.distributed": "dist",
    "torch.utils.data.distributed": "data",
    "torch.utils.data.dataloader": "data",
    "torch.utils.data": "data",
    "torch.utils.checkpoint": "ac",
    "torch.nn.functional": "F",
    "torch.nn.utils.clip_grad": "torch.nn.utils",
    "torch.nn.parameter": "torch.nn",
    "torch.nn.modules": "torch.nn",
    "torch.nn.parallel.distributed": "torch.nn.parallel",
    "torch.optim.adam": "torch.optim",
    "torch.optim.adamw": "torch.optim",
    "torch.optim.sgd": "torch.optim",
    "torch.cuda.amp": "torch.amp",
}


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
    """A class of the project: its own methods, and the names of its bases."""

    __slots__ = ("bases", "fields", "home", "methods", "name", "node")

    def __init__(self, node: ast.ClassDef, home: Module) -> None:
        self.node, self.home, self.name = node, home, node.name
        self.bases = node.bases
        self.methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {
            item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.fields = [
            item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]


def parse(path: Path) -> Module:
    """The parsed file. Raises UserError, with the place, if it cannot be read as Python."""
    return Module(path, *script.parse(path))


class Module:
    """One parsed file."""

    def __init__(self, path: Path, source: str, tree: ast.Module) -> None:
        self.path, self.source, self.tree = path, source, tree
        self.lines = source.splitlines()
        self.names: dict[str, Any] = {}  # the module's globals, once it has been followed
        self.state = ""  # "", "running", "done"

    def code(self, line: int) -> str:
        """The text of a line, stripped."""
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""


class Shared:
    """What the projects of one look share: parsed files, and where modules lie."""

    def __init__(self, parsed: dict[Path, Module | None] | None = None) -> None:
        self.parsed = {} if parsed is None else parsed
        self.places: dict[tuple[Path, str], Path | None] = {}

    def file_of(self, base: Path, dotted: str) -> Path | None:
        """The file of a module below a folder."""
        key = (base, dotted)
        if key not in self.places:
            place = base.joinpath(*dotted.split(".")) if dotted else base
            files = [place.with_suffix(".py")] if dotted else []
            self.places[key] = next((path for path in (*files, place / "__init__.py") if path.is_file()), None)
        return self.places[key]


class Project:
    """A script and what can be imported from its repository, parsed when it is needed.

    `shared` has what several projects read. A `lazy` project follows what it imports only as far as it uses it.
    """

    def __init__(self, script: Path, shared: Shared | None = None, lazy: bool = False) -> None:
        self.folder, self.lazy = script.parent, lazy
        self.bases = roots.roots(script)
        self.shared = Shared() if shared is None else shared
        self.modules: list[Module] = []
        self.unread: dict[str, str] = {}  # by dotted name: why a file that is there was not read
        self.script = self.module_at(script)

    def module_at(self, path: Path) -> Module | None:
        """The parsed file, or None if it cannot be read as Python."""
        parsed = self.shared.parsed
        if path not in parsed:
            try:
                parsed[path] = parse(path)
            except UserError:
                parsed[path] = None
        module = parsed[path]
        if module is not None and module not in self.modules:
            if len(self.modules) >= LIMIT:
                return None
            module.names, module.state = {}, ""
            self.modules.append(module)
            if "sys.path" in module.source or "addsitedir" in module.source:
                self.bases += [folder for folder in roots.added(module.tree, path) if folder not in self.bases]
        return module

    def find(self, dotted: str, importer: Path, level: int = 0) -> Module | None:
        """The project's module of that name, as the importer would find it."""
        for base in self._bases(dotted, importer, level):
            path = self.shared.file_of(base, dotted)
            if path is not None:
                module = self.module_at(path)
                if module is None:
                    full = self.shared.parsed[path] is not None
                    why = f"lies beyond the limit of {LIMIT} files" if full else "is not Python"
                    self.unread["." * level + dotted] = why
                return module
        return None

    def has(self, top: str) -> bool:
        """Whether a package or module of that name lies in the project."""
        return any((base / top).is_dir() or (base / f"{top}.py").is_file() for base in self.bases)

    def _bases(self, dotted: str, importer: Path, level: int) -> list[Path]:
        """Where a module of this name may lie. Names of Python and torch are never those of another folder."""
        if level:
            return [importer.parents[level - 1]] if level <= len(importer.parents) else []
        return [self.folder] if roots.is_known(dotted.partition(".")[0]) else self.bases
