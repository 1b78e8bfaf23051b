"""The commits of public trainers that are candidates of the history exam, in the order of reading.

    python benchmarks/history/choose.py CHECKOUTS --out benchmarks/history/candidates

CHECKOUTS holds one git repository a name of choice.yaml, as `owner+name/repo` or `owner+name`.
A commit is a candidate if its subject has a word of each of the two lists in choice.yaml, its date
is in the window, and it changes a Python file that is no test and no document. The candidates of a
repository are read in the order of the SHA-256 of their hash: an order that nobody chose. From the
top, each is taken or gets the reason why not, until the repository has given its number. So what
becomes a case is decided before anybody knows what the verifier makes of it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
FIELDS = "\x1f"
COMMITS = "\x1e"
# not code that trains: a fault fixed in it is none of a training
NOT_TRAINING = re.compile(r"(^|/)(tests?|docs?|\.github|docker|notebooks?)/|(^|/)test_|_test\.py$")


@dataclass(frozen=True)
class Commit:
    hash: str
    date: str
    subject: str
    files: tuple[str, ...]

    @property
    def order(self) -> str:
        return hashlib.sha256(self.hash.encode()).hexdigest()


def words(names: list[str]) -> re.Pattern[str]:
    """What finds one of the words, each a regular expression, as a whole word in any case."""
    return re.compile(rf"(?<![a-z])(?:{'|'.join(names)})(?![a-z])", re.IGNORECASE)


def commits(repository: Path, since: str, until: str) -> list[Commit]:
    """The commits of a window of dates, merges aside."""
    command = [
        "git",
        "-C",
        str(repository),
        "log",
        "HEAD",
        "--no-merges",
        "--no-renames",
        "--name-only",
    ]
    command += [
        f"--since={since}",
        f"--until={until}",
        f"--format={COMMITS}%H{FIELDS}%cs{FIELDS}%s{FIELDS}",
    ]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    found = []
    for entry in said.decode(errors="replace").split(COMMITS)[1:]:
        name, date, subject, files = entry.split(FIELDS)
        found.append(Commit(name, date, subject, tuple(files.split())))
    return found


def candidates(repository: Path, choice: dict[str, Any]) -> list[Commit]:
    """The commits of a repository that the words find, in the order of reading."""
    fault, topic = words(choice["fault_words"]), words(choice["topic_words"])
    once: dict[str, Commit] = {}
    for commit in commits(repository, choice["since"], choice["until"]):
        code = [f for f in commit.files if f.endswith(".py") and not NOT_TRAINING.search(f)]
        if code and fault.search(commit.subject) and topic.search(commit.subject):
            once.setdefault(commit.subject, commit)
    return sorted(once.values(), key=lambda commit: commit.order)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path, help="the folder of the repositories")
    parser.add_argument("--out", type=Path, required=True, help="where the lists are written")
    options = parser.parse_args()
    choice = yaml.safe_load((HERE / "choice.yaml").read_text(encoding="utf-8"))
    options.out.mkdir(parents=True, exist_ok=True)
    for number, names in choice["rounds"].items():
        for name in names:
            place = options.checkouts / name.replace("/", "+")
            found = candidates(place / "repo" if (place / "repo").exists() else place, choice)
            lines = [f"{c.hash[:10]} {c.date} {c.subject}" for c in found]
            out = options.out / f"{name.replace('/', '+')}.txt"
            out.write_text("\n".join([*lines, ""]), encoding="utf-8")
            print(f"round {number}  {len(found):4d}  {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
