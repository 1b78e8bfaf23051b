"""The same verdicts, however ranks are started: 20 scripts with forked ranks and through Slurm on
two nodes; a node that dies.

    python benchmarks/launchers.py --out benchmarks/results/launchers.json

Needs root, Debian's slurm-wlm, munge and iproute2: a Slurm of two nodes on this machine
(engine_slurm.py), and two network namespaces as machines that `ip netns exec {host} {worker}`
reaches (engine_netns.py). A node dies as a machine does: everything on it is killed at once, in the
middle of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus import IN_EVERY_TEST_RUN, REPRESENTATIVE, Case, faults, right
from engine_netns import ADDRESSES, NODES, machines
from engine_slurm import Cluster, cluster, slurm_version, steps_on
from machine import environment
from results_file import write

SCRIPTS = 20
SLOW = "for step in range(STEPS):\n        __import__('time').sleep(3)"
LIMIT = 600


def cases() -> list[Case]:
    """Faults of each family and right scripts, of those that run on two ranks."""
    known = {case.name: case for case in (*faults(), *right())}
    found = [known[name] for name in (*IN_EVERY_TEST_RUN, *REPRESENTATIVE)]
    return [case for case in found if case.tier == "ranks" and not case.fixed_size][:SCRIPTS]


def verdict(
    script: Path, settings: dict[str, Any], launcher: str, env: dict[str, str]
) -> dict[str, Any]:
    """What `fsdp2 verify` says of a script with this launcher."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [
            word
            for key, value in settings.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        command = [
            sys.executable,
            "-c",
            "import sys; from verified_fsdp2.skill.cli import main; sys.exit(main())",
        ]
        command += [
            "verify",
            str(script),
            *options,
            "--launcher",
            launcher,
            "--report",
            f"json={report}",
        ]
        began = time.monotonic()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, **env},
            check=False,
        )
        if not report.is_file():
            return {"verdict": f"exit {done.returncode}", "failed": [], "error": done.stderr[-500:]}
        found = json.loads(report.read_text(encoding="utf-8"))
    failed = sorted(f["rule"] for f in found["findings"] if f["status"] == "fail")
    texts = [f["evidence"] for f in found["findings"] if f["rule"] == "run-completes"]
    seconds = round(time.monotonic() - began, 1)
    return {
        "verdict": found["verdict"],
        "failed": failed,
        "run": texts[0] if texts else "",
        "seconds": seconds,
    }


def compared(launcher: str, env: dict[str, str]) -> list[dict[str, Any]]:
    """A row a script: the verdict through this launcher beside that of forked ranks."""
    rows = []
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            script = case.target(Path(folder))
            settings = {"reshard_to": "", **case.settings}
            settings["timeout"] = max(int(settings.get("timeout", 0)), 60)
            forked, other = (verdict(script, settings, one, env) for one in ("fork", launcher))
        same = (forked["verdict"], forked["failed"]) == (other["verdict"], other["failed"])
        rows.append({"case": case.name, "same": same, "forked": forked, "launched": other})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def lost(
    launcher: str, env: dict[str, str], lose: Callable[[], None], left: Callable[[], int]
) -> dict[str, Any]:
    """A node dies in the train run: the verdict, its time, and the processes that are left."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "slow.py"
        text = (Path(__file__).resolve().parents[1] / "tests" / "zoo" / "minimal.py").read_text(
            encoding="utf-8"
        )
        script.write_text(text.replace("for step in range(STEPS):", SLOW), encoding="utf-8")
        timer = threading.Timer(10.0, lose)
        timer.start()
        found = verdict(
            script, {"only": "run-completes", "steps": 5, "reshard_to": ""}, launcher, env
        )
        timer.join()
    time.sleep(3.0)
    return {**found, "left": left()}


def through_slurm(folder: Path) -> dict[str, Any]:
    """Two nodes of Slurm."""
    with cluster(folder / "slurm", cpus=2) as here:
        env = {
            **here.variables,
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(folder),
        }
        rows = compared("slurm:2", env)
        dead = lost("slurm:2", env, lambda: here.lose("n2"), lambda: len(workers(here, folder)))
    return {"version": slurm_version(), "rows": rows, "lost": dead}


def workers(here: Cluster, folder: Path) -> list[int]:
    """Processes of steps that are left on either node."""
    return [pid for node in ("n1", "n2") for pid in steps_on(folder / "slurm", node)]


def through_namespaces(folder: Path) -> dict[str, Any]:
    """Two machines with a network of their own."""
    with machines():
        env = {"FSDP2_HOSTS": ",".join(NODES), "TMPDIR": str(folder), "MASTER_ADDR": ADDRESSES[0]}
        env["GLOO_SOCKET_IFNAME"] = "eth0"
        launcher = "ip netns exec {host} {worker}"

        def inside(node: str) -> list[int]:
            done = subprocess.run(
                ["ip", "netns", "pids", node], capture_output=True, text=True, check=False
            )
            return [int(word) for word in done.stdout.split()]

        def lose() -> None:
            for pid in inside(NODES[1]):
                subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)

        script = Path(__file__).resolve().parents[1] / "tests" / "zoo" / "minimal.py"
        passed = verdict(script, {"reshard_to": "1,4", "timeout": 60}, launcher, env)
        dead = lost(launcher, env, lose, lambda: sum(len(inside(node)) for node in NODES))
    return {"right": passed, "lost": dead}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results: dict[str, Any] = {"environment": environment()}
        for part, make in (("namespaces", through_namespaces), ("slurm", through_slurm)):
            results[part] = make(Path(name))
            print(
                part,
                json.dumps({key: value for key, value in results[part].items() if key != "rows"}),
                flush=True,
            )
            write(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
