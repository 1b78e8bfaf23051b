"""Ranks on several machines: commands that start them, what nodes report, and a node that is
lost.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from records import cases
from scripts import ZOO, edited
from verified_fsdp2.verifier.config.launchers import Way, most_on_a_machine, way
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.errors import MachineRefuses, UserError
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.cluster import LOST, SKEW, _Nodes, commands
from verified_fsdp2.verifier.launch.node import NOT_SHARED, mine
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.verdict import Verdict

VERIFIER = Path(__file__).parents[2] / "verifier"
HOSTS = "env NODE={host} {worker}"  # two nodes on this machine
LATE = "sh -c 'if [ {host} = a ]; then sleep 4; fi; {worker}'"  # the node of rank 0
LOSES = "sh -c 'case {host} in b) {worker} & sleep 6; kill -9 $! ;; *) {worker} ;; esac'"


@cases(
    "text, environ, nodes, hosts",
    ("slurm", {"SLURM_JOB_NUM_NODES": "4"}, 4, ()),
    ("slurm:2", {"SLURM_JOB_NUM_NODES": "4"}, 2, ()),
    ("ssh:a,b", {}, 2, ("a", "b")),
    ("kubectl:pod-0", {}, 1, ("pod-0",)),
    ("mpirun -np {ranks} {worker}", {}, 1, ()),
    ("srun -N {nodes} {worker}", {"FSDP2_NODES": "3"}, 3, ()),
    ("enter {host} {worker}", {"FSDP2_HOSTS": "x,y,z"}, 3, ("x", "y", "z")),
)
def test_what_a_launcher_means(
    text: str, environ: dict[str, str], nodes: int, hosts: tuple[str, ...]
) -> None:
    found = way(text, environ)
    assert (found.nodes, found.hosts) == (nodes, hosts)


@cases(
    "text, says",
    ("srun", "or a command with {worker}"),
    ("slurm", "needs the number of nodes: an allocation (salloc, sbatch), or slurm:2"),
    ("slurm:two", "needs the number of nodes"),
    ("ssh", "needs the names of the machines: ssh:HOST,HOST"),
    ("enter {host} {worker}", "FSDP2_HOSTS=HOST,HOST"),
    ("srun {node} {worker}", "what it may name is {worker}, {host}"),
    ("no-such-command {worker}", "no-such-command is no command here"),
)
def test_a_launcher_that_means_nothing(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_NUM_NODES", "FSDP2_HOSTS", "FSDP2_NODES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as raised:
        resolve(ZOO / "minimal.py", {"launcher": text})
    assert says in str(raised.value)


@cases("world, nodes", (1, 1), (2, 2), (3, 3), (4, 2), (8, 2))
def test_ranks_are_divided_evenly_over_nodes(world: int, nodes: int, tmp_path: Path) -> None:
    found = Way(
        "srun -N {nodes} --ntasks-per-node {ranks_per_node} {worker}", 3 if world == 3 else 2
    )
    (command,) = commands(found, world, tmp_path)
    assert command.startswith(f"srun -N {nodes} --ntasks-per-node {world // nodes} ")
    assert command.endswith(f"node {tmp_path}/request.json")
    assert len(commands(Way("{host} {worker}", 2, ("a", "b")), world, tmp_path)) == (
        2 if world % 2 == 0 else 1
    )


def test_gpus_are_counted_for_one_machine() -> None:
    assert most_on_a_machine("fork", (8, 4, 16), {}) == 16
    assert most_on_a_machine("slurm:2", (8, 4, 16), {}) == 8
    assert most_on_a_machine("slurm:2", (8, 5), {}) == 5


TASK = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
NODE = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@cases(
    "given, environ, ranks, local, group",
    ("", TASK, [3], "1", "1"),
    ("", NODE, [2, 3], "0", "1"),
    ("0", TASK, [0, 1], "0", "0"),
)
def test_which_ranks_a_node_has(
    given: str, environ: dict[str, str], ranks: list[int], local: str, group: str
) -> None:
    _, found, names = mine({"world_size": 4, "nodes": 2}, given, environ)
    assert found == ranks
    assert names == {
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": "2",
    }


def test_tasks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"starts 3 tasks; 2 \(one a node\) or 4 \(one a rank\) are needed"
    ):
        mine({"world_size": 4, "nodes": 2}, "", {"SLURM_NTASKS": "3", "SLURM_PROCID": "0"})


def test_a_node_that_does_not_see_the_folder() -> None:
    done = subprocess.run(
        [sys.executable, VERIFIER, "node", "/nowhere/request.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == NOT_SHARED
    assert (
        "does not see /nowhere/request.json: set TMPDIR to a folder that all nodes share"
        in done.stderr
    )


@cases(
    "other, says",
    (
        {"torch": "2.12.1"},
        "node b has torch 2.12.1, node a has 2.13.0: give all nodes one environment",
    ),
    ({"ahead": SKEW + 30}, "the clock of node b is 40 s ahead of this machine's"),
    ({}, ""),
)
def test_nodes_that_differ(other: dict[str, Any], says: str, tmp_path: Path) -> None:
    run = _Nodes({"grace": 5.0, "world_size": 2}, tmp_path, None, 0.0)  # type: ignore[arg-type]
    first = {
        "ranks": [0],
        "host": "a",
        "time": time.time(),
        "python": "3.11.7",
        "torch": "2.13.0",
        "fsdp2": "1",
    }
    second = {
        **first,
        "ranks": [1],
        "host": "b",
        "time": time.time() + other.pop("ahead", 0.0),
        **other,
    }
    for number, said in enumerate((first, second)):
        (tmp_path / f"node{number}.json").write_text(json.dumps(said))
    for path in sorted(tmp_path.glob("node*.json")):
        run.nodes[path.stem] = json.loads(path.read_text())
    assert says in (found := run._unlike(run.nodes["node1"])) and bool(found) == bool(says)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FSDP2_HOSTS": "a,b",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, value)


def launched(script: Path, command: str, work: Path, only: str, **settings: Any) -> Verdict:
    target = resolve(script, {"launcher": command, "reshard_to": "", "steps": "3", **settings})
    with Launcher(wish=wish(temporary("runs"), mechanism="copy")) as launcher:
        return verify_with(launcher, target, work, select((only,), ()))


@pytest.mark.usefixtures("two_nodes")
def test_two_nodes_are_verified_as_one_machine_is(tmp_path: Path) -> None:
    verdict = launched(ZOO / "minimal.py", HOSTS, tmp_path / "work", "matches-ddp")
    assert verdict.verdict == "pass"
    about = [
        json.loads(path.read_text()) for path in sorted((tmp_path / "work").rglob("node*.json"))
    ]
    assert {(one["host"], tuple(one["ranks"])) for one in about} == {("a", (0,)), ("b", (1,))}


@pytest.mark.full
@pytest.mark.usefixtures("two_nodes")
def test_a_node_that_is_lost_is_named(tmp_path: Path) -> None:
    slow = edited(
        tmp_path,
        (
            "for step in range(STEPS):",
            "for step in range(STEPS):\n        __import__('time').sleep(4)",
        ),
    )
    began = time.monotonic()
    (found,) = launched(slow, LOSES, tmp_path / "work", "run-completes").findings
    assert (found.status, found.evidence) == (
        "fail",
        "node b stopped answering, and rank 1 with it",
    )
    assert time.monotonic() - began < 4 * LOST
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in _bytes(path)
    ]
    assert left == [Path("/proc", str(os.getpid()), "cmdline")] or left == []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.usefixtures("two_nodes")
def test_tasks_that_do_not_fit_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(
        MachineRefuses, match="did not start rank 0: the launcher's command starts 3 tasks; 1 "
    ):
        launched(ZOO / "minimal.py", "env A=b {worker}", tmp_path / "work", "run-completes")


@pytest.mark.usefixtures("two_nodes")
def test_a_node_may_begin_late(tmp_path: Path) -> None:
    verdict = launched(ZOO / "minimal.py", LATE, tmp_path / "work", "run-completes")
    assert verdict.verdict == "pass"


@pytest.mark.usefixtures("two_nodes")
def test_a_queue_is_no_fault_of_the_script(tmp_path: Path) -> None:
    with pytest.raises(
        MachineRefuses, match=r"did not start rank 0 in time \(does it wait in a queue\?\)"
    ):
        launched(
            ZOO / "minimal.py",
            "sleep 60; : {worker}",
            tmp_path / "work",
            "run-completes",
            timeout="3",
        )


@pytest.mark.usefixtures("two_nodes")
def test_a_command_that_starts_nothing_says_why(tmp_path: Path) -> None:
    with pytest.raises(MachineRefuses, match="did not start rank 0: no such partition"):
        launched(
            ZOO / "minimal.py",
            "echo no such partition >&2; : {worker}",
            tmp_path / "work",
            "run-completes",
        )
