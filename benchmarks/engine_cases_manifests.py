"""launch/kubernetes.yaml and launch/sky.yaml: read by the types or the parser of their makers;
their scripts run as nodes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from engine_netns import ADDRESSES, NODES, Machines, machines
from engine_tools import Missing, Place, Started, shown_step, until, write_project

HERE = Path(__file__).parent
BACKOFF = 5  # seconds until a pod that failed starts again; Kubernetes begins with 10
Variables = Callable[[int], dict[str, str]]


def noticed(reported: dict[str, Any]) -> str:
    return (
        f"{reported['mistakes'] - len(reported['unnoticed'])} of {reported['mistakes']} seeded"
        " mistakes noticed"
    )


def kubernetes(place: Place) -> Iterator[dict[str, Any]]:
    options = {"kubernetes_image": "registry.example.com/trainer:1", "kubernetes_claim": "runs"}
    project = write_project(
        place.fresh(), engines=["kubernetes"], nodes=2, devices_per_node=2, device="cuda", **options
    )
    reported = inside(
        place.pythons["kubeflow"], "engine_trainjob.py", project / "launch" / "kubernetes.yaml"
    )
    yield {
        "how": (
            f"the types of Kubeflow Trainer (kubeflow_trainer_api {reported['version']}), made"
            " strict"
        ),
        "disturbed": f"{reported['mistakes']} seeded mistakes",
        "happened": (
            f"{len(reported['wrong'])} errors in launch/kubernetes.yaml; {noticed(reported)}"
        ),
        "printed": reported["wrong"],
        "ok": not reported["wrong"] and not reported["unnoticed"],
    }
    project = write_project(
        place.fresh(), engines=["kubernetes"], nodes=2, devices_per_node=2, **options
    )
    job = yaml.safe_load((project / "launch" / "kubernetes.yaml").read_text(encoding="utf-8"))
    script = job["spec"]["trainer"]["args"][0]
    with machines() as pair:
        how = (
            "the container's script in 2 network namespaces with the variables of Trainer (no"
            " cluster here)"
        )
        yield pods(place, pair, project, script, pet, how)


def skypilot(place: Place) -> Iterator[dict[str, Any]]:
    project = write_project(
        place.fresh(),
        engines=["skypilot"],
        nodes=2,
        devices_per_node=2,
        device="cuda",
        skypilot_accelerator="H100",
        skypilot_volume="runs",
    )
    reported = inside(place.pythons["sky"], "engine_task.py", project / "launch" / "sky.yaml")
    yield {
        "how": f"SkyPilot {reported['version']}, Task.from_yaml_config",
        "disturbed": f"{reported['mistakes']} seeded mistakes",
        "happened": (
            f"launch/sky.yaml read: {reported['read']['num_nodes']} nodes; {noticed(reported)}"
        ),
        "printed": [json.dumps(reported["read"])],
        "ok": reported["read"]["run"] and not reported["unnoticed"],
    }
    project = write_project(
        place.fresh(),
        engines=["skypilot"],
        nodes=2,
        devices_per_node=2,
        join_timeout=60,
        skypilot_volume="runs",
    )
    script = yaml.safe_load((project / "launch" / "sky.yaml").read_text(encoding="utf-8"))["run"]
    with machines() as pair:
        how = (
            "the script `run` in 2 network namespaces with the variables of SkyPilot (no cloud"
            " here)"
        )
        yield recovered(place, pair, project, script, sky_variables, how)


def inside(python: str | None, script: str, file: Path) -> dict[str, Any]:
    """What a script says in the Python that has its package."""
    command = [python or sys.executable, str(HERE / script), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        raise Missing(f"{script}: {(done.stderr.strip().splitlines() or ['no word'])[-1][-200:]}")
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


def pet(node: int) -> dict[str, str]:
    """As the plugin of Trainer sets them (pkg/runtime/framework/plugins/torch/torch.go)."""
    names = {
        "NNODES": "2",
        "NPROC_PER_NODE": "2",
        "NODE_RANK": str(node),
        "MASTER_ADDR": NODES[0],
        "MASTER_PORT": "29500",
    }
    return {f"PET_{name}": value for name, value in names.items()}


def sky_variables(node: int) -> dict[str, str]:
    names = {
        "NUM_NODES": "2",
        "NODE_IPS": "\n".join(ADDRESSES),
        "NODE_RANK": str(node),
        "TASK_ID": "sky-managed-1",
    }
    return {f"SKYPILOT_{name}": value for name, value in names.items()}


def begin(
    pair: Machines, project: Path, script: str, variables: Variables, node: int, label: str
) -> Started:
    """A node, with the volume of the project's own folder."""
    command = ["bash", "-c", script.replace("/checkpoints", str(project / "checkpoints"))]
    return pair.run(
        node, command, project.parent / f"{label}-{node}.log", project, **variables(node)
    )


def pods(
    place: Place, pair: Machines, project: Path, script: str, variables: Variables, how: str
) -> dict[str, Any]:
    """A pod is killed. Every pod that fails starts again by itself, as Kubernetes has it."""
    (project / "checkpoints").mkdir()
    runs = [begin(pair, project, script, variables, node, "pod") for node in (0, 1)]
    current, failures = list(runs), 0
    said = lambda: "".join((project.parent / f"pod-{node}.log").read_text() for node in (0, 1))  # noqa: E731
    try:
        until(lambda: shown_step(said()) >= 10, 150, "step 10", said)
        current[1].kill()
        began = time.monotonic()
        while any(run.process.poll() != 0 for run in current):
            if time.monotonic() - began > 400:
                raise SystemExit(f"the pods do not end:\n{said()[-4000:]}")
            for node in (0, 1):
                if current[node].process.poll() not in (None, 0):
                    failures += 1
                    time.sleep(BACKOFF)
                    current[node] = begin(pair, project, script, variables, node, "pod")
                    runs.append(current[node])
            time.sleep(0.2)
        seconds = time.monotonic() - began
    finally:
        for run in runs:
            run.kill()
    (out,) = (project / "checkpoints").iterdir()
    happened = (
        f"{failures} pods failed and started again, from the newest checkpoint; done after"
        f" {seconds:.0f} s"
    )
    return place.judged(out, said(), how, "the second pod killed", happened)


def recovered(
    place: Place, pair: Machines, project: Path, script: str, variables: Variables, how: str
) -> dict[str, Any]:
    """A node is lost; then all start again, as a managed job does."""
    (project / "checkpoints").mkdir()
    runs = [begin(pair, project, script, variables, node, "first") for node in (0, 1)]
    said = lambda: "".join(run.said() for run in runs)  # noqa: E731
    try:
        until(lambda: shown_step(said()) >= 10, 150, "step 10", said)
        runs[1].kill()
        ended = until(lambda: runs[0].process.poll() is not None, 300, "the end", said)
        runs += [begin(pair, project, script, variables, node, "again") for node in (0, 1)]
        seconds = until(
            lambda: all(run.process.poll() is not None for run in runs[2:]), 300, "the end", said
        )
    finally:
        for run in runs:
            run.kill()
    (out,) = (project / "checkpoints").iterdir()
    happened = (
        f"the other node ended after {ended:.0f} s; all started again and were done after"
        f" {seconds:.0f} s"
    )
    return place.judged(out, said(), how, "the second node lost", happened)
