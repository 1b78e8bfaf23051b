"""`fsdp2 plan TARGET`: does it fit, what does it send, does it start; without the GPUs."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.errors import UserError
from ...verifier.isolation.leftovers import remove, temporary
from ..atomic_write import defer_signals
from ..output import add_command, add_set, emit_json, log, say

if TYPE_CHECKING:
    from ...verifier.analysis.capacity import CapacityPlan
    from ...verifier.analysis.roofline import Bound
    from ...verifier.analysis.settings_search import Explored
    from ...verifier.config.devices import Device
    from ...verifier.config.target import Target
    from ..capacity.candidates import Knob
    from ..capacity.settings_search import Limits

EPILOG = """\
One process runs the script as rank 0 of N, unmodified, on tensors that have shapes and no memory,
on a device that calls itself CUDA. Numbers that the script reads from tensors, such as a loss,
are stand-ins.

examples:
  fsdp2 plan spec.yaml --nproc 64 --device-memory 80GiB  a spec, before anything is generated
  fsdp2 plan my-run --nproc 64 --device-memory 80GiB     a scaffold at its full size
  fsdp2 plan spec.yaml --nproc 64 --gpu h100 --network 200  and the least time of a step
  fsdp2 plan spec.yaml --nproc 8 --set train.micro_batch=2
  fsdp2 plan train.py --nproc 64 -- --config 8b.yaml     a script, with its arguments of production
  fsdp2 plan train.py --nproc 512 --json -- --layers 80 > plan.json
  fsdp2 plan spec.yaml --nproc 8 --gpu l4 --explore      which settings fit, the best first
  fsdp2 plan spec.yaml --nproc 8 --gpu l4 --explore --html plan.html  the same as a page
  fsdp2 plan train.py --nproc 8 --gpu h100 --explore "--batch 1,2,4" --explore "--ac none,full"

