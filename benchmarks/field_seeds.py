"""Silent faults seeded in public trainers and in their libraries: which of them a verification
finds.

    python benchmarks/field_seeds.py --checkouts DIR [--environments DIR] [--only NAME,NAME] \\
        [--seeds ID,ID] [--known] [--full]

Folders are those of `benchmarks/field.py`. `benchmarks/field/seeds/NAME.yaml` lists the seeds of a
trainer: `id`, `in` (`checkout`, or an installed package), `file`, `old` and `new` (an edit),
`wrong` (what the fault is), `rules` (those that say so), and `full` where all of them need runs
that `--quick` leaves out. The edit is made in a copy in a temporary folder, never in the checkout
or the environment. The first verification is without an edit (`--known`: its failures are read from
`benchmarks/results/field.json`, and the static tier is run). A seed counts as found where a rule
fails that does not fail without it, as named where the first such finding is of one of its rules,
and as located where that finding names a line of the seeded file: its own, one on the way there
from the user's (`location.through`), or that of a caller (`callers`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from field import HERE, Ready, checked_out, entry_of, python_of

from machine import environment
from results_file import write

RESULTS = HERE.parent / "results" / "field_seeds.json"
KEYS = {"id", "in", "file", "old", "new", "wrong", "rules"}
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", "docs", "tests")


def seeds_of(path: Path) -> list[dict[str, Any]]:
    """The seeds of one trainer. Raises SystemExit if a key is missing or unknown."""
    seeds: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for seed in seeds:
        if wrong := KEYS ^ (seed.keys() - {"full"}):
            raise SystemExit(
                f"{path}: {seed.get('id', 'a seed')}: missing or unknown:"
                f" {', '.join(sorted(wrong))}"
            )
    return seeds


def package_folder(name: str, python: str) -> Path:
    """Where an environment has a package."""
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}).origin)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).parent


def seeded(seed: dict[str, Any], ready: Ready, into: Path) -> Ready:
    """The trainer with one fault, in a copy of what the fault is in."""
    into.mkdir()
    if seed["in"] == "checkout":
        base = into / ready.folder.name
        shutil.copytree(ready.folder, base, symlinks=True, ignore=NOT_COPIED)
        made = dataclasses.replace(ready, folder=base)
    else:
        base = into / "site-packages"  # before the installed one on the path
        package = package_folder(seed["in"], ready.python)
        shutil.copytree(package, base / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        above = ready.entry["environment"].get("PYTHONPATH")
        path = f"{base}:{above}" if above else str(base)
        made = dataclasses.replace(
            ready,
            entry={
                **ready.entry,
                "environment": {**ready.entry["environment"], "PYTHONPATH": path},
            },
        )
    file = base / seed["file"]
    text = file.read_text(encoding="utf-8")
    if text.count(seed["old"]) != 1:
        raise SystemExit(
            f"{seed['id']}: `old` is {text.count(seed['old'])} times in {file}, not once"
        )
    file.write_text(text.replace(seed["old"], seed["new"]), encoding="utf-8")
    return made


def failures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The failures of a report, causes before consequences."""
    failed = [one for one in report["findings"] if one["status"] == "fail"]
    return sorted(failed, key=lambda one: bool(one.get("consequence")))


def row_of(
    seed: dict[str, Any], report: dict[str, Any], before: set[str], seconds: float
) -> dict[str, Any]:
    """The row of one seed; `before` are the rules that fail without it."""
    new = [one for one in failures(report) if one["rule"] not in before]
    first = new[0] if new else {}
    place = first.get("location") or {}
    lines = [place, *place.get("through", ()), *place.get("from", place).get("callers", ())]
    files = [line["file"] for line in lines if line]
    return {
        "id": seed["id"],
        "verdict": report["verdict"],
        "found": bool(new),
        "named": first.get("rule") in seed["rules"],
        "located": any(file.endswith(seed["file"]) for file in files),
        "first": (
            f"{first['rule']} at {Path(place['file']).name}:{place['line']}"
            if place
            else first.get("rule", "")
        ),
        "others": [one["rule"] for one in new[1:]],
        "seconds": round(seconds, 1),
    }


