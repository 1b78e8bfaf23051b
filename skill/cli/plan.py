"""`fsdp2 plan TARGET`: does it fit, what does it send, does it start; without the GPUs."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.errors import UserError
from ..atomic_write import defer_signals
from ..output import add_command, add_set, emit_json, log, say

if TYPE_CHECKING:
    from ...verifier.config.devices import Device
    from ...verifier.config.target import Target
    from ..spec import Spec

MADE_UP = "data={kind: synthetic}"
SPECS = (".yaml", ".yml")
PER_NODE = 8  # ranks of a node
UNITS = {"": 30, "gib": 30, "g": 30, "mib": 20, "m": 20, "tib": 40}
EPILOG = """\
One process runs the script as rank 0 of N, unmodified, on tensors that have shapes and no memory, on a device that calls itself CUDA.
Numbers that the script reads from tensors, such as a loss, are stand-ins.

examples:
  fsdp2 plan spec.yaml --nproc 64 --device-memory 80GiB         a spec, before anything is generated
  fsdp2 plan my-run --nproc 64 --device-memory 80GiB            a scaffold at its full size
  fsdp2 plan spec.yaml --nproc 64 --gpu h100 --network 200       and the least time that a step can take
  fsdp2 plan spec.yaml --nproc 8 --set train.micro_batch=2
  fsdp2 plan train.py --nproc 64 -- --config 8b.yaml            a script, with its arguments of production
  fsdp2 plan train.py --nproc 512 --json -- --layers 80 > plan.json

exit codes: 0 it fits (or no memory was given), 1 it does not fit or an error was found, 2 bad usage, 4 the script could not be followed
to the end of its first step, or whether it fits depends on the allocator.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Find out what a training script needs of memory and sends, and whether it starts, on GPUs that are not there."
    )
    parser = add_command(
        commands, "plan", run, "memory and traffic at the size of production, without GPUs", description, EPILOG
    )
    parser.usage = "fsdp2 plan TARGET [options] [-- SCRIPT ARGS]"
    add = parser.add_argument
    add("target", metavar="TARGET", type=Path, help="a script, a scaffold's folder, or a spec")
    add(
        "-m",
        "--module",
        metavar="MODULE",
        help="run this module, as `torchrun -m` does; TARGET is the folder where it is found",
    )
    add("--nproc", metavar="N", help="ranks (a spec or scaffold with a launch section: nodes x devices_per_node)")
    add("--device-memory", metavar="SIZE", help="memory of a GPU, such as 80GiB (default: that of --gpu)")
    add(
        "--gpu", metavar="NAME", help="a GPU by name, such as h100, or FILE.yaml of your own: bounds the time of a step"
    )
    add("--gpus-per-node", metavar="N", help="ranks of a node (default: those of --gpu, else 8)")
    add("--network", metavar="GBIT", help="Gbit/s between nodes for one GPU (default: that of --gpu)")
    add("--steps", metavar="K", help="optimizer steps to follow (default 3)")
    add("--timeout", metavar="S", default="600", help="seconds at most (default 600)")
    add_set(parser, "change one value of a spec (repeatable)")
    parser.set_defaults(script_args=None)


