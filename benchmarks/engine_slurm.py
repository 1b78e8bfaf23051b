"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, all in one folder, all
ended at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from engine_tools import Missing, Started, until, version

NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
CONF = """
ClusterName=engines
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=300
ReturnToService=2
RebootProgram=/bin/true
SlurmdParameters=config_overrides
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Cluster:
    """The daemons, and the commands that talk to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, Started] = {}
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, name: str, *command: str) -> None:
        self.daemons[name] = Started(
            list(command), self.folder / f"{name}.out", self.folder, **self.variables
        )

    def slurmd(self, node: str) -> None:
        """With a host name of its own, which all nodes know, as the machines of a cluster have."""
        names = 'mount --bind "$0/hosts" /etc/hosts && hostname "$1" && exec slurmd -D -N "$1"'
        self.start(node, "unshare", "--mount", "--uts", "sh", "-c", names, str(self.folder), node)

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        variables = {**os.environ, **self.variables}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=variables,
            cwd=cwd or self.folder,
        )
        return (done.stdout + done.stderr).strip()

    def states(self) -> list[str]:
        return [
            self.ask("sinfo", "--noheader", "--nodes", node, "--format", "%T") for node in NODES
        ]

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def lose(self, node: str) -> None:
        """The node is gone, with everything that runs on it."""
        self.daemons[node].kill()
        for pid in steps_on(self.folder, node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def steps_on(folder: Path, node: str) -> list[int]:
    """The processes of this cluster on one of its nodes: slurmstepd and what it started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = place.joinpath("environ").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={folder}/slurm.conf".encode() in variables
            if ours and f"SLURMD_NODENAME={node}".encode() in variables:
                found.append(int(place.name))
    return found


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def cluster(folder: Path, cpus: int) -> Iterator[Cluster]:
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise Missing(
            f"no {', '.join(missing) or 'root'}: apt-get install slurm-wlm munge, and run as root"
        )
    folder.mkdir()
    folder.chmod(0o755)
    host, (control, *ports) = socket.gethostname(), free_ports(1 + len(NODES))
    lines = [
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
        " State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    ]
    text = CONF.format(folder=folder, host=host, port=control, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)
    hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in NODES)
    (folder / "hosts").write_text(hosts)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    here = Cluster(folder)
    try:
        options = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "log", "pid")]
        seed = f"--seed-file={folder}/munge.seed"
        here.start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            *options,
            seed,
        )
        until((folder / "munge.socket").exists, 20, "munged", here.daemons["munged"].said)
        here.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            here.slurmd(node)
        until(
            lambda: here.states() == ["idle", "idle"],
            60,
            "two idle nodes",
            lambda: str(here.states()),
        )
        yield here
    finally:
        here.ask("scancel", "--full", "--user", "root")
        time.sleep(1)
        for node in NODES:
            for pid in steps_on(folder, node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in here.daemons.values():
            daemon.kill()


def slurm_version() -> str:
    return version(["slurmd", "-V"])
