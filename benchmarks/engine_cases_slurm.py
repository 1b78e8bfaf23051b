"""launch/slurm.sbatch on a Slurm of two nodes: announced and unannounced ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_slurm import Cluster, cluster, slurm_version, steps_on
from engine_tools import Place, shown_step, until, write_project

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def slurm(place: Place) -> Iterator[dict[str, Any]]:
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # sbatch hands on the environment
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = place.fresh()
    with cluster(folder / "slurm", cpus=2) as found:
        yield requeued(place, found)
        yield node_lost(place, found)


def submitted(place: Place, found: Cluster) -> tuple[Path, str, Path]:
    folder = place.fresh()
    options = {"slurm_partition": "gpu", "slurm_time": "30", "join_timeout": 60}
    project = write_project(folder, engines=["slurm"], nodes=2, devices_per_node=2, **options)
    job = found.ask("sbatch", "--parsable", "launch/slurm.sbatch", cwd=project)
    log = project / f"launched-{job}.log"
    until(
        lambda: shown_step(read(log)) >= 10, 150, "step 10", lambda: str(found.job(job)) + read(log)
    )
    return project, job, log


def read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def finished(found: Cluster, job: str, log: Path) -> tuple[float, str]:
    """How long it took to the end, and how Slurm calls it."""
    state = ""

    def over() -> bool:
        nonlocal state
        state = found.job(job).get("JobState", "")
        return state in OVER

    return until(over, 900, "the end of the job", lambda: read(log)), state


def requeued(place: Place, found: Cluster) -> dict[str, Any]:
    """SIGUSR1 to the batch script, as --signal=B:USR1 sends it."""
    project, job, log = submitted(place, found)
    found.ask("scancel", "--batch", "--signal=USR1", job)
    seconds, state = finished(found, job, log)
    restarts = found.job(job).get("Restarts")
    happened = f"saved, queued again {restarts} time, went on; {state} after {seconds:.0f} s"
    how = f"{slurm_version()}, 2 slurmd, sbatch launch/slurm.sbatch, 2 ranks a node"
    return place.judged(
        project / "out" / f"job-{job}", read(log), how, "SIGUSR1 to the batch script", happened
    )


def node_lost(place: Place, found: Cluster) -> dict[str, Any]:
    project, job, log = submitted(place, found)
    found.lose("n2")
    down = until(
        lambda: found.states()[1].startswith("down"), 90, "n2 down", lambda: str(found.states())
    )
    until(
        lambda: found.job(job).get("Restarts") == "1",
        120,
        "the job queued again",
        lambda: str(found.job(job)),
    )
    found.slurmd("n2")  # the machine comes back
    seconds, state = finished(found, job, log)
    restarts = found.job(job).get("Restarts")
    happened = (
        f"the job was queued again ({restarts} time), the node was down after {down:.0f} s; "
        f"when it came back the job went on: {state} after {seconds:.0f} s"
    )
    how = (
        f"{slurm_version()}, 2 slurmd (SlurmdTimeout=10), sbatch launch/slurm.sbatch, 2 ranks a"
        " node"
    )
    until(lambda: not steps_on(found.folder, "n2"), 60, "no step left")
    return place.judged(
        project / "out" / f"job-{job}", read(log), how, "the second node lost", happened
    )
