#!/usr/bin/env python3
"""`python -m verified_fsdp2.skill`, or `python <folder>/skill` on a plain copy of the pack that was
never installed.
"""

import os
import sys

# `-m` puts the working folder first: a json.py or yaml.py there would take the place of Python's or
# of a library. (The script that is verified runs in a process of its own, with its usual path.)
if __package__ and __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    try:
        _here = os.getcwd()  # noqa: PTH109
    except OSError:  # the folder has been removed
        _here = ""
    if sys.path[:1] and sys.path[0] in ("", _here):
        del sys.path[0]

if sys.version_info < (3, 11):  # noqa: UP036 - a hook or a copy may be run by any Python
    sys.exit("fsdp2 needs Python 3.11 or later; this is " + sys.version.split()[0])

if not __package__:
    import importlib.util
    from pathlib import Path

    _root = Path(__file__).resolve().parents[1]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _root / "skill"]
    _spec = importlib.util.spec_from_file_location(
        "verified_fsdp2", _root / "__init__.py", submodule_search_locations=[str(_root)]
    )
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["verified_fsdp2"] = _module
    # a project that holds a copy gets no __pycache__ in it
    _written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _spec.loader.exec_module(_module)
    sys.dont_write_bytecode = _written
    __package__ = "verified_fsdp2.skill"

if __name__ == "__main__":
    from .cli import main

    sys.exit(main())
