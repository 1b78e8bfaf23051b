"""What is mounted in this mount namespace, and which sockets have a place in the file system."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

# Kernel interfaces, and what is mounted when somebody looks: nothing of the user's lies there.
AUTOMOUNT = "autofs"
INTERFACES = frozenset(
    [
        "proc",
        "sysfs",
        "devtmpfs",
        "devpts",
        "mqueue",
        "cgroup",
        "cgroup2",
        "securityfs",
        "debugfs",
        "tracefs",
        "bpf",
        "configfs",
        "fusectl",
        "binfmt_misc",
        "hugetlbfs",
        "rpc_pipefs",
        "efivarfs",
        "nsfs",
        "autofs",
        "pstore",
        "selinuxfs",
    ]
)


@dataclass(frozen=True)
class Mount:
    """One mount point."""

    path: str
    kind: str  # type of the file system
    read_only: bool


def mounts(text: str | None = None) -> list[Mount]:
    """Those that can be seen, outermost first; of several at one path the last.

    `text`: of `/proc/self/mountinfo`.
    """
    if text is None:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    found: dict[str, Mount] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")[0]
        path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
        if path == "/" or os.path.lexists(path):
            found.pop(path, None)
            found[path] = Mount(path, kind, "ro" in fields[5].split(","))
    return sorted(found.values(), key=lambda one: (one.path != "/", one.path.split("/")))


def is_below(path: str, folder: str) -> bool:
    """Whether a path is inside a folder."""
    return path != folder and (folder == "/" or path.startswith(folder + "/"))


def is_in(path: str, folder: str) -> bool:
    """Whether a path is a folder, or inside it."""
    return path == folder or is_below(path, folder)


def sockets() -> list[str]:
    """Paths at which a process of this machine listens: of a display, a name service, a container
    engine.
    """
    try:
        lines = (
            Path("/proc/net/unix")
            .read_text(encoding="utf-8", errors="surrogateescape")
            .splitlines()
        )
    except OSError:
        return []
    fields = (line.split(None, 7) for line in lines[1:])
    paths = {own[7] for own in fields if len(own) > 7}
    return sorted(path for path in paths if path.startswith("/") and _is_socket(path))


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False