exit codes: 0 it fits (or, which is said, only without what the allocator adds; or no memory was
given), 1 it does not fit or an error was found, 2 bad usage, 4 the script could not be followed
to the end of its first step.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Find out what a training script needs of memory and sends, and whether it starts, on GPUs"
        " that are not there."
    )
    parser = add_command(
        commands,
        "plan",
        run,
        "memory and traffic at the size of production, without GPUs",
        description,
        EPILOG,
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
    add(
        "--nproc",
        metavar="N",
        help="ranks (a spec or scaffold with a launch section: nodes x devices_per_node)",
    )
    add(
        "--device-memory",
        metavar="SIZE",
        help="memory of a GPU, such as 80GiB (default: that of --gpu, else of the launch section)",
    )
    add(
        "--gpu",
        metavar="NAME",
        help="a GPU by name, such as h100, or FILE.yaml of your own: bounds the time of a step",
    )
    add("--gpus-per-node", metavar="N", help="ranks of a node (default: those of --gpu, else 8)")
    add(
        "--network",
        metavar="GBIT",
        help="Gbit/s between nodes for one GPU (default: that of --gpu)",
    )
    add("--steps", metavar="K", help="optimizer steps to follow (default 3)")
    add(
        "--explore",
        metavar="GRID",
        nargs="?",
        const="",
        action="append",
        help=(
            "compare settings that change no mathematics: for a spec or scaffold by itself (mesh,"
            " resharding, checkpointing, micro-batch, chunked loss, offload), for a script the"
            " values of an option, such as '--batch 1,2,4' (repeatable)"
        ),
    )
    add(
        "--html",
        metavar="FILE",
        type=Path,
        help="write the plan as one self-contained HTML file, too",
    )
    add("--timeout", metavar="S", default="600", help="seconds at most (default 600)")
    add_set(parser, "change one value of a spec (repeatable)")
    parser.set_defaults(script_args=None)


def run(options: argparse.Namespace) -> int:
    """Try, print, return the exit code."""
    from ...verifier.launch.preparation import FOLDER
    from .. import reports
    from ..capacity.settings import check_grid, of_arguments
    from ..capacity.settings_search import Limits

    started = time.monotonic()
    gpu, memory, per_node = _machine(options)
    if options.html is not None:
        reports.check_path(f"--html {options.html}", options.html, [options.target])
    for name, text in (("--steps", options.steps), ("--nproc", options.nproc)):
        if text is not None:
            _whole(name, text)
    until = started + _above_0("--timeout", options.timeout, "seconds above 0, such as 600")
    grid = of_arguments([text for text in options.explore or [] if text])
    if _compared_spec(options, grid) is not None:
        check_grid(grid)
    work = temporary("plan")
    try:
        world = work / FOLDER / "world"
        limits = Limits(memory, gpu, per_node, until, note=log, prepared=world)
        found, least, explored = _planned(options, limits, grid, work)
    finally:
        with defer_signals():
            remove(work)
    _report(options, found, least, explored, _compared_spec(options, grid))
    return found.exit_code


def _planned(
    options: argparse.Namespace, limits: Limits, grid: Sequence[Knob], work: Path
) -> tuple[CapacityPlan, Bound | None, Explored | None]:
    """The plan, the least time of a step, and the settings that are compared."""
    from ...verifier.analysis.argparse_errors import usage_error
    from ...verifier.analysis.capacity import judge, without_data
    from ...verifier.launch.capacity import STEPS, run_for_capacity
    from ...verifier.report.redacted import redacted
    from ..capacity import target as targets
    from ..capacity.settings_search import tried

    changes = list(options.set)
    if options.explore is not None:
        changes += _on_these_ranks(options, limits.per_node, grid)
    given = list(options.script_args or [])
    # half of the time is for the settings that are compared
    timeout = float(options.timeout) / (2 if options.explore is not None else 1)
    try:
        target, passes = targets.of_path(
            options.target, changes, options.nproc, f"{timeout:g}", given, work, options.module
        )
    except targets.DataMissing as missing:
        return redacted(without_data(str(missing), limits.memory)), None, None
    run = targets.planned(target, int(options.steps or STEPS))
    before = [sys.executable, *target.prepare] if target.prepare else []
    made = run_for_capacity(run, work, sys.executable, limits.per_node, before)
    if words := usage_error(made):
        raise UserError(f"the script rejects its arguments: {words}")
    for error in made.probe_errors:
        log(f"a fault of fsdp2 in the capacity run: {error}")
    found = redacted(tried(judge(made, limits.memory), passes))
    explored = None
    if options.explore is not None:
        explored = redacted(_explored(options, target, limits, grid, work, found))
    path, spec = targets.spec_file(options.target), None
    if path is not None and not given:
        spec, _ = targets.with_made_up_data(path, changes if path == options.target else [])
    gpu = limits.gpu.with_node(limits.per_node) if limits.gpu else None
    found = targets.with_copy(found, spec, target.nproc, limits.per_node)
    return found, targets.least_time(found.record, gpu, spec, target.nproc), explored


def _report(
    options: argparse.Namespace,
    found: CapacityPlan,
    least: Bound | None,
    explored: Explored | None,
    spec: Path | None,
) -> None:
    """Print the plan, and write it as a page."""
    from ...verifier.report import capacity, capacity_html, settings_search
    from ...verifier.report.redacted import redacted
    from .. import reports

    name, keys_of = str(options.target), str(spec or "")
    if options.json:
        shown = capacity.data(found, name, least)
        if explored is not None:
            shown["explored"] = settings_search.data(explored)
        emit_json(shown)
    else:
        parts = [capacity.text(found, name, least)]
        if explored is not None:
            parts.append(settings_search.text(explored, keys_of))
        say("\n\n".join(parts))
    if options.html is not None:
        command = redacted(_command(options))
        page = capacity_html.render(found, name, command, least, explored, keys_of)
        reports.write(options.html, page)
        log(f"report: {options.html}")


def _command(options: argparse.Namespace) -> str:
    """The command line that makes this plan."""
    names = ("nproc", "device_memory", "gpu", "gpus_per_node", "network", "steps")
    given = {"--" + name.replace("_", "-"): getattr(options, name) for name in names}
    words = ["fsdp2", "plan", str(options.target)]
    words += [word for name, value in given.items() if value is not None for word in (name, value)]
    words += [word for change in options.set for word in ("--set", change)]
    words += [
        word for grid in options.explore or [] for word in ("--explore", *([grid] if grid else []))
    ]
    words += ["--html", str(options.html)] if options.html is not None else []
    return shlex.join([*words, *(["--", *options.script_args] if options.script_args else [])])


def _explored(
    options: argparse.Namespace,
    target: Target,
    limits: Limits,
    grid: Sequence[Knob],
    work: Path,
    found: CapacityPlan,
) -> Explored:
    """The settings that are compared: of the spec by themselves, of a script as the user gives
    them. `found`: the plan of the target as it is.
    """
    from .. import scaffold
    from ..capacity import target as targets
    from ..capacity.settings import OfSpec
    from ..capacity.settings_search import explore_script, explore_spec

    path = _compared_spec(options, grid)
    if path is None:
        return explore_script(target, grid, limits, work / "explored")
    spec, changes = targets.with_made_up_data(path, options.set)
    project = options.target
    own = scaffold.edited(scaffold.render(spec, project), project) if path != project else []
    if own:
        log(f"compared are projects of {path}: your edits of {', '.join(own)} are not in them")
    of = OfSpec(path, tuple(changes), spec, target.nproc, limits.per_node)
    given = found if not own and not options.script_args else None
    return explore_spec(of, limits, work / "explored", grid, given)


def _compared_spec(options: argparse.Namespace, grid: Sequence[Knob]) -> Path | None:
    """The spec whose keys are compared; None where arguments of a script are."""
    from ..capacity import target as targets

    path = targets.spec_file(options.target)
    return path if path == options.target or not grid else None


def _on_these_ranks(options: argparse.Namespace, per_node: int, grid: Sequence[Knob]) -> list[str]:
    """What a spec needs for the number of ranks that was given.

    Raises UserError if there is nothing to compare.
    """
    from ..capacity import target as targets
    from ..capacity.settings import OfSpec

    path = targets.spec_file(options.target)
    if path is None and not grid:
        raise UserError(
            "--explore: for a script, give options and their values, such as --explore '--batch"
            " 1,2,4'"
        )
    if path is None or path != options.target or options.nproc is None:
        return []
    spec, changes = targets.with_made_up_data(path, options.set)
    of = OfSpec(path, tuple(changes), spec, int(options.nproc), per_node)
    return [f"{key}={value}" for key, value in of.written({}).items()]


def _machine(options: argparse.Namespace) -> tuple[Device | None, int | None, int]:
    """The GPU, the memory of one and the ranks of a node: as given, else as the launch section of
    the spec has them.
    """
    from ...verifier.config.devices import GIB
    from ..capacity import target as targets
    from ..spec import load, sizes
    from ..spec.crosschecks_size import device_memory, device_of

    gpu = _gpu(options)
    memory, per_node = (gpu.memory, gpu.per_node) if gpu else (None, None)
    if options.device_memory is not None:
        memory = sizes.size(options.device_memory)
        if not memory:
            given = repr(options.device_memory)
            raise UserError(f"--device-memory: expected {sizes.EXPECTED}, found {given}")
    if options.gpus_per_node:
        per_node = _whole("--gpus-per-node", options.gpus_per_node)
    path = targets.spec_file(options.target)
    if path is not None and memory is None:
        launch = load(path, options.set if path == options.target else [], offline=True)["launch"]
        gpu, found = device_of(launch), device_memory(launch)
        memory = int(found * GIB) if found is not None else None
        per_node = per_node or (launch["devices_per_node"] if launch["engines"] else None)
    return gpu, memory, per_node or targets.PER_NODE


def _gpu(options: argparse.Namespace) -> Device | None:
    """The GPU that was named, with the network that was given."""
    from ...verifier.config.devices import device

    if options.gpu is None:
        if options.network is not None:
            raise UserError("--network: needs --gpu, whose bound on time it is for")
        return None
    if options.network is None:
        return device(options.gpu)
    network = _above_0("--network", options.network, "Gbit/s above 0, such as 400")
    return device(options.gpu).with_node(network=network)


def _above_0(name: str, text: str, expected: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text) is None or not float(text):
        raise UserError(f"{name}: expected {expected}, found {text!r}")
    return float(text)


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{name}: expected a whole number above 0, found {text!r}")
    return int(text)
