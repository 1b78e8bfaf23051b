"""`python <folder>/verifier DEVICE RANKS [WISH]`: the launcher process.

It imports torch once and forks the ranks of every run.

`python <folder>/verifier rank REQUEST`: what torchrun starts as each worker of a run with
`--launcher torchrun`. `python <folder>/verifier node REQUEST [NUMBER]`: what any other launcher
starts on each machine. Run under another name, as by a process that a rank spawns, this file only
gives its functions.
"""

import contextlib
import sys

if not __package__:
    import importlib.util
    from pathlib import Path

    _root = Path(__file__).resolve().parents[1]
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
    __package__, __spec__ = "verified_fsdp2.verifier", None  # Python 3.12 warns where they differ

from typing import Any


def live(request: dict[str, Any], rank: int) -> int:
    """A rank of a run.

    The probe is imported no sooner, since the script must be the one that imports torch under
    torchrun.
    """
    from .probe.rank import run

    return run(request, rank)


def child(request: dict[str, Any]) -> None:
    """A process that a rank has spawned, before it imports the script."""
    from .probe.children import begin

    begin(request)


def prepare() -> None:
    """Import the probe once for all ranks, where torch is there already.

    What fails beside names of torch, a rank reports.
    """
    from .probe.compat import names

    names.missing()
    with contextlib.suppress(Exception):
        from .probe import install, rank  # noqa: F401
        from .probe.events import topics

        list(topics())


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        from .launch.torchrun import guard

        guard(sys.argv[2], live)
    if sys.argv[1] == "node":
        from .launch.node import serve as serve_node

        serve_node(sys.argv[2], "".join(sys.argv[3:]), live)
    from .launch.server import serve

    sys.exit(
        serve(
            sys.argv[1], int(sys.argv[2]), live, prepare, "".join(sys.argv[3:4]), int(*sys.argv[4:])
        )
    )
