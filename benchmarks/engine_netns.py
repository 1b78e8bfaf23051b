"""Two machines on one: network and host-name namespaces, joined by a link that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from engine_tools import Missing, Started

NODES = ("fsdp2-a", "fsdp2-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
NOBODY = "02:00:00:00:00:99"  # the address of no network card
# after about half a minute TCP gives up on a peer that is silent; 15, a quarter of an hour, is
# Linux's own
RETRIES = 6


class Machines:
    """Commands on one of the machines, and the link between them."""

    def run(self, node: int, command: list[str], log: Path, cwd: Path, **more: str) -> Started:
        """Start a command on one of the machines."""
        name = NODES[node]
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name, *command]
        return Started(["ip", "netns", "exec", name, *inside], log, cwd, **more)

    def link(self, up: bool) -> None:
        """Cut or restore the link: packets are lost, and neither side is notified."""
        for name, other in zip(NODES, reversed(ADDRESSES), strict=True):
            mac = mac_of(other) if up else NOBODY
            ip(
                "-n",
                name,
                "neighbour",
                "replace",
                other,
                "dev",
                "eth0",
                "lladdr",
                mac,
                "nud",
                "permanent",
            )


def mac_of(address: str) -> str:
    name = NODES[ADDRESSES.index(address)]
    return json.loads(ip("-n", name, "-json", "link", "show", "eth0"))[0]["address"]


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise Missing("network namespaces need root and iproute2")
    try:
        for name in NODES:
            ip("netns", "add", name)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            pairs = zip(ADDRESSES, NODES, strict=True)
            hosts.write_text(
                "127.0.0.1 localhost\n" + "".join(f"{address} {node}\n" for address, node in pairs)
            )
            ip("-n", name, "link", "set", "lo", "up")
            ip(
                "netns",
                "exec",
                name,
                "sh",
                "-c",
                f"echo {RETRIES} > /proc/sys/net/ipv4/tcp_retries2",
            )
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            NODES[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            NODES[1],
        )
        for name, address in zip(NODES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield Machines()
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()
