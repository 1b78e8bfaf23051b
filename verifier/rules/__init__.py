"""The contract: every rule, discovered from its module, in the order in which faults should be
fixed.

A family is a folder; a rule is a module in it that does not begin with `_`.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from .base import Rule

FIRST_TO_LAST = (
    *(
        "environment",
        "wrapping",
        "compile",
        "device",
        "init",
        "mesh",
        "optimizer",
        "precision",
        "data",
        "gradients",
    ),
    *("clipping", "checkpoint", "hang", "laws", "parity", "source"),
)


def _discover() -> dict[str, Rule]:
    """{name: rule}. Within a family, rules whose failure explains that of others come first."""
    rules: dict[str, Rule] = {}
    found = [one.name for one in iter_modules(__path__) if one.ispkg]
    for family in sorted(found, key=lambda family: (*FIRST_TO_LAST, family).index(family)):
        names = sorted(
            one.name
            for one in iter_modules(import_module(f".{family}", __name__).__path__)
            if one.name[0] != "_"
        )
        own = [_rule_in(import_module(f".{family}.{name}", __name__))() for name in names]
        rules |= {
            rule.name: rule for rule in sorted(own, key=lambda rule: (not rule.explains, rule.name))
        }
    return rules


def _rule_in(module: ModuleType) -> type[Rule]:
    """The one rule that a module defines."""
    own = [
        one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    ]
    rules = [one for one in own if isinstance(one, type) and issubclass(one, Rule)]
    if len(rules) != 1:
        raise TypeError(
            f"{module.__file__}: a module of a rule defines one subclass of Rule, not {len(rules)}"
        )
    return rules[0]


RULES = _discover()
