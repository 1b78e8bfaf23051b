"""Calls a function as soon as a module has been imported. Imports no torch."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(wanted: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call` with the module `wanted` when the script has imported it.

    Its errors reach the script.
    """

    class Finder:
        @staticmethod
        def find_spec(
            name: str, path: object = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            if name != wanted:
                return None
            sys.meta_path.remove(Finder)  # while the others are asked
            spec = importlib.util.find_spec(name)
            sys.meta_path.insert(
                0, Finder
            )  # whoever asks now may only want to know where the module is
            if spec is None or spec.loader is None:
                return None
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                if Finder in sys.meta_path:
                    sys.meta_path.remove(Finder)
                execute(module)
                call(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)
