"""Python runs this at the start of each process of a guarded command, since it is first on
PYTHONPATH. It starts the guard and then runs the sitecustomize that would have been found.
"""

import importlib.util
import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)


def _run_the_other() -> None:
    rest = [one for one in sys.path if one and str(Path(one).resolve()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _begin() -> None:
    if os.environ.get("FSDP2_GUARD", "") in ("", "0", "off"):
        return
    root = Path(__file__).resolve().parents[3]
    if "verified_fsdp2" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "verified_fsdp2", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["verified_fsdp2"] = module
        spec.loader.exec_module(module)
    importlib.import_module("verified_fsdp2.verifier.guard.begin").begin()


try:
    _begin()
except Exception as error:
    print(f"fsdp2 guard: cannot start, the run goes on without it: {error}", file=sys.stderr)
_run_the_other()
