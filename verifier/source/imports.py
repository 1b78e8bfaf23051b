"""Following imports: into the modules of the project; other names stay dotted."""

from __future__ import annotations

import ast
from pathlib import Path

from .calls import Calls
from .project import Module
from .values import Value


class Imports(Calls):
    """The part of the follower that binds imported names.

    In a lazy project a module is followed when a name of it is used.
    """

    def _do_import(self, node: ast.Import) -> bool:
        for alias in node.names:
            module = self.project.find(alias.name, self.frame.module.path)
            top = alias.name.partition(".")[0]
            if module is not None:
                if not self.project.lazy:
                    self.load(module)
                if alias.asname or "." not in alias.name:
                    self.frame.names[alias.asname or top] = Value("file", alias.name, home=module)
                else:
                    self.frame.names[top] = self._package(alias.name, module)
            elif alias.asname:
                self.frame.names[alias.asname] = self.name(alias.name)
            elif top not in self.frame.names or self.frame.names[top].kind != "file":
                self.frame.names[top] = self.name(top)
        return False

    def _package(self, dotted: str, module: Module) -> Value:
        """`import a.b`: the name `a`, through which `a.b` is found."""
        value = Value("file", dotted, home=module)
        for part in reversed(dotted.split(".")[1:]):
            value = Value("unknown", "package", attrs={part: value})
        return value

    def _do_importfrom(self, node: ast.ImportFrom) -> bool:
        dotted, importer = node.module or "", self.frame.module.path
        module = self.project.find(dotted, importer, node.level)
        for alias in node.names:
            name = alias.asname or alias.name
            if module is not None and alias.name == "*":
                self.load(module)
                self.frame.names.update(
                    {k: v for k, v in module.names.items() if not k.startswith("_")}
                )
            elif self.project.lazy and module is not None and not module.state:
                self.frame.names[name] = Value(
                    "pending", alias.name, home=(module, dotted, importer, node.level)
                )
            else:
                self.frame.names[name] = self.member(
                    alias.name, module, dotted, importer, node.level
                )
        return False

    def member(
        self, attr: str, module: Module | None, dotted: str, importer: Path, level: int
    ) -> Value:
        """What `from dotted import attr` gives."""
        if module is not None:
            self.load(module)
            if isinstance(found := module.names.get(attr), Value):
                return self.imported(found)
        below = self.project.find(f"{dotted}.{attr}".strip("."), importer, level)
        if below is not None:
            if not self.project.lazy:
                self.load(below)
            return Value("file", attr, home=below)
        if module is not None:
            return Value("unknown", attr)
        return self.name(f"{'.' * level}{dotted}.{attr}")
