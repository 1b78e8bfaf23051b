"""The contract: every rule, discovered from its module, in the order in which faults should be fixed.

A family is a folder with an `ORDER`; a rule is a module in it that does not begin with `_`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from .base import Rule


def _discover() -> dict[str, Rule]:
    """{name: rule}. Within a family, rules whose failure explains that of others come first."""
    families = [import_module(f".{name}", __name__) for name in _names(__path__, "*/__init__.py")]
    rules: dict[str, Rule] = {}
    for family in sorted(families, key=lambda module: int(module.ORDER)):
        modules = [import_module(f".{name}", family.__name__) for name in _names(family.__path__, "*.py")]
        own = [_rule_in(module)() for module in modules]
        rules |= {rule.name: rule for rule in sorted(own, key=lambda rule: (not rule.explains, rule.name))}
    return rules


def _names(folders: Iterable[str], pattern: str) -> list[str]:
    """The modules or packages of these folders that do not begin with `_`. (Importing `pkgutil` takes longer.)"""
    found = (path for folder in folders for path in Path(folder).glob(f"[!_]{pattern}"))
    return sorted(path.parent.name if path.stem == "__init__" else path.stem for path in found)


def _rule_in(module: ModuleType) -> type[Rule]:
    """The one rule that a module defines."""
    types = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Rule)]
    (rule,) = (value for value in types if value.__module__ == module.__name__)
    return rule


RULES = _discover()
