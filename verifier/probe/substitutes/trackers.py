"""Packages that record or show a run, such as W&B: a capacity run has nothing to record, and
they need not be installed.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from ..session import Session

# Modules of other packages that need one of these.
_WITH = {"torch.utils.tensorboard": "tensorboard"}


class Nothing:
    """Takes every call, and has every attribute: itself."""

    def __call__(self, *args: object, **kwargs: object) -> "Nothing":
        return self

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class _Empty(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Finder:
    """Finds stand-ins for these packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of a stand-in, if it is one."""
        package = _WITH.get(name, name.partition(".")[0])
        if package not in self.packages:
            return None
        return ModuleSpec(name, _Empty(), is_package=True)


def install(session: Session) -> None:
    """Let the script import stand-ins for the packages that the request names."""
    if session.request.stand_ins:
        sys.meta_path.insert(0, Finder(session.request.stand_ins))
