"""Real packages in pinned versions: what the verifier says of each row of
tests/libraries/rows.yaml, and of its fixed form.

    python benchmarks/libraries.py FOLDER [--only NAME ...]

Environments are made in FOLDER (with pip, which needs the network or an index; several gigabytes)
and kept for the next time. A requirements file that begins with `# above: NAME` holds only what
differs from the environment NAME. Results go to benchmarks/results/libraries.json; rows that were
not run keep theirs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from results_file import write

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "libraries"
RESULTS = ROOT / "benchmarks" / "results" / "libraries.json"
PACKAGES = ("torch", "accelerate", "transformers", "peft", "lightning", "torchtitan")
ALWAYS = ("run-completes",)


def rows() -> list[dict[str, Any]]:
    """The rows, each with `rules` as a list."""
    found: list[dict[str, Any]] = yaml.safe_load((FOLDER / "rows.yaml").read_text(encoding="utf-8"))
    return [
        {**row, "rules": row["rule"] if isinstance(row["rule"], list) else [row["rule"]]}
        for row in found
    ]


def environment(folder: Path, name: str) -> Path:
    """The Python of environment `name`, which is made if it is not there or if its requirements
    have changed.
    """
    wanted = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    home = folder / name
    python, made = home / "bin" / "python", home / "made-from.txt"
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making {home}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    first = wanted.splitlines()[0]
    below = first.removeprefix("# above: ") if first.startswith("# above: ") else None
    options = ["--no-deps"]
    if below is not None:
        base = environment(folder, below)
        (site_packages(python) / "below.pth").write_text(
            f"{site_packages(base)}\n", encoding="utf-8"
        )
    requirements = [line for line in wanted.splitlines() if line and not line.startswith("#")]
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *options, *requirements], check=True
    )
    made.write_text(wanted, encoding="utf-8")
    return python


def site_packages(python: Path) -> Path:
    """Where the environment of `python` keeps its packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        python.parents[1]
        / Path(sysconfig.get_path("purelib")).parts[-3]
        / version
        / "site-packages"
    )


def judge(python: Path, row: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a row's script: versions, the status of its rules, and the first failure that
    is no consequence.
    """
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.json"
        command = [
            str(python),
            str(ROOT / "skill"),
            "verify",
            str(ROOT / "tests" / path_of(row)),
            "--nproc",
            "2",
        ]
        command += [
            "--work",
            str(Path(work) / "runs"),
            "--report",
            "json=" + str(report),
            "--timeout",
            "240",
        ]
        for rule in dict.fromkeys(
            [*row["rules"], *row.get("with", ()), *row.get("beside", ()), *ALWAYS]
        ):
            command += ["--only", rule]
        for key in ("save_args", "resume_args", "single_args"):
            if row.get(key):
                command += ["--" + key.replace("_", "-"), row[key]]
        if row.get("args"):
            command += ["--", *row["args"].split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        if not report.is_file():
            raise RuntimeError(
                f"{row['name']}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
            )
        verdict = json.loads(report.read_text(encoding="utf-8"))
    beside = set(row.get("beside", ()))
    failures = [f for f in verdict["findings"] if f["status"] == "fail" and not f["consequence"]]
    failures = [f for f in failures if f["rule"] not in beside]
    return {
        "versions": versions(python),
        "statuses": {f["rule"]: f["status"] for f in verdict["findings"]},
        "rule": failures[0]["rule"] if failures else None,
        "evidence": failures[0]["evidence"] if failures else "",
    }


def path_of(row: dict[str, Any]) -> str:
    """The row's script, below tests/."""
    script: str = row["script"]
    return script if script.startswith(("zoo/", "faults/")) else f"libraries/{script}"


def versions(python: Path) -> dict[str, str]:
    """{package: version} of those of PACKAGES that an environment has."""
    ask = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [str(python), "-c", ask, *PACKAGES], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def run(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A row's result: as published, and fixed."""
    known = {rule for rule in row["rules"] if rule in _rules(folder, row)}
    row = {**row, "rules": [rule for rule in row["rules"] if rule in known]}
    fixed = {**row, "beside": [], **row["fixed"]}
    found = judge(environment(folder, row["env"]), row)
    fixed = judge(environment(folder, fixed["env"]), fixed)
    settings = ("env", "args", "save_args", "resume_args")
    return {
        "name": row["name"],
        "script": path_of(row),
        "published": row["published"],
        "run": {key: row[key] for key in settings if row.get(key)},
        "found": found,
        "fixed_run": {key: fixed[key] for key in settings if fixed.get(key)},
        "fixed": fixed,
        "ok": (
            found["rule"] in row["rules"]
            and fixed["rule"] is None
            and _fail(found, row.get("beside", ()))
        ),
    }


def _fail(found: dict[str, Any], rules: Iterable[str]) -> bool:
    """Whether every one of `rules` fails too."""
    return all(found["statuses"].get(rule) == "fail" for rule in rules)


def _rules(folder: Path, row: dict[str, Any]) -> set[str]:
    """The names of the rules that the verifier has."""
    python = environment(folder, row["env"])
    done = subprocess.run(
        [str(python), str(ROOT / "skill"), "explain"], capture_output=True, text=True, check=True
    )
    return {word for line in done.stdout.splitlines() for word in line.split()[:1]}


def main() -> int:
    """Run rows and write results; exit code 1 if one of them is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    kept = {result["name"]: result for result in before}
    names = [row["name"] for row in rows()]
    wrong = 0
    for row in rows():
        if options.only and row["name"] not in options.only:
            continue
        result = run(row, options.folder.resolve())
        kept[row["name"]] = result
        wrong += not result["ok"]
        reported = result["found"]["rule"], result["fixed"]["rule"]
        print(
            f"{'ok   ' if result['ok'] else 'WRONG'} {row['name']:<40} {reported[0]} ->"
            f" {reported[1] or 'pass'}",
            flush=True,
        )
        ordered = [kept[name] for name in names if name in kept]
        write(RESULTS, ordered)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