def measured(
    name: str, seeds: list[dict[str, Any]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The rows of one trainer, one after another.

    Raises SystemExit where its checkout cannot be used.
    """
    entry = entry_of(HERE / f"{name}.yaml")
    folder = options.checkouts / entry.get("checkout", name)
    if trouble := checked_out(entry, folder):
        raise SystemExit(f"{name}: {trouble}")
    with tempfile.TemporaryDirectory(prefix="fsdp2-seeds-") as there:
        ready = Ready(
            entry, folder.resolve(), python_of(entry, options.environments), Path(there, "data")
        )
        ready.data.mkdir()
        ready.prepare()
        before = known(name, ready) if options.known else unseeded(name, ready, options)
        for number, seed in enumerate(seeds):
            copy = seeded(seed, ready, Path(there, str(number)))
            quick = not (options.full or seed.get("full"))
            report, seconds = copy.verified(quick)
            keep(options.reports, seed["id"], report)
            if not report["counts"]:
                raise SystemExit(f"{seed['id']}: no report: {report['verdict']}")
            shutil.rmtree(Path(there, str(number)))
            yield {"trainer": name, **row_of(seed, report, before, seconds), "quick": quick}


def known(name: str, ready: Ready) -> set[str]:
    """The rules that fail without a seed: those of `benchmarks/results/field.json`, and those of
    the static tier now.
    """
    rows = json.loads((HERE.parent / "results" / "field.json").read_text(encoding="utf-8"))["rows"]
    static = dataclasses.replace(
        ready, entry={**ready.entry, "verify": [*ready.entry["verify"], "--tier", "static"]}
    )
    report, _ = static.verified(quick=False)
    known_before = {one["rule"] for row in rows if row["name"] == name for one in row["failures"]}
    return known_before | {one["rule"] for one in failures(report)}


def unseeded(name: str, ready: Ready, options: argparse.Namespace) -> set[str]:
    """The rules that fail without a seed. Raises SystemExit where there is no report."""
    report, seconds = ready.verified(not options.full)
    keep(options.reports, name, report)
    before = {one["rule"] for one in failures(report)}
    said = {
        "unseeded": name,
        "fails": sorted(before),
        "verdict": report["verdict"],
        "seconds": round(seconds, 1),
    }
    print(json.dumps(said), flush=True)
    if not report["counts"]:
        raise SystemExit(f"{name}: no report without a seed: {report['verdict']}")
    return before


def keep(folder: Path, name: str, report: dict[str, Any]) -> None:
    """Keep a whole report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")


SIGHT = ("found", "named", "located", "first")


def again(row: dict[str, Any], old: list[dict[str, Any]]) -> dict[str, Any]:
    """A row with what the first verification of its seed said, if this is not the first."""
    for earlier in old:
        if earlier["id"] == row["id"]:
            return {
                **row,
                "first_sight": earlier.get("first_sight") or {key: earlier[key] for key in SIGHT},
            }
    return row


def totals(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many seeds were found, rightly named, and named and located: at first sight, and now."""

    def counted(sights: list[dict[str, Any]]) -> dict[str, int]:
        named = [one for one in sights if one["named"]]
        located = sum(one["located"] for one in named)
        found = sum(one["found"] for one in sights)
        return {
            "seeds": len(sights),
            "found": found,
            "named": len(named),
            "named_and_located": located,
        }

    return {
        "first_sight": counted([row.get("first_sight", row) for row in rows]),
        "now": counted(rows),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as references/reliability.md shows them."""
    seeds = {
        seed["id"]: seed for path in (HERE / "seeds").glob("*.yaml") for seed in seeds_of(path)
    }
    lines = ["| seeded in | fault | first finding that is new |", "|---|---|---|"]
    for row in rows:
        seed = seeds[row["id"]]
        where = f"{row['trainer']}: `{seed['file']}`"
        short = [] if row["named"] or not row["found"] else ["does not say what is wrong"]
        short += [] if row["located"] or not row["found"] else ["another file"]
        limits = f" ({', '.join(short)})" if short else ""
        said = f"{row['first']}{limits}" if row["found"] else "not found"
        said += (
            ", by `--quick`, which leaves out what its rule needs"
            if row["quick"] and seed.get("full")
            else ""
        )
        lines.append(f"| {where} | {seed['wrong']} | {said} |")
    return "\n".join(lines)


def main() -> None:
    """Edit a copy for each seed, verify it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--only", default="", help="names of trainers")
    parser.add_argument("--seeds", default="", help="ids of seeds")
    parser.add_argument(
        "--known",
        action="store_true",
        help="failures without a seed are those of results/field.json",
    )
    parser.add_argument("--full", action="store_true", help="without --quick")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="results to write; rows of other seeds stay"
    )
    parser.add_argument("--reports", type=Path, default=HERE.parents[1] / "build" / "field_seeds")
    options = parser.parse_args()
    for path in sorted((HERE / "seeds").glob("*.yaml")):
        seeds = [
            seed
            for seed in seeds_of(path)
            if not options.seeds or seed["id"] in options.seeds.split(",")
        ]
        if not seeds or (options.only and path.stem not in options.only.split(",")):
            continue
        for row in measured(path.stem, seeds, options):
            print(json.dumps(row), flush=True)
            old = (
                json.loads(options.out.read_text(encoding="utf-8"))["rows"]
                if options.out.exists()
                else []
            )
            kept = [earlier for earlier in old if earlier["id"] != row["id"]]
            every = sorted([*kept, again(row, old)], key=lambda one: (one["trainer"], one["id"]))
            write(
                options.out, {"environment": environment(), "totals": totals(every), "rows": every}
            )


if __name__ == "__main__":
    main()
