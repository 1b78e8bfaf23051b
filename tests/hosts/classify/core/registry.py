"""Classes by name, so that a configuration file can choose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Registry:
    """A table from names to factories of one kind of thing."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator that puts a factory under a name."""

        def put(factory: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._known:
                raise ValueError(f"two {self.kind}s are called {name!r}")
            self._known[name] = factory
            return factory

        return put

    def build(self, section: dict[str, Any], **more: Any) -> Any:
        """What a configuration section describes; `more` are arguments that no file can hold."""
        options = dict(section)
        name = options.pop("name")
        if name not in self._known:
            raise ValueError(f"no {self.kind} is called {name!r}; known are {', '.join(sorted(self._known))}")
        return self._known[name](**options, **more)


MODELS = Registry("model")
DATASETS = Registry("dataset")
TASKS = Registry("task")
OPTIMIZERS = Registry("optimizer")
SCHEDULES = Registry("schedule")
CALLBACKS = Registry("callback")
