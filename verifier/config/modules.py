"""Where `python -m NAME` would find its code.

Imports nothing of the user's: only finders are asked, level by level.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ..errors import UserError


def find(name: str, folder: Path) -> Path:
    """The file that `python -m name`, started in `folder`, would run.

    Raises UserError if there is none.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        hint = (
            f"; did you mean {name.removesuffix('.py').replace('/', '.')}?"
            if name.endswith(".py")
            else ""
        )
        raise UserError(f"-m {name}: not a module name{hint}")
    PathFinder.invalidate_caches()
    spec = _spec(name, folder)
    if spec is None and name.endswith(".py"):
        raise UserError(f"-m {name}: no such module; did you mean -m {name.removesuffix('.py')}?")
    if spec is None:
        raise UserError(
            f"-m {name}: no such module in {folder.resolve()} or among the installed ones"
        )
    if spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__", folder)
        if spec is None:
            raise UserError(
                f"-m {name}: a package without __main__ cannot be run; name one of its modules"
            )
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError(f"-m {name}: {spec.origin or 'it'} is not Python source")
    return Path(spec.origin)


def root(script: Path, module: str) -> Path:
    """The folder below which the user's own code lies: that of the script, or the one that holds
    the module's package.
    """
    if not module:
        return script.parent
    depth = len(module.split(".")) + (
        script.name == "__main__.py" and not module.endswith("__main__")
    )
    return script.parents[depth - 1]


def _spec(name: str, folder: Path) -> ModuleSpec | None:
    top, *below = name.split(".")
    found = PathFinder.find_spec(top, [str(folder.resolve())]) or _installed(top)
    for part in below:
        # by its last name: a package without __init__.py asks sys.modules for its parent
        if found is not None:
            found = PathFinder.find_spec(part, list(found.submodule_search_locations or []))
    return found


def _installed(name: str) -> ModuleSpec | None:
    """A top-level module on the path of this interpreter, or of an editable install."""
    found = (finder.find_spec(name, None, None) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
