"""Runs a script with CUDA on the CPU and nothing else of the verifier: `torchrun bare.py SCRIPT
ARGS`, `... bare.py -m MODULE ARGS`.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install() -> None:
    """The substitute, from the pack in whose copy this file lies."""
    spec = importlib.util.spec_from_file_location(
        "verified_fsdp2", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verified_fsdp2"] = module
    spec.loader.exec_module(module)
    importlib.import_module("torch")  # a guard starts with it, before the session, as in any script
    from verified_fsdp2.verifier.launch.request import Request
    from verified_fsdp2.verifier.probe.frames import Frames
    from verified_fsdp2.verifier.probe.session import Session
    from verified_fsdp2.verifier.probe.substitutes import averages, cuda_on_cpu
    from verified_fsdp2.verifier.trace.writer import Writer

    ranks = int(os.environ["WORLD_SIZE"])
    request = Request("", sys.argv[1], str(Path.cwd()), ranks, cuda_on_cpu=True)
    session = Session(
        request, int(os.environ["RANK"]), Writer(Path(os.devnull)), Frames(request.project)
    )
    averages.install(session)
    cuda_on_cpu.install(session)
    session.dispatcher.install()


if __name__ == "__main__":
    install()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
