"""Words that have no right use in this project's texts (`make lint`): each line found, with the
word to write instead.

    python tests/word_list.py

It reads every file that git tracks, except corpora (scripts as their users write them), stored
results and the change log.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"mend|mends|mended|mending": "fix",
    r"deaf|unheard": "probe_error",
    r"left no word": "exited without recording a result",
    r"gave up at its start": "exited during startup",
    r"nobody to differ from": "not applicable with one rank",
    r"downhill": "do not reduce the loss to first order",
    r"as meant": "expected",
    r"this machine refuses": "environment error",
    r"come least far": "made the least progress",
    r"nowhere further": "reached no further collective",
    r"told": "message, text or reported",
}
# Where a word has no right use, if not everywhere.
ONLY = {"told": re.compile(r"(verifier|skill|templates|tests|benchmarks|evals)/")}
LEFT_OUT = re.compile(
    r"tests/(exam|faults|zoo|schemas|verifier/reports)/|evals/tasks/|tests/verifier/static/(pairs|styles)\.yaml$|benchmarks/(results|history/candidates)/"
    r"|CHANGELOG\.md$|tests/(word_list|test_contributing)\.py$"
)
WORDS = {
    re.compile(rf"\b({words})\b", re.IGNORECASE): instead for words, instead in INSTEAD.items()
}


def hits(name: str, text: str) -> list[str]:
    """`file:line: word -> what to write` of each hit."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [
            f"{name}:{number}: {m[1]} -> {instead}"
            for word, instead in WORDS.items()
            for m in word.finditer(line)
            if not (where := ONLY.get(m[1].lower())) or where.match(name)
        ]
    return found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    if not listed:
        print("word list: not checked, git lists no files here")
    found = []
    for name in listed.split("\0"):
        path = ROOT / name
        if name and not LEFT_OUT.match(name) and path.is_file():
            found += hits(name, path.read_text(encoding="utf-8", errors="replace"))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
