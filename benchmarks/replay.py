"""What a change to the verifier changes in what it finds: runs are recorded once, and judged again.

    python benchmarks/replay.py record FOLDER [--only NAME] [--workers 2]     before the change
    python benchmarks/replay.py judge FOLDER [--only NAME]   after it: every finding that differs
    python benchmarks/replay.py findings FOLDER              what was found when it was recorded

A recording holds, for each case of the corpus, its script, the request and answer of each run, and
what its ranks wrote. To judge again, the verifier plans and judges as always, but a run that was
recorded is answered from the recording: seconds for a case in place of a minute. A run with other
settings than any recorded one is reported; then the change is one to the plan or to the probe, and
the case must be recorded again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from corpus import TESTS, Case
from detection import jobs
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.isolation.choose import Choice
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import Worlds, wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.trace.seal import mark
from verified_fsdp2.verifier.verdict import Verdict

PACKAGE = str(Path(__file__).resolve().parents[1] / "verifier")
# what differs each time: numbers of folders, time limits (by the load of the machine) and the mark
# of the lines
_VARIES = ("folder", "secret", "timeout", "world", "starting_point")


class NotRecorded(Exception):
    """The verifier asks for a run that was not recorded."""


class RecordingLauncher:
    """Passes runs on to a real launcher; keeps request, answer and what the ranks wrote below
    `tape`.
    """

    def __init__(self, launcher: Launcher, tape: Path) -> None:
        self._launcher, self._tape = launcher, tape
        self._requests: dict[int, Request] = {}
        self.versions, self.choice = launcher.versions, launcher.choice

    def start(self, request: Request) -> int:
        number = self._launcher.start(request)
        self._requests[number] = request
        return number

    def first_to_end(self, numbers: Sequence[int]) -> int:
        return self._launcher.first_to_end(numbers)

    def finish(self, number: int) -> dict[str, Any]:
        answer = self._launcher.finish(number)
        request = self._requests.pop(number)
        folder = Path(request.folder)
        kept = self._tape / folder.name
        kept.mkdir(parents=True)
        for path in folder.glob("rank*.*"):
            if path.is_file():
                shutil.copyfile(path, kept / path.name)
        _write(kept / "run.json", {"request": request.as_dict(), "answer": answer})
        return answer


class ReplayLauncher:
    """Answers runs from `tape`."""

    def __init__(self, tape: Path, versions: dict[str, Any], package: str) -> None:
        self.versions, self.choice = versions, Choice.of(versions.get("isolation", {}))
        self._package = package  # where the verifier lay that recorded
        self._left = {path.parent: _read(path) for path in sorted(tape.glob("*/run.json"))}
        self._answers: dict[int, dict[str, Any]] = {}

    def start(self, request: Request) -> int:
        wanted = _compared(request.as_dict())
        found = next(
            (p for p, run in self._left.items() if _compared(run["request"]) == wanted), None
        )
        if found is None:
            raise NotRecorded(f"{Path(request.folder).name}: {_nearest(wanted, self._left)}")
        run = self._left.pop(found)
        for path in found.glob("rank*.*"):
            if path.suffix == ".jsonl":
                _sealed(
                    path, Path(request.folder, path.name), run["request"]["secret"], request.secret
                )
            else:
                text = path.read_text(encoding="utf-8", errors="surrogateescape")
                text = text.replace(self._package, PACKAGE)
                Path(request.folder, path.name).write_text(
                    text, encoding="utf-8", errors="surrogateescape"
                )
        number = int(found.name.partition("-")[0])
        self._answers[number] = run["answer"]
        return number

    def first_to_end(self, numbers: Sequence[int]) -> int:
        return min(numbers)

    def finish(self, number: int) -> dict[str, Any]:
        return self._answers[number]

    @property
    def left(self) -> list[str]:
        """The recorded runs that were not asked for."""
        return [path.name for path in self._left]


class RecordingWorlds(Worlds):
    """Keeps what the files of a run look like after it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ends: dict[str, Any] = {}
        self.listings: list[Any] = []

    def end(self, world: Any, saves: Any, keeps: bool, leaves: bool) -> list[str]:
        wrote = super().end(world, saves, keeps, leaves)
        name = Path(world.folder).parent.name
        self.ends[re.sub(r"^\d+-", "", name)] = wrote
        return wrote

    def listing(self, left: bool = False) -> tuple[str, ...]:
        found = super().listing(left)
        self.listings.append(found)
        return found


