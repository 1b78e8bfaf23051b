"""What `--launcher TEXT` means.

Ranks on this machine are forked or started by torchrun; on several, a command starts them.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

READY = {
    "slurm": (
        "srun --nodes {nodes} --ntasks {nodes} --ntasks-per-node 1 --kill-on-bad-exit=0 --overlap"
        " {worker}"
    ),
    "ssh": "ssh -o BatchMode=yes {host} {worker}",
    "kubectl": "kubectl exec {host} -- {worker}",
}
HERE = ("fork", "torchrun")  # launchers that start ranks on this machine


@dataclass(frozen=True)
class Way:
    """A command that starts workers: one for each of `hosts`, or one for all `nodes`."""

    command: str
    nodes: int
    hosts: tuple[str, ...] = ()

    def used(self, world_size: int) -> int:
        """As many of the nodes as ranks divide over evenly."""
        return max(n for n in range(1, self.nodes + 1) if world_size % n == 0)


def way(text: str, environ: Mapping[str, str]) -> Way:
    """What `--launcher TEXT` means: `slurm`, `slurm:NODES`, `ssh:HOST,HOST`, `kubectl:POD,POD`, or
    a command with `{worker}`.

    Raises ValueError if it means nothing.
    """
    name, _, rest = text.partition(":")
    ready = name in READY
    command = READY.get(name, text)
    if "{worker}" not in command:
        known = ", ".join((*HERE, "slurm", "ssh:HOST,HOST", "kubectl:POD,POD"))
        raise ValueError(f"expected one of {known}, or a command with {{worker}}, found {text!r}")
    try:
        command.format(worker="", host="", nodes=1, ranks=1, ranks_per_node=1)
    except (KeyError, IndexError, ValueError):
        fields = "{worker}, {host}, {nodes}, {ranks}, {ranks_per_node}"
        raise ValueError(f"in {text!r}: what it may name is {fields}") from None
    if "{host}" in command:
        hosts = tuple(filter(None, (rest if ready else environ.get("FSDP2_HOSTS", "")).split(",")))
        if not hosts:
            missing = f"{name}:HOST,HOST" if ready else "FSDP2_HOSTS=HOST,HOST in the environment"
            raise ValueError(f"{text!r} needs the names of the machines: {missing}")
        return Way(command, len(hosts), hosts)
    given = rest if ready else environ.get("FSDP2_NODES", "")
    given = given or environ.get("SLURM_JOB_NUM_NODES", "") or ("" if ready else "1")
    if not given.isdigit() or int(given) < 1:
        raise ValueError(
            f"{text!r} needs the number of nodes: an allocation (salloc, sbatch), or {name}:2"
        )
    return Way(command, int(given))


def most_on_a_machine(text: str, sizes: Iterable[int], environ: Mapping[str, str]) -> int:
    """How many ranks the runs of these world sizes have on one machine, which is as this one."""
    used = (lambda size: 1) if text in HERE else way(text, environ).used
    return max(size // used(size) for size in sizes)


def problem(text: str, environ: Mapping[str, str]) -> str:
    """What is wrong with the text of a launcher, or with its command on this machine; "" if nothing
    is.
    """
    if text in HERE:
        return ""
    try:
        first = shlex.split(way(text, environ).command)[0]
    except (ValueError, IndexError) as error:
        return str(error)
    return "" if shutil.which(first) else f"{first} is no command here"
