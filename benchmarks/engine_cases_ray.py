"""launch/ray_train.py on two Ray nodes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_ray import RayCluster, ray_cluster, ray_python, ray_version
from engine_slurm import free_ports
from engine_tools import Place, Started, shown_step, until, write_project


def ray(place: Place) -> Iterator[dict[str, Any]]:
    python = ray_python(place.pythons["ray"])
    folder = place.fresh()
    with ray_cluster(python, folder / "cluster", free_ports(1)[0]) as cluster:
        cluster.head(2)
        until(lambda: "/2.0 CPU" in cluster.status(), 120, "the head", cluster.nodes[0].said)
        cluster.node(2)
        until(lambda: "/4.0 CPU" in cluster.status(), 120, "the second node", cluster.nodes[1].said)
        yield case(place, cluster, python, "a rank killed")
        yield case(place, cluster, python, "the second node lost")


def case(place: Place, cluster: RayCluster, python: Path, disturbed: str) -> dict[str, Any]:
    folder = place.fresh()
    project = write_project(folder, engines=["ray"], nodes=2, devices_per_node=2)
    run = Started(
        [str(python), "launch/ray_train.py"], folder / "log", project, **cluster.variables
    )
    after = ""
    try:
        until(lambda: shown_step(run.said()) >= 10, 300, "step 10", run.said)
        if disturbed == "a rank killed":
            os.kill(ranks_in(project)[-1], signal.SIGKILL)
        else:
            lost = cluster.nodes[1]
            lost.kill()
            seconds = until(
                lambda: len(lost.alive()) == 0 and len(ranks_in(project)) <= 2, 60, "its ranks gone"
            )
            after = f"its ranks were gone after {seconds:.0f} s; a node came in its place; "
            cluster.node(2)
        seconds = until(lambda: run.process.poll() is not None, 400, "the end", run.said)
    finally:
        run.kill()
    out = next((project / "out").glob("ray-*"))
    happened = (
        f"{after}Ray started all ranks again; done after {seconds:.0f} s with status"
        f" {run.process.returncode}"
    )
    how = f"{ray_version(python)}, 2 nodes on one machine, launch/ray_train.py, 4 workers"
    return place.judged(out, run.said(), how, disturbed, happened, left=len(ranks_in(project)))


def ranks_in(project: Path) -> list[int]:
    """The processes of train.py that run in this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = place.joinpath("cmdline").read_bytes().split(b"\0")
            if b"train.py" in words and place.joinpath("cwd").readlink() == project:
                found.append(int(place.name))
    return sorted(found)
