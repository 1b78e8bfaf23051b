"""A three-way merge of one file by `git merge-file`, which needs no repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from ...verifier.errors import UserError

MOST_CONFLICTS = 127  # the exit status is their number; above is an error


class NotMerged(Exception):
    """Three files cannot be merged line by line; the message says why."""


class NoGit(NotMerged):
    """There is no git to do it."""


def merge(
    base: bytes, ours: bytes, theirs: bytes, labels: tuple[str, str], favour_ours: bool = False
) -> bytes:
    """`ours` with what changed from `base` to `theirs`; where both changed the same lines they
    stand between markers.

    With `favour_ours` those lines are as in `ours`. Raises NotMerged.
    """
    git = shutil.which("git")
    if git is None:
        raise NoGit("git is not installed")
    style = ["--ours"] if favour_ours else ["-L", labels[0], "-L", "base", "-L", labels[1]]
    try:
        with tempfile.TemporaryDirectory(prefix="fsdp2-merge-") as folder:
            for name, data in (("ours", ours), ("base", base), ("theirs", theirs)):
                (Path(folder) / name).write_bytes(data)
            # independent of the user's settings and of a repository around the folder
            environment = {
                "PATH": os.environ.get("PATH", os.defpath),
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": os.devnull,
                "GIT_CEILING_DIRECTORIES": str(Path(folder).parent),
            }
            command = [git, "merge-file", "-p", *style, "ours", "base", "theirs"]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=60, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot merge: {error}") from error
    if done.returncode > MOST_CONFLICTS and b"binary" in done.stderr:
        raise NotMerged("it is not text")
    if done.returncode > MOST_CONFLICTS:
        raise UserError(f"git merge-file fails: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def conflict_lines(data: bytes, marks: bytes = b"<>") -> list[int]:
    """The lines on which a conflict opens (`<`) or closes (`>`)."""
    marked = re.finditer(rb"^([" + marks + rb"])\1{6} ", data, re.M)
    return [data.count(b"\n", 0, found.start()) + 1 for found in marked]
