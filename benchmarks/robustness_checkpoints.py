"""Damaged checkpoints handed to `train.py --resume` of a generated project: it goes on from
another, starts anew, or refuses in words.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from robustness_inputs import damaged
from scaffold_bitflip import SPEC

STEPS = 5


def make(folder: Path) -> Path:
    """A project that has saved twice, in `folder / "run"`."""
    from verified_fsdp2.skill import scaffold, spec

    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    scaffold.write(scaffold.render(spec.load(folder / "spec.yaml")), folder / "project")
    command = [
        sys.executable,
        "train.py",
        "--out",
        str(folder / "run"),
        "--steps",
        "4",
        "--checkpoint-interval",
        "2",
    ]
    subprocess.run(command, cwd=folder / "project", check=True, capture_output=True)
    return folder / "run"


def damage(chance: random.Random, run: Path) -> str:
    """Do something to one of the checkpoints, or to what stands beside them; what was done."""
    things = sorted(
        path for path in run.rglob("*") if path.is_file() and not path.name.startswith("events")
    )
    path = chance.choice(things)
    how = chance.choice(
        (
            "damaged",
            "damaged",
            "emptied",
            "removed",
            "a folder",
            "a link",
            "its folder removed",
            "text",
        )
    )
    if how == "damaged":
        path.write_bytes(damaged(chance, path.read_bytes()))
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("{}\n", encoding="utf-8")
    elif how == "its folder removed":
        shutil.rmtree(path.parent)
    else:
        path.unlink()
        if how == "a folder":
            path.mkdir()
        elif how == "a link":
            path.symlink_to(path.name)
    return f"{path.relative_to(run)}: {how}"


def resume(run: Path) -> list[str | bytes]:
    return [sys.executable, "train.py", "--out", str(run), "--steps", str(STEPS), "--resume"]