def run(options: argparse.Namespace) -> int:
    """Rehearse, print, return the exit code."""
    from ...verifier.analysis.bound import bound
    from ...verifier.analysis.rehearsed import judge
    from ...verifier.analysis.usage import usage_error
    from ...verifier.launch.planned import PlannedRun
    from ...verifier.launch.preparation import prepare
    from ...verifier.launch.rehearsal import STEPS, rehearse
    from ...verifier.report import rehearsal

    gpu = _gpu(options)
    memory = _memory(options.device_memory) if options.device_memory is not None else gpu.memory if gpu else None
    per_node = (
        _whole("--gpus-per-node", options.gpus_per_node) if options.gpus_per_node else gpu.per_node if gpu else PER_NODE
    )
    work = Path(tempfile.mkdtemp(prefix="fsdp2-plan-"))
    try:
        target = _target(options, work)
        if target.prepare:
            prepare([sys.executable, *target.prepare], target.cwd, target.timeout, work / "prepare.log")
        planned = PlannedRun(
            role="rehearse",
            world_size=target.nproc,
            script=target.script,
            cwd=target.cwd,
            module=target.module,
            project=target.project,
            launcher=target.launcher,
            timeout=target.timeout,
            grace=0.0,
            arguments=(*target.args, *target.save_args),
            steps=target.steps or STEPS,
        )
        made = rehearse(planned, work, sys.executable, per_node)
        if words := usage_error(made):
            raise UserError(f"the script rejects its arguments: {words}")
        for error in made.probe_errors:
            log(f"a fault of fsdp2 in the rehearsal: {error}")
        found = judge(made, memory)
    finally:
        with defer_signals():
            shutil.rmtree(work, ignore_errors=True)
    name, record = str(options.target), found.record
    least = bound(record, gpu.with_node(per_node)) if gpu and record is not None and record.flops else None
    emit_json(rehearsal.data(found, name, least)) if options.json else say(rehearsal.text(found, name, least))
    return found.exit_code


def _gpu(options: argparse.Namespace) -> Device | None:
    """The GPU that was named, with the network that was given."""
    from ...verifier.config.devices import device

    if options.gpu is None:
        if options.network is not None:
            raise UserError("--network: needs --gpu, whose bound on time it is for")
        return None
    if options.network is None:
        return device(options.gpu)
    if re.fullmatch(r"\d+(\.\d+)?", options.network) is None or not float(options.network):
        raise UserError(f"--network: expected Gbit/s above 0, such as 400, found {options.network!r}")
    return device(options.gpu).with_node(network=float(options.network))


def _target(options: argparse.Namespace, work: Path) -> Target:
    """What is to be run, with its arguments of production. A spec is written to a folder of its own first."""
    from ...verifier.config.target import resolve
    from ..scaffold.manifest import MANIFEST

    path, spec = options.target, None
    if path.suffix in SPECS:
        spec = _made(path, options.set, work / "project")
        path = work / "project"
    elif options.set:
        raise UserError("--set: only for a spec; the arguments of a script go after `--`")
    flags: dict[str, Any] = {"timeout": options.timeout, "module": options.module}
    scaffold = path.is_dir() and (path / MANIFEST).is_file()
    flags["nproc"] = options.nproc or _ranks(spec or (_spec_of(path) if scaffold else None))
    given = list(options.script_args or [])
    flags["args"] = (["--out", "{checkpoint}"] if scaffold else []) + given
    steps = _whole("--steps", options.steps) if options.steps is not None else 0
    return replace(resolve(path, flags), steps=steps)


def _made(path: Path, changes: list[str], out: Path) -> Spec:
    """Write the project of a spec. Its data are made up, so that they need not be here; those that no script can make up must be."""
    from .. import scaffold
    from ..spec import SpecError, load

    spec = load(path, changes, offline=True)
    if spec["data"]["kind"] not in ("synthetic", "import"):
        with contextlib.suppress(SpecError):
            spec = load(path, [*changes, MADE_UP], offline=True)
            log("the plan of a spec takes made-up data: full samples, one after the other")
    scaffold.write(scaffold.render(spec), out, False)
    return spec


def _spec_of(folder: Path) -> Spec | None:
    from ..spec import load

    path = folder / "spec.yaml"
    return load(path, [], offline=True) if path.is_file() else None


def _ranks(spec: Spec | None) -> int:
    """The ranks of a spec."""
    from ..spec.meshes import production

    mesh = production(spec["parallel"], spec["launch"]) if spec is not None else None
    if mesh is None or mesh.ranks < 1:
        raise UserError("--nproc: give the number of ranks, such as --nproc 64")
    return mesh.ranks


def _memory(text: str) -> int:
    """Bytes of `80GiB`; a bare number is in GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise UserError(f"--device-memory: expected a size such as 80GiB, found {text!r}")
    return int(float(match[1]) * (1 << UNITS[match[2]]))


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{name}: expected a whole number above 0, found {text!r}")
    return int(text)
