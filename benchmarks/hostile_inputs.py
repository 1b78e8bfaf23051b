"""Inputs that are no regular files, too large, deep or ill-typed, for every command; odd streams.

    python benchmarks/hostile_inputs.py --out build/hostile_inputs.json

Each trial is a command in a process and a folder of its own. It is held if it ends within LIMIT
seconds with an exit code that its row allows (never 3), without a traceback, and with less than
MEMORY in use. robustness.py damages inputs at random; these are chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from results_file import write
from robustness_inputs import SPECS, project, report

ROOT = Path(__file__).parents[1]
FAULTY = (ROOT / "tests" / "faults" / "optim_before_shard.py").read_text(encoding="utf-8")
DDP = ROOT / "tests" / "migrate" / "ddp_class.py"
QUICKSTART = next(path for path in SPECS if path.stem == "quickstart").read_text(encoding="utf-8")
LIMIT = 5.0  # seconds
MEMORY = 1 << 20  # KiB
HUGE = 3 << 30  # bytes of a sparse file
DEEP = 100_000
COPY = ".claude/skills/verified-fsdp2"
STATIC = ("verify", "train.py", "--tier", "static")

Maker = Callable[[Path], object]


@dataclass(frozen=True)
class Trial:
    """One command. `shell`: what `sh` does with it, where its streams are special."""

    name: str
    argv: tuple[str, ...]
    files: dict[str, str | Maker]
    codes: tuple[int, ...] = (2,)
    shell: str = ""


@dataclass(frozen=True)
class Result:
    """How a trial ended; `code` None: it had to be ended."""

    trial: Trial
    code: int | None
    seconds: float
    memory: int
    printed: str

    @property
    def held(self) -> bool:
        silent = "Traceback" not in self.printed and "SHADOWED" not in self.printed
        bounded = self.seconds < LIMIT and self.memory < MEMORY
        return self.code in self.trial.codes and silent and bounded


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the whole path may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def a_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


STRANGE: dict[str, Maker] = {
    "a FIFO": os.mkfifo,
    "a socket": a_socket,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "3 GB": a_huge_file,
}
SCRIPT = {"train.py": FAULTY}
PROJECT = {f"p/{path}": data.decode() for path, data in project()}
TOKENIZED = QUICKSTART.replace("data:", "data:\n  tokenizer: tokenizer.json\n  kind: text")
RECORD = json.dumps({"manifest": 1, "version": "0.1.0", "files": {"SKILL.md": "0" * 24}})

# What each command reads: (its words, the file that is strange, other files, right exit codes).
READ: tuple[tuple[tuple[str, ...], str, dict[str, str | Maker], tuple[int, ...]], ...] = (
    (("lint", "x.py"), "x.py", {}, (2,)),
    (("lint", "."), "x.py", SCRIPT, (1, 2)),
    (("lint", "train.py"), "helper.py", {"train.py": f"import helper\n{FAULTY}"}, (1,)),
    (("lint", "--migrate", "x.py"), "x.py", {}, (2,)),
    (("lint", "train.py", "--baseline", "old.json"), "old.json", SCRIPT, (2,)),
    (("lint", "train.py", "--report", "json=out"), "out", SCRIPT, (1, 2)),
    (("spec", "check", "spec.yaml"), "spec.yaml", {}, (2,)),
    (("spec", "check", "spec.yaml"), "tokenizer.json", {"spec.yaml": TOKENIZED}, (2,)),
    (("spec", "show", "spec.yaml"), "spec.yaml", {}, (2,)),
    (("new", "spec.yaml", "made"), "spec.yaml", {}, (2,)),
    (("new", "spec.yaml", "made"), "made", {"spec.yaml": QUICKSTART}, (2,)),
    (("diff", "p", "--spec", "other.yaml"), "other.yaml", PROJECT, (2,)),
    (("diff", "p"), "p/.fsdp2/manifest.json", PROJECT, (2,)),
    (("diff", "p"), "p/spec.yaml", PROJECT, (2,)),
    (("update", "p", "--spec", "other.yaml"), "other.yaml", PROJECT, (2,)),
    (("update", "p"), "p/train.py", PROJECT, (0, 1, 2)),
    (("verify", "x.py", "--tier", "static"), "x.py", {}, (2,)),
    ((*STATIC, "--config", "own.yaml"), "own.yaml", SCRIPT, (2,)),
    (("verify", ".", "--tier", "static"), "verify.yaml", SCRIPT, (2,)),
    (("verify", ".", "--tier", "static"), "pyproject.toml", SCRIPT, (1, 2)),
    ((*STATIC, "--baseline", "old.json"), "old.json", SCRIPT, (2,)),
    ((*STATIC, "--report", "json=out"), "out", SCRIPT, (1, 2)),
    ((*STATIC, "--", "--config", "run.yaml"), "run.yaml", SCRIPT, (1,)),
    (("report", "matches-ddp", "report.json"), "report.json", {}, (2,)),
    (("install", "--check", "--client", "claude"), f"{COPY}/INSTALLED.json", {}, (2,)),
    (("install", "--client", "claude"), f"{COPY}/INSTALLED.json", {}, (2,)),
    (("install", "--uninstall"), f"{COPY}/SKILL.md", {f"{COPY}/INSTALLED.json": RECORD}, (0, 1, 2)),
    (("plan", "spec.yaml", "--nproc", "2"), "spec.yaml", {}, (2,)),
    (("plan", "x.py", "--nproc", "2"), "x.py", {}, (2,)),
    (("plan", "train.py", "--nproc", "2", "--gpu", "own.yaml"), "own.yaml", SCRIPT, (2,)),
    (("convert", "x.py", "-o", "new.py", "--no-verify"), "x.py", {}, (2,)),
)

_REPORT = report()
_WRONG = {**_REPORT["findings"][0], "location": "x"}
LISTS = "[]," * (5 << 20)
NESTED = "[" * DEEP + "]" * DEEP
ILL_TYPED = {
    "nested": NESTED,
    "an object in an object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "a location that is a text": json.dumps({**_REPORT, "findings": [_WRONG]}),
    "a target that is a list": json.dumps({**_REPORT, "target": []}),
    "runs of numbers": json.dumps({**_REPORT, "runs": [1, 2]}),
    "findings of an older version": json.dumps({**_REPORT, "schema": 1, "runs": [1]}),
    "15 MiB of lists": json.dumps({**_REPORT, "runs": []})[:-1] + f', "a": [{LISTS}0]}}',
    "15 MiB of runs": json.dumps(_REPORT).replace('"runs": []', f'"runs": [{LISTS}0]'),
    "a number of 100,000 digits": '{"schema": ' + "9" * DEEP + "}",
    "nested facts": json.dumps(_REPORT)[:-1] + f', "facts": {"[" * 900 + "]" * 900}}}',
}
DOTTED = f"[tool.fsdp2]\n{'.'.join(['a'] * 4000)} = 1\n"
ENDLESS = f"[tool.fsdp2]\n{'.'.join(['a'] * 400_000)} = 1\n"
TABLES = f"[tool.fsdp2.{'.'.join(['a'] * 4000)}]\nx = 1\n"
SETS = (
    "train.steps=" + "[" * DEEP,
    "a" + ".a" * 40_000 + "=1",
    "=",
    "train=" + "{a: " * 5000,
    "train.steps=" + "9" * 5000,
)


def trials() -> Iterator[Trial]:
    """All of them."""
    for argv, place, files, codes in READ:
        for kind, maker in STRANGE.items():
            yield Trial(f"{kind} as {place}", argv, {**files, place: maker}, codes)
    rule = _REPORT["findings"][0]["rule"]
    for kind, text in ILL_TYPED.items():
        yield Trial(kind, ("report", rule, "report.json"), {"report.json": text})
        files: dict[str, str | Maker] = {**SCRIPT, "old.json": text}
        yield Trial(kind, ("lint", "train.py", "--baseline", "old.json"), files)
    for kind, text in {
        "4,000 dotted keys": DOTTED,
        "400,000 dotted keys": ENDLESS,
        "4,000 tables in tables": TABLES,
    }.items():
        yield Trial(kind, ("verify", ".", "--tier", "static"), {**SCRIPT, "pyproject.toml": text})
    for text in SETS:
        name = f"--set {text[:20]}"
        yield Trial(name, ("recipe", "train-step", "--set", text), {})
        yield Trial(name, ("spec", "show", "spec.yaml", "--set", text), {"spec.yaml": QUICKSTART})
    for text in ("x" * DEEP, "", "..", "\x1b[31m", "a\nb"):
        yield Trial(f"the name {text[:10]!r}", ("explain", text), {})
        yield Trial(f"the name {text[:10]!r}", ("recipe", text), {})
        codes = (2,) if text else (0, 2)
        yield Trial(f"the name {text[:10]!r}", ("spec", "explain", text), {}, codes)
    deep = {
        **SCRIPT,
        "run.json": NESTED,
        "run.yaml": NESTED[:4000],
        "run.toml": f"x = {NESTED[:3000]}",
    }
    for name in ("run.json", "run.yaml", "run.toml"):
        yield Trial(f"a nested {name}", (*STATIC, "--", "--config", name, "set:a=1"), deep)
    latin = b"# coding: latin-1\n# \xe9\n" + DDP.read_bytes()
    convert = ("convert", "latin.py", "-o", "new.py", "--no-verify")
    yield Trial("a script in Latin-1", convert, {"latin.py": lambda path: path.write_bytes(latin)})
    yield from outputs()
    yield from surroundings()


def outputs() -> Iterator[Trial]:
    """Files that a report must not replace."""
    files: dict[str, str | Maker] = {
        **SCRIPT,
        "notes.txt": "mine\n",
        "data.json": '{"mine": 1}',
        "pkg/__init__.py": "",
    }
    for name in ("train.py", "notes.txt", "data.json", "pkg/__init__.py"):
        for command in (STATIC, ("lint", "train.py"), ("lint", "--migrate", "train.py")):
            yield Trial(f"a report over {name}", (*command, "--report", f"json={name}"), files)
        plan = ("plan", "train.py", "--nproc", "2", "--html", name)
        yield Trial(f"a plan over {name}", plan, files)


def surroundings() -> Iterator[Trial]:
    """Streams that are closed or not read, and modules of the user with names of Python's."""
    for shell in (
        'exec "$@" 2>&-',
        'exec "$@" >&-',
        'exec "$@" <&- >&- 2>&-',
        '("$@"; exit $?) | true; "$@" >&-',
    ):
        yield Trial(shell, ("lint", "train.py"), SCRIPT, (1,), shell)
        yield Trial(shell, STATIC, SCRIPT, (1,), shell)
        yield Trial(shell, ("explain", "root-not-wrapped"), {}, (0,), shell)
        yield Trial(shell, ("spec", "check", "none.yaml"), {}, (2,), shell)
    for name in (
        "json",
        "yaml",
        "typing",
        "argparse",
        "jsonschema",
        "re",
        "dataclasses",
        "pathlib",
        "ast",
        "textwrap",
    ):
        own = "print('SHADOWED')\nraise SystemExit(0)\n"
        files: dict[str, str | Maker] = {**SCRIPT, f"{name}.py": own}
        yield Trial(f"{name}.py of the user", ("lint", "train.py"), files, (1,))
        yield Trial(f"{name}.py of the user", ("spec", "check", "none.yaml"), {f"{name}.py": own})


