"""launch/torchrun.sh: on one machine, and on two that a link joins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_netns import NODES, Machines, machines
from engine_tools import Place, Started, ranks_of, shown_step, until, write_project

START = ["bash", "launch/torchrun.sh"]
Runs = list[Started]


def torchrun(place: Place) -> Iterator[dict[str, Any]]:
    yield alone(place)
    with machines() as pair:
        for name, disturb in DISTURBED.items():
            yield two_nodes(place, pair, name, disturb)
        for name, lose in LOST.items():
            yield lost(place, pair, name, lose)


def alone(place: Place) -> dict[str, Any]:
    folder = place.fresh()
    project = write_project(folder, engines=["torchrun"], nodes=1, devices_per_node=2)
    run = Started(START, folder / "log", project)
    try:
        until(lambda: shown_step(run.said()) >= 10, 120, "step 10", run.said)
        run.note_members()
        os.kill(ranks_of(run)[-1], signal.SIGKILL)
        seconds = until(lambda: run.process.poll() is not None, 240, "the end", run.said)
    finally:
        run.note_members()
        left = len([pid for pid in run.alive() if run.process.poll() is not None])
        run.kill()
    happened = (
        f"torchrun started the ranks again; all done after {seconds:.0f} s with status"
        f" {run.process.returncode}"
    )
    return place.judged(
        project / "out",
        run.said(),
        "launch/torchrun.sh, 2 ranks",
        "a rank killed",
        happened,
        left=left,
    )


def start_both(pair: Machines, project: Path, folder: Path, label: str, *more: str) -> Runs:
    return [
        pair.run(node, [*START, *more], folder / f"{label}-{node}.log", project, HEAD=NODES[0])
        for node in (0, 1)
    ]


def said(runs: Runs) -> str:
    return "".join(run.said() for run in runs)


def ended(runs: Runs) -> bool:
    return all(run.process.poll() is not None for run in runs)


def kill_rank(pair: Machines, runs: Runs) -> None:
    os.kill(ranks_of(runs[1])[-1], signal.SIGKILL)


def cut(seconds: float) -> Callable[[Machines, Runs], None]:
    def disturb(pair: Machines, runs: Runs) -> None:
        pair.link(False)
        time.sleep(seconds)
        pair.link(True)

    return disturb


def cut_for_good(pair: Machines, runs: Runs) -> None:
    pair.link(False)


def lose_node(number: int) -> Callable[[Machines, Runs], None]:
    return lambda pair, runs: runs[number].kill()


DISTURBED = {
    "a rank of the second node killed": kill_rank,
    "the link cut for 3 s": cut(3),
    "the link cut for 12 s, longer than step_timeout": cut(12),
}
REPLACED = "the second node lost, and at once started again"
LOST = {
    "the link cut for good": cut_for_good,
    "the second node lost": lose_node(1),
    REPLACED: lose_node(1),
    "the node with the store (HEAD) lost": lose_node(0),
}


def started(place: Place, pair: Machines) -> tuple[Path, Path, Runs]:
    folder = place.fresh()
    project = write_project(
        folder, engines=["torchrun"], nodes=2, devices_per_node=2, join_timeout=30
    )
    runs = start_both(pair, project, folder, "first")
    try:
        until(lambda: shown_step(said(runs)) >= 10, 120, "step 10", lambda: said(runs))
    except SystemExit:
        for run in runs:
            run.kill()
        raise
    for run in runs:
        run.note_members()
    return folder, project, runs


def two_nodes(
    place: Place, pair: Machines, name: str, disturb: Callable[[Machines, Runs], None]
) -> dict[str, Any]:
    """What a run goes on after by itself."""
    _, project, runs = started(place, pair)
    try:
        disturb(pair, runs)
        seconds = until(lambda: ended(runs), 300, "the end", lambda: said(runs))
    finally:
        pair.link(True)
        for run in runs:
            run.kill()
    statuses = " and ".join(str(run.process.returncode) for run in runs)
    happened = f"the job went on by itself; all done after {seconds:.0f} s with status {statuses}"
    how = "launch/torchrun.sh in 2 network namespaces, 2 ranks each"
    return place.judged(project / "out", said(runs), how, name, happened, left=len(remaining(runs)))


def lost(
    place: Place, pair: Machines, name: str, lose: Callable[[Machines, Runs], None]
) -> dict[str, Any]:
    """What ends a run: within which time, and that it is continued."""
    folder, project, runs = started(place, pair)
    again: Runs = []
    try:
        lose(pair, runs)
        if name == REPLACED:
            runs.append(
                pair.run(1, [*START, "--resume"], folder / "replaced.log", project, HEAD=NODES[0])
            )
        seconds = until(lambda: ended(runs), 300, "the end", lambda: said(runs))
        pair.link(True)
        again = start_both(pair, project, folder, "again", "--resume")
        until(lambda: ended(again), 300, "the end", lambda: said(again))
    finally:
        pair.link(True)
        for run in [*runs, *again]:
            run.kill()
    statuses = " and ".join(str(run.process.returncode) for run in again)
    happened = (
        f"all nodes ended within {seconds:.0f} s; started again with --resume: status {statuses}"
    )
    how = "launch/torchrun.sh in 2 network namespaces, 2 ranks each"
    text = said(runs) + said(again)
    return place.judged(
        project / "out", text, how, name, happened, left=len(remaining([*runs, *again]))
    )


def remaining(runs: Runs) -> list[int]:
    time.sleep(1)
    return [pid for run in runs for pid in run.alive()]
