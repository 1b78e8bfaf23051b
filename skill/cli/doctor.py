"""`fsdp2 doctor`: what this machine can run."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ...verifier.errors import INCONCLUSIVE, PASS, MachineRefuses, UserError
from ...verifier.probe.compat.names import VERSIONS, runs_on_cpu
from ...verifier.report.wrapping import table, wrapped
from ..output import add_command, emit_json, say

Check = dict[str, Any]


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Check Python, packages, processes, sockets and devices by trying them. Exit 4 if ranks"
        " cannot be run here."
    )
    examples = "examples:\n  fsdp2 doctor --json\n  fsdp2 doctor --launcher slurm:2"
    parser = add_command(
        commands, "doctor", run, "what this machine can run", description, examples
    )
    parser.add_argument(
        "--launcher",
        metavar="HOW",
        default="fork",
        help="start the ranks so, as `fsdp2 verify` does: slurm, ssh:HOST,HOST",
    )


def run(options: argparse.Namespace) -> int:
    """Try everything that a verification needs; 0 if ranks can be run here, else 4."""
    checks = [_python(), *(_package(name) for name in ("torch", "jinja2", "PyYAML", "jsonschema"))]
    checks += _launch(options.launcher)
    good = all(check["ok"] for check in checks)
    if options.json:
        emit_json({"ok": good, "checks": checks})
    else:
        say(
            "\n".join(table([("ok" if c["ok"] else "FAIL", c["name"], c["value"]) for c in checks]))
        )
        bad = (
            "this machine cannot run ranks; see the line marked FAIL (`fsdp2 lint` and `--tier"
            " simulate` need none)"
        )
        say("\n".join(wrapped("this machine can verify FSDP2 scripts" if good else bad)))
    return PASS if good else INCONCLUSIVE


def _check(name: str, ok: bool, value: str) -> Check:
    return {"name": name, "ok": ok, "value": value}


def _python() -> Check:
    import platform

    value = f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"
    return _check("python", sys.version_info >= (3, 11), value)


def _package(name: str) -> Check:
    import importlib.metadata

    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _check(name, False, "is not installed for this Python")
    tested = name != "torch" or version.partition("+")[0] in VERSIONS
    note = "" if tested else f" (fsdp2 was run on {', '.join(VERSIONS)})"
    return _check(name, True, version + note)


def _launch(how: str) -> list[Check]:
    """Start two ranks that reduce a tensor."""
    from ...verifier.config.launchers import problem
    from ...verifier.launch.backend_probe import two_ranks_meet
    from ...verifier.launch.devices import too_few

    if wrong := problem(how, os.environ):
        return [_check("launcher", False, wrong)]
    try:
        versions, seconds = two_ranks_meet(sys.executable, how)
    except (UserError, MachineRefuses, RuntimeError, OSError) as error:
        return [_check("ranks", False, str(error))]
    gpus = f"{versions['devices']} CUDA devices (CUDA {versions['cuda']}, NCCL)"
    trains = bool(versions["devices"]) or runs_on_cpu(str(versions["torch"]))
    there = too_few(versions.get("unused", 0)) or "no CUDA device"
    none = f"{there}: ranks run on the CPU with gloo" + (
        "" if trains else ", where FSDP2 of this torch does not train"
    )
    ranks = _check("ranks", True, f"2 ranks reduced a tensor in {seconds:.1f} s")
    return [
        ranks,
        _check("devices", trains, gpus if versions["devices"] else none),
        _isolation(versions["isolation"]),
    ]


def _isolation(choice: dict[str, Any]) -> Check:
    """How runs are kept from the files of this folder."""
    from ...verifier.isolation.choose import in_words
    from ...verifier.isolation.world import NONE

    return _check("isolation", choice["mechanism"] != NONE, in_words(choice))
