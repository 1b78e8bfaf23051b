"""`fsdp2 doctor`: what this machine can run."""

from __future__ import annotations

import argparse
import os
import sys

from ...verifier.errors import INCONCLUSIVE, PASS, MachineRefuses, UserError
from ..output import emit_json, say


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run",
        description="Check Python, packages, processes, sockets and devices by trying them. Exit 4 if ranks cannot be run here.",
        epilog="example:\n  fsdp2 doctor --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Try everything that a verification needs; 0 if ranks can be run here, else 4."""
    checks = [_python(), *(_package(name) for name in ("torch", "jinja2", "PyYAML", "jsonschema")), *_launch()]
    good = all(check["ok"] for check in checks)
    if options.json:
        emit_json({"ok": good, "checks": checks})
    else:
        for check in checks:
            say(f"{'ok  ' if check['ok'] else 'FAIL'} {check['name']:<12}{check['value']}")
        say(
            "this machine can verify FSDP2 scripts"
            if good
            else "this machine cannot run ranks; see the line marked FAIL (`fsdp2 lint` and `--tier simulate` need none)"
        )
    return PASS if good else INCONCLUSIVE


def _check(name: str, ok: bool, value: str) -> dict[str, str | bool]:
    return {"name": name, "ok": ok, "value": value}


def _python() -> dict[str, str | bool]:
    import platform

    return _check(
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores",
    )


def _package(name: str) -> dict[str, str | bool]:
    import importlib.metadata

    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _check(name, False, "is not installed for this Python")
    note = "" if name != "torch" or version.startswith("2.13.0") else " (developed and tested on 2.13.0)"
    return _check(name, True, version + note)


def _launch() -> list[dict[str, str | bool]]:
    """Start the launcher and two ranks that meet and add up a number."""
    from ...verifier.launch.trial import two_ranks_meet

    try:
        versions, seconds = two_ranks_meet(sys.executable)
    except (UserError, MachineRefuses, RuntimeError, OSError) as error:
        return [_check("ranks", False, str(error))]
    devices = versions["devices"]
    gpus = (
        f"{devices} CUDA devices (CUDA {versions['cuda']}, NCCL)"
        if devices
        else "no CUDA device: ranks run on the CPU with gloo"
    )
    return [
        _check("ranks", True, f"2 ranks met and reduced a tensor in {seconds:.1f} s"),
        _check("devices", True, gpus),
    ]
