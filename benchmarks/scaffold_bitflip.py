"""One bit flipped in each of 20 places of a checkpoint: refused every time, by name, and the
previous checkpoint taken.

    python benchmarks/scaffold_bitflip.py --out benchmarks/results/scaffold_bitflip.json

Two ranks of a generated project save twice. Each trial is a copy of the run with one bit of the
newer checkpoint flipped: in the data of each rank, in `.metadata`, in `SHA256SUMS`. A resume on 1
or 2 ranks must warn with the name of the file, put the checkpoint aside and go on from the older
one. The control is a copy with no bit flipped: it must go on from the newer one. `dcp_alone` is
what `torch.distributed.checkpoint` does with the same damage, without the project: "loads", or the
error.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import environment
from results_file import write

OLDER, NEWER, STEPS = 2, 4, 5
PLACES = {"__0_0.distcp": 6, "__1_0.distcp": 6, ".metadata": 4, "SHA256SUMS": 4}
PATIENCE = 120
SPEC = {
    "version": 1,
    "model": {
        "kind": "decoder",
        "layers": 2,
        "width": 32,
        "heads": 2,
        "vocabulary": 64,
        "sequence_length": 16,
    },
    "data": {"kind": "synthetic", "samples": 128},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 20, "global_batch": 8},
    "verify": {"reshard_to": []},
}


def train(project: Path, ranks: int, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [sys.executable, *launcher, "train.py", "--out", str(out), *flags]
    return subprocess.run(
        command, cwd=project, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def folder_of(out: Path, step: int) -> Path:
    return out / "run-001" / "checkpoints" / f"step_{step:08d}"


def flips(checkpoint: Path) -> list[tuple[str, int, int]]:
    """(file, byte, bit) of every trial: the ends of each file, and places between."""
    chance = random.Random(0)
    found = []
    for name, number in PLACES.items():
        size = (checkpoint / name).stat().st_size
        places = [0, size - 1, *(chance.randrange(size) for _ in range(number - 2))]
        found += [(name, place, chance.randrange(8)) for place in places]
    return found


def flip(file: Path, place: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def load_alone(checkpoint: Path) -> None:
    """Inside a process of its own: what DCP says."""
    import torch
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: (
            torch.empty(value.size, dtype=value.properties.dtype)
            if hasattr(value, "size")
            else None
        )
        for name, value in stored.items()
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)


def dcp_alone(checkpoint: Path) -> str:
    command = [sys.executable, "-W", "ignore", __file__, "--inside", str(checkpoint)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return "does not end"
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return "loads" if done.returncode == 0 else last[:120]


def resume(project: Path, ranks: int, out: Path) -> dict[str, Any]:
    """What a resume does: from which step it goes on, what it says, what it leaves."""
    done = train(project, ranks, out, "--steps", str(STEPS), "--resume")
    said = done.stdout + done.stderr
    from_step = re.search(r"^run .*, step (\d+) of", said, flags=re.MULTILINE)
    warning = re.search(
        r"^warning: .* is damaged \((.*)\), it is (\S+) now", said, flags=re.MULTILINE
    )
    return {
        "ended": f"step {STEPS:>6}  validation" in said,
        "resumed_from": int(from_step[1]) if from_step else None,
        "named": warning[1].split(", ") if warning else [],
        "put_aside": (folder_of(out, NEWER).parent / warning[2]).is_dir() if warning else False,
        "gone": not folder_of(out, NEWER).exists(),
    }


def trial(
    project: Path, saved: Path, number: int, name: str, place: int, bit: int
) -> dict[str, Any]:
    ranks = 1 + number % 2
    out = shutil.copytree(saved, saved.parent / f"trial-{number}")
    flip(folder_of(out, NEWER) / name, place, bit)
    row = {
        "file": name,
        "byte": place,
        "bit": bit,
        "ranks": ranks,
        "dcp_alone": dcp_alone(folder_of(out, NEWER)),
    }
    row |= resume(project, ranks, out)
    named = name in row["named"] if name != "SHA256SUMS" else bool(row["named"])
    ok = (
        row["ended"] and row["resumed_from"] == OLDER and named and row["put_aside"] and row["gone"]
    )
    return {**row, "ok": ok}


def measure(folder: Path) -> dict[str, Any]:
    import yaml

    from verified_fsdp2.skill import scaffold, spec

    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    project, saved = folder / "project", folder / "saved"
    scaffold.write(scaffold.render(spec.load(folder / "spec.yaml")), project)
    done = train(project, 2, saved, "--steps", str(NEWER), "--checkpoint-interval", str(OLDER))
    if not folder_of(saved, NEWER).is_dir() or not folder_of(saved, OLDER).is_dir():
        raise SystemExit(done.stdout + done.stderr)
    control = resume(project, 2, shutil.copytree(saved, folder / "control"))
    rows = []
    for number, (name, place, bit) in enumerate(flips(folder_of(saved, NEWER))):
        rows.append(trial(project, saved, number, name, place, bit))
        print(json.dumps(rows[-1]), flush=True)
    return {"control": control, "trials": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        load_alone(options.inside)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder))
    if options.out:
        write(options.out, {"environment": environment(), **results})
    rows, control = results["trials"], results["control"]
    good = sum(row["ok"] for row in rows)
    silent = sum(row["dcp_alone"] == "loads" for row in rows)
    right = control["ended"] and control["resumed_from"] == NEWER and not control["named"]
    print(
        f"{good} of {len(rows)} flipped bits refused and the older checkpoint taken; DCP alone"
        f" loads {silent} of them"
    )
    print(
        f"without a flip: goes on from step {control['resumed_from']}, {'no' if right else 'a'}"
        " warning"
    )
    return 0 if good == len(rows) and right else 1


if __name__ == "__main__":
    raise SystemExit(main())
