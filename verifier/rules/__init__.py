"""The contract: every rule, found by being there, in the order in which faults should be fixed.

A family is a folder with an `ORDER`; a rule is a module in it that does not begin with `_`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from .base import Rule


def _discover() -> dict[str, Rule]:
    """{name: rule}. Within a family, rules whose failure explains that of others come first."""
    families = [import_module(f".{found.name}", __name__) for found in pkgutil.iter_modules(__path__) if found.ispkg]
    rules: dict[str, Rule] = {}
    for family in sorted(families, key=lambda module: int(module.ORDER)):
        names = [found.name for found in pkgutil.iter_modules(family.__path__) if not found.name.startswith("_")]
        modules = [import_module(f".{name}", family.__name__) for name in names]
        own = [_rule_in(vars(module), module.__name__)() for module in modules]
        rules |= {rule.name: rule for rule in sorted(own, key=lambda rule: (not rule.explains, rule.name))}
    return rules


def _rule_in(names: dict[str, object], module: str) -> type[Rule]:
    """The one rule that a module defines."""
    (rule,) = (
        value
        for value in names.values()
        if isinstance(value, type) and issubclass(value, Rule) and value.__module__ == module
    )
    return rule


RULES = _discover()
