"""Each version of torch and Python: installed, doctor, right scripts, a fault of every family, the
quickstart's project.

    python benchmarks/versions.py FOLDER [--only 2.9.1 ...] --out benchmarks/results/versions.json
    \\
        --table references/reliability.md

An environment a version is made in FOLDER (with pip; about 2 GB each, and 4 GB for each major
version of CUDA) and kept. Builds for CUDA import NVIDIA's libraries even on a machine without a
GPU: those of the newest torch are installed once for each major version of CUDA, beside the
environments, and a .pth file leads there. Then fsdp2 is installed; where torch has exactly the
libraries that it asks for, pip may change no other package. Rows that were not run again keep their
results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results_file import with_section, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
LIMIT = 3600  # seconds for the verifications of one environment
TORCH = (
    "2.15.0",
    "2.14.1",
    "2.13.0",
    "2.12.1",
    "2.11.0",
    "2.10.0",
    "2.9.1",
    "2.8.0",
    "2.7.1",
    "2.6.0",
)
PYTHONS = ("3.12", "3.13")  # with the version of torch below; all others run on 3.11
DEVELOPED_ON = "2.13.0"
MORE_FAULTS = (
    "faults/load_without_set",
    "faults/state_restored",
    "faults/evaluation_same_in_one_process",
)
NEW_IN_TORCH = (
    ROOT / "tests" / "verifier" / "test_oracles.py",
    "finalizes",
)  # a test of what only the newest torch has
NO_FAULT_SINCE = {
    "faults/reduce_dtype_follows_param_dtype": (2, 15)
}  # torch reduces in the parameter's own dtype
KERNELS = ("nvidia", "cuda-", "triton")
PLATFORM = "gloo-avg-is-sum"  # a warning: this torch itself is at fault, and only on the CPU
HEADING = "## Versions"
ABOUT = """\
Made by `make versions` from `benchmarks/results/versions.json`; do not edit. \
Right: right scripts of `tests/zoo/` that pass on two ranks,
with their resume and reshard (2.7.1: HSDP stops on the CPU in torch itself, inconclusive). \
Faults: seeded faults found, at least one
of each family. Quickstart: the verdict on the project of `examples/quickstart.yaml`. \
Changed: packages that the installation of
fsdp2 changed in an environment that has torch.""".splitlines()


def environment(folder: Path, torch: str, python: str) -> Path:
    """The Python of an environment with this torch, made if it is not there."""
    home = folder / f"torch{torch}-py{python}"
    own, done = home / "bin" / "python", home / "made"
    if done.is_file():
        return own
    print(f"making {home}", flush=True)
    subprocess.run([f"python{python}", "-m", "venv", "--clear", str(home)], check=True)
    pip(own, "--no-deps", f"torch=={torch}")
    wanted = [text for text in ask(own, "m.requires('torch')") if "extra ==" not in text]
    libraries = [text for text in wanted if text.startswith(KERNELS)]
    pip(own, "numpy", *(text for text in wanted if text not in libraries))
    if libraries:
        major = re.search(r"cu(\d\d)|toolkit[^=]*==(\d\d)", " ".join(libraries))
        shared = folder / f"cuda{next(filter(None, major.groups())) if major else ''}"
        if not shared.is_dir():
            pip(own, "--target", str(shared), *libraries)
        Path(ask(own, "sysconfig.get_path('purelib')"), "cuda.pth").write_text(
            f"{shared}\n", encoding="utf-8"
        )
    subprocess.run([str(own), "-c", "import torch.distributed.fsdp"], check=True)
    done.touch()
    return own


def pip(python: Path, *arguments: str) -> None:
    """Install, whatever a constraint of the machine says."""
    clean = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", *arguments],
        check=True,
        env=clean,
    )


def ask(python: Path, code: str) -> Any:
    """What an expression gives, where `importlib.metadata` is `m` and `sysconfig` is known."""
    code = f"import importlib.metadata as m, json, sysconfig; print(json.dumps({code}))"
    return json.loads(
        subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
    )


def installed(python: Path) -> dict[str, str]:
    """{package: version}, without fsdp2 itself."""
    said = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        row["name"]: row["version"]
        for row in json.loads(said.stdout)
        if row["name"] != "verified-fsdp2"
    }


def row(folder: Path, torch: str, python: str) -> dict[str, Any]:
    """The results of one environment."""
    own = environment(folder, torch, python)
    started = time.monotonic()
    changed = None
    if (
        subprocess.run(
            [str(own), "-m", "pip", "check"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        before = installed(own)
        pip(own, str(ROOT))
        changed = sorted(
            name for name, version in installed(own).items() if before.get(name, version) != version
        )
    pip(own, "jinja2", "pyyaml", "jsonschema", "pytest")
    pip(own, "--force-reinstall", "--no-deps", str(ROOT))
    doctor = subprocess.run(
        [str(own.with_name("fsdp2")), "doctor"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found: dict[str, Any] = {
        "torch": torch,
        "python": python,
        "doctor": doctor.returncode,
        "changed": changed,
    }
    if doctor.returncode == 0:
        with tempfile.TemporaryDirectory() as work:
            out = Path(work) / "rows.json"
            subprocess.run(
                [str(own), __file__, "--here", str(out)], check=True, cwd=work, timeout=LIMIT
            )
            found |= json.loads(out.read_text(encoding="utf-8"))
            found["quickstart"] = quickstart(own.with_name("fsdp2"), Path(work) / "project")
            own_tests = [
                str(own),
                "-m",
                "pytest",
                "-q",
                str(NEW_IN_TORCH[0]),
                "-k",
                NEW_IN_TORCH[1],
            ]
            found["new_in_torch"] = subprocess.run(
                own_tests, cwd=ROOT, check=False, timeout=LIMIT
            ).returncode
    else:
        found["refused"] = next(
            " ".join(line.split()[2:]) for line in doctor.stdout.splitlines() if "FAIL" in line
        )
    return {**found, "seconds": round(time.monotonic() - started)}


def quickstart(fsdp2: Path, project: Path) -> str:
    """The verdict on the quickstart's project."""
    subprocess.run(
        [str(fsdp2), "new", str(ROOT / "examples" / "quickstart.yaml"), str(project)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    report = project.with_suffix(".json")
    subprocess.run(
        [str(fsdp2), "verify", str(project), "--report", f"json={report}"],
        check=False,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT,
    )
    return str(json.loads(report.read_text(encoding="utf-8"))["verdict"])


def here(out: Path) -> None:
    """In an environment: right scripts and faults, through the installed verifier."""
    import torch

    from corpus import IN_EVERY_TEST_RUN, REPRESENTATIVE, faults, right
    from detection import judge
    from verified_fsdp2.verifier.isolation.leftovers import temporary
    from verified_fsdp2.verifier.isolation.worlds import wish
    from verified_fsdp2.verifier.launch.client import Launcher

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    none = {name for name, since in NO_FAULT_SINCE.items() if version >= since}
    names = {*IN_EVERY_TEST_RUN, *REPRESENTATIVE, *MORE_FAULTS} - none
    judged = []
    with Launcher(wish=wish(temporary("runs"))) as launcher:
        for case in (case for case in (*faults(), *right()) if case.name in names):
            judged.append(judge(case, case.settings, launcher))
            print(
                f"  {case.name:<50}{judged[-1]['seconds']:>7} s  {', '.join(judged[-1]['failed'])}",
                flush=True,
            )
    good, seeded = [r for r in judged if not r["rule"]], [r for r in judged if r["rule"]]
    failed = {r["case"]: r["evidence"] for r in good if {*r["failed"]} - {PLATFORM}}
    stopped = [r["case"] for r in good if "run-completes" in r["inconclusive"]]
    counted = {
        "right": len(good),
        "right_failed": failed,
        "right_stopped": stopped,
        "faults": len(seeded),
    }
    out.write_text(
        json.dumps({**counted, "missed": [r["case"] for r in seeded if not r["found"]]}),
        encoding="utf-8",
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The section of references/reliability.md."""
    lines = [
        HEADING,
        "",
        *ABOUT,
        "",
        "| torch | Python | right | faults | quickstart | changed |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "refused" in r:
            cells = [f"refused: {r['refused']}", "", ""]
        else:
            cells = [
                (
                    f"{r['right'] - len(r['right_failed']) - len(r.get('right_stopped', ()))} of"
                    f" {r['right']}"
                ),
                f"{r['faults'] - len(r['missed'])} of {r['faults']}",
                r["quickstart"],
            ]
        changed = "not tried" if r["changed"] is None else str(len(r["changed"]))
        lines.append(f"| {' | '.join([r['torch'], r['python'], *cells, changed])} |")
    return [*lines, ""]


def main() -> int:
    """Make the rows, store them, write the table; 1 if a verdict of these rows was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", metavar="TORCH")
    parser.add_argument("--python", metavar="PYTHON", help="of the rows of this Python alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        here(options.here)
        return 0
    kept = (
        json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.is_file() else []
    )
    rows = {(r["torch"], r["python"]): r for r in kept}
    todo = [(torch, "3.11") for torch in TORCH] + [(DEVELOPED_ON, python) for python in PYTHONS]
    wrong = False
    for torch, python in todo if options.folder else ():
        if (not options.only or torch in options.only) and options.python in (None, python):
            rows[torch, python] = made = row(options.folder, torch, python)
            wrong |= bool(
                made.get("missed")
                or made.get("right_failed")
                or made.get("quickstart", "pass") != "pass"
            )
            wrong |= bool(made.get("new_in_torch"))
            print(json.dumps(made), flush=True)
            write(options.out, {"rows": [rows[key] for key in todo if key in rows]})
    if options.table:
        options.table.write_text(
            with_section(options.table.read_text(encoding="utf-8"), table(list(rows.values()))),
            encoding="utf-8",
        )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