class ReplayedWorlds(Worlds):
    """Answers what files there are from a recording."""

    def __init__(self, known: dict[str, Any], *given: Any) -> None:
        super().__init__(*given)
        self._ends, self._listings = known["ends"], [tuple(one) for one in known["listings"]]

    def end(self, world: Any, saves: Any, keeps: bool, leaves: bool) -> list[str]:
        name = re.sub(r"^\d+-", "", Path(world.folder).parent.name)
        wrote: list[str] = self._ends.get(name, [])
        self.written = [*dict.fromkeys([*self.written, *wrote])]
        return wrote

    def listing(self, left: bool = False) -> tuple[str, ...]:
        return self._listings.pop(0) if self._listings else ()


def _compared(request: dict[str, Any]) -> dict[str, Any]:
    # a run other than the train run only says in addition which lines it reached
    varies = _VARIES if request["leave_starting_point"] else (*_VARIES, "lines")
    return {name: value for name, value in request.items() if name not in varies}


def _nearest(wanted: dict[str, Any], left: dict[Path, Any]) -> str:
    """In what a request differs from the most similar one that was recorded."""
    best: dict[str, Any] | None = None
    for run in left.values():
        known = _compared(run["request"])
        differs = {
            name: (known.get(name), wanted.get(name))
            for name in {*known, *wanted}
            if known.get(name) != wanted.get(name)
        }
        if best is None or len(differs) < len(best):
            best = differs
    return "no recorded run is left" if best is None else f"(recorded, asked for): {best}"