def result(trial: Trial, folder: Path) -> Result:
    """Run one."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("tmp", "home", "in"):
        (folder / name).mkdir(parents=True)
    for name, content in trial.files.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(content, encoding="utf-8") if isinstance(content, str) else content(path)
    command = [sys.executable, "-m", "verified_fsdp2.skill", *trial.argv]
    environment = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
    }
    with (folder / "printed").open("wb") as printed:
        started = time.monotonic()
        process = subprocess.Popen(
            ["sh", "-c", trial.shell, "sh", *command] if trial.shell else command,
            cwd=folder / "in",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        late = threading.Timer(LIMIT, os.killpg, (process.pid, 9))
        late.start()
        _, status, usage = os.wait4(process.pid, 0)
        late.cancel()
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
    code = process.returncode if process.returncode >= 0 else None
    text = (folder / "printed").read_text(encoding="utf-8", errors="replace")
    return Result(trial, code, seconds, usage.ru_maxrss, text)


def rows(results: list[Result]) -> list[dict[str, object]]:
    """A line for each command."""
    commands = sorted({one.trial.argv[0] for one in results})
    found: list[dict[str, object]] = []
    for command in commands:
        own = [one for one in results if one.trial.argv[0] == command]
        codes = Counter(str(one.code) for one in own)
        longest = round(max(one.seconds for one in own), 2)
        memory = max(one.memory for one in own) >> 10
        held = sum(one.held for one in own)
        found.append(
            {
                "command": command,
                "inputs": len(own),
                "held": held,
                "exit_codes": dict(sorted(codes.items())),
            }
            | {"longest_seconds": longest, "largest_mib": memory}
        )
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--only", metavar="COMMAND", help="the trials of this command alone")
    options = parser.parse_args()
    wanted = [one for one in trials() if options.only in (None, one.argv[0])]
    with tempfile.TemporaryDirectory() as name:
        results = [result(one, Path(name).resolve() / "trial") for one in wanted]
    for one in results:
        if not one.held:
            end = f"{one.code}, not {one.trial.codes}, {one.seconds:.1f} s, {one.memory >> 10} MiB"
            print(
                f"{' '.join(one.trial.argv)[:120]}: {one.trial.name}: {end}\n{one.printed[-300:]}",
                file=sys.stderr,
            )
    table = rows(results)
    for row in table:
        print(json.dumps(row))
    held = sum(one.held for one in results)
    print(f"{held} of {len(results)} held")
    if options.out:
        write(
            options.out,
            {"limit_seconds": LIMIT, "inputs": len(results), "held": held, "commands": table},
        )
    return 0 if held == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
