"""Since which release of torch the names of references/converting.md exist: looked up in the
sources of the wheels.

    python benchmarks/api_by_version.py FOLDER [--out benchmarks/results/api_by_version.json]

The wheels are fetched with pip (network; some gigabytes, one at a time) and only their Python files
are kept in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from results_file import write

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0")
FSDP = "distributed/fsdp"
SHARD = f"{FSDP}/_fully_shard/_fully_shard.py"
STATE_DICT = "distributed/checkpoint/state_dict.py"
QUESTIONS = {  # a name of the documents: the file and the pattern that show it
    "fully_shard": (f"{FSDP}/__init__.py", r"\bfully_shard\b"),
    "FSDPModule": (f"{FSDP}/__init__.py", r"\bFSDPModule\b"),
    "CPUOffloadPolicy": (f"{FSDP}/__init__.py", r"\bCPUOffloadPolicy\b"),
    "ignored_params": (SHARD, r"\bignored_params\b"),
    "reshard_after_forward=None": (SHARD, r"reshard_after_forward: .*= None"),
    "set_gradient_divide_factor": (SHARD, r"def set_gradient_divide_factor"),
    "set_reduce_scatter_unused_params": (SHARD, r"def set_reduce_scatter_unused_params"),
    "reset_iter_state": (SHARD, r"def reset_iter_state"),
    "tied weights refused": (
        f"{FSDP}/_fully_shard/_fsdp_state.py",
        r"already managed by another FSDP group",
    ),
    "clip_grad_norm_": ("nn/utils/clip_grad.py", r"def clip_grad_norm_"),
    "get_model_state_dict": (STATE_DICT, r"def get_model_state_dict"),
    "broadcast_from_rank0": (STATE_DICT, r"broadcast_from_rank0: bool"),
    "dcp.save": ("distributed/checkpoint/state_dict_saver.py", r"^def save\("),
    "dcp.load": ("distributed/checkpoint/state_dict_loader.py", r"^def load\("),
    "torch.amp.GradScaler": ("amp/__init__.py", r"\bGradScaler\b"),
    "torch.accelerator.set_device_index": ("accelerator/__init__.py", r"def set_device_index"),
}


def sources(folder: Path, version: str) -> Path:
    """The `torch` folder of a release: its Python files, fetched if they are not there."""
    home = folder / version
    if not (home / "torch").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        subprocess.run([*pip, "--dest", str(home), "torch==" + version], check=True)
        (wheel,) = home.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                home, [name for name in archive.namelist() if re.match(r"torch/.*\.py$", name)]
            )
        wheel.unlink()
    return home / "torch"


def has(torch: Path, file: str, pattern: str) -> bool:
    path = torch / file
    return path.is_file() and re.search(pattern, path.read_text(encoding="utf-8"), re.M) is not None


def first_versions(folder: Path) -> dict[str, str | None]:
    """{name: the first of VERSIONS from which on all have it}."""
    found: dict[str, str | None] = {}
    for version in reversed(VERSIONS):
        torch = sources(folder, version)
        for name, (file, pattern) in QUESTIONS.items():
            later = name in found
            if has(torch, file, pattern) and (not later or found[name] == newer(version)):
                found[name] = version
    return {name: found.get(name) for name in QUESTIONS}


def newer(version: str) -> str | None:
    """The next of VERSIONS."""
    place = VERSIONS.index(version) + 1
    return VERSIONS[place] if place < len(VERSIONS) else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "api_by_version.json"
    )
    args = parser.parse_args()
    result = {"versions": VERSIONS, "since": first_versions(args.folder)}
    write(args.out, result)
    print(json.dumps(result["since"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