def _sealed(source: Path, target: Path, old: str, new: str) -> None:
    """Copy a trace with the marks of another secret; a line that the probe did not write gets
    none.
    """
    lines = source.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        text, _, seal = line.rpartition("\t")
        found.append(
            f"{text}\t{mark(new, number, text)}" if seal == mark(old, number, text) else line
        )
    target.write_text("\n".join([*found, lines[-1]]), encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def findings(verdict: Verdict, folder: Path) -> list[dict[str, Any]]:
    """The verdict and its findings as data, without what time and place change."""
    found: list[dict[str, Any]] = [{"rule": "(verdict)", "status": verdict.verdict}]
    for f in verdict.findings:
        place = f.location and f"{os.path.relpath(f.location.file, folder)}:{f.location.line}"
        row = {
            "rule": f.rule,
            "status": f.status,
            "tier": f.tier,
            "required": f.required,
            "location": place,
        }
        row |= {"consequence": f.consequence, "measured": f.measured, "limit": f.limit}
        found.append(row | {"evidence": f.evidence, "fix": f.fix})
    plain = json.loads(json.dumps(found, default=str))
    assert isinstance(plain, list)
    return plain


def _case_folder(base: Path, case: Case, settings: dict[str, Any]) -> Path:
    size = settings.get("nproc", "own") if case.rule is None else "fault"
    return base / f"{case.name.replace('/', '+')}+{size}"


def _copied(case: Case, into: Path) -> Path:
    """The script or folder to verify: always a copy, so that its path is the same for every
    clone.
    """
    script = case.target(into)
    if script.is_relative_to(TESTS):
        copy = into / script.name
        if script.is_dir():
            shutil.copytree(script, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(script, copy)
        return copy
    return script


def record(base: Path, case: Case, settings: dict[str, Any], launcher: Launcher) -> str:
    """Verify a case, and keep what its runs wrote."""
    folder = _case_folder(base, case, settings)
    if (folder / "case.json").exists():
        return "there"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "case").mkdir(parents=True)
    script = _copied(case, folder / "case")
    target = resolve(script, settings)
    work = folder / "work"
    known: dict[str, Any] = {
        "script": str(script),
        "settings": settings,
        "tier": case.tier,
        "name": case.name,
    }
    taped = RecordingLauncher(launcher, folder / "tape")
    files = RecordingWorlds(work, target.folders, target.cwd, launcher.choice, target.allow_writes)
    chosen = select((), (), case.tier)
    verdict = verify_with(taped, target, work, chosen, tier=case.tier, files=files)  # type: ignore[arg-type]
    known |= {"cwd": str(Path.cwd()), "package": PACKAGE}
    known |= {"versions": launcher.versions, "ends": files.ends, "listings": files.listings}
    known |= {"findings": findings(verdict, folder)}
    shutil.rmtree(work, ignore_errors=True)
    _write(folder / "case.json", known)
    failed = [f.rule for f in verdict.findings if f.status == "fail"]
    return f"{verdict.verdict} {' '.join(failed)}"


def judge(folder: Path) -> list[str]:
    """What differs from the recorded findings of a case, a line each."""
    known = _read(folder / "case.json")
    target = resolve(Path(known["script"]), known["settings"])
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    os.chdir(known["cwd"])
    taped = ReplayLauncher(folder / "tape", known["versions"], known["package"])
    files = ReplayedWorlds(
        known, work, target.folders, target.cwd, taped.choice, target.allow_writes
    )
    try:
        chosen = select((), (), known["tier"])
        verdict = verify_with(taped, target, work, chosen, tier=known["tier"], files=files)  # type: ignore[arg-type]
    except NotRecorded as error:
        return [f"NOT RECORDED {error}"]
    except Exception:
        return [f"FAILED {traceback.format_exc()}"]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    lines = [f"NOT ASKED FOR {name}" for name in taped.left]
    return lines + differences(known["findings"], findings(verdict, folder))


def differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """A line for each field of each finding that is another one; for each finding that only one
    has; for another order.
    """
    before, after = {f["rule"]: f for f in old}, {f["rule"]: f for f in new}
    lines = [f"- {rule} {before[rule]['status']}" for rule in before if rule not in after]
    lines += [
        f"+ {rule} {after[rule]['status']}: {after[rule].get('evidence')}"
        for rule in after
        if rule not in before
    ]
    for rule, one in after.items():
        for name, value in one.items():
            if rule in before and before[rule].get(name) != value:
                lines.append(f"~ {rule} {name}: {before[rule].get(name)!r} -> {value!r}")
    common = [f["rule"] for f in old if f["rule"] in after]
    if not lines and common != [f["rule"] for f in new if f["rule"] in before]:
        lines.append("another order")
    return lines


def _recorded(base: Path, only: str) -> list[Path]:
    return sorted(
        path.parent
        for path in base.glob("*/case.json")
        if only in path.parent.name.replace("+", "/")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "judge", "findings"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    base = options.folder.resolve()
    if options.what == "record":
        _record_all(base, options.only, options.workers)
        return 0
    folders = _recorded(base, options.only)
    if options.what == "findings":
        print(
            json.dumps(
                {path.name: _read(path / "case.json")["findings"] for path in folders}, indent=1
            )
        )
        return 0
    changed = 0
    with ProcessPoolExecutor(options.workers) as pool:
        for folder, lines in zip(folders, pool.map(judge, folders), strict=True):
            changed += bool(lines)
            for line in lines:
                print(f"{folder.name}: {line}", flush=True)
    print(f"{len(folders)} cases judged again, {changed} of them otherwise")
    return int(changed > 0)


def _record_all(base: Path, only: str, workers: int) -> None:
    todo = jobs(only)
    launchers: SimpleQueue[Launcher] = SimpleQueue()
    opened = [Launcher(wish=wish(temporary("runs"), base)).__enter__() for _ in range(workers)]
    for launcher in opened:
        launchers.put(launcher)

    def one(job: tuple[Case, dict[str, Any]]) -> None:
        launcher = launchers.get()
        try:
            said = record(base, *job, launcher)
        except Exception as error:
            said = f"FAILED {type(error).__name__}: {error}"
        finally:
            launchers.put(launcher)
        print(f"{job[0].name:<60} {said}", flush=True)

    try:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, todo))
    finally:
        for launcher in opened:
            launcher.__exit__(None, None, None)


if __name__ == "__main__":
    sys.exit(main())
