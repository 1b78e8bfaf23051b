"""Which calls of CUDA public training code makes, by how many repositories make them.

    python benchmarks/cuda_calls.py CHECKOUTS --out benchmarks/results/cuda_calls.json

CHECKOUTS holds git repositories, as `owner+name/repo` or `owner+name`; the Python files of their
newest commit are read. tests/verifier/cuda_calls.md has the calls that at least three of them make:
what CUDA does, what CUDA on the CPU does, and a check that a test runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

from results_file import write

LEAST = 3  # repositories that make a call that the table has to list
_NAME = r"[a-zA-Z_][a-zA-Z_0-9]*"
_OTHERS = (
    *(
        r"\bpin_memory\b",
        r"\.is_pinned\b",
        r"\.record_stream\b",
        r"\bnon_blocking\b",
        r"\.is_cuda\b",
    ),
    *(r"\.get_device\b", r"torch\.Generator\b", r"torch\.Stream\b", r"torch\.Event\b"),
    *(
        r"torch\.(?:set|get)_default_device\b",
        r"torch\.get_device_module\b",
        r"torch\._C\._cuda_\w+",
    ),
)
_CALLS = re.compile(
    rf"torch\.(?:cuda|accelerator)(?:\.{_NAME})+|torch\.backends\.(?:cuda|cudnn)(?:\.{_NAME})+|"
    + "|".join(_OTHERS)
)
_MODULES = ("torch.cuda.amp", "torch.cuda.nvtx", "torch.cuda.memory", "torch.cuda.random")
# methods of what a call gives, which stand behind its name in the sources
_OF_RESULTS = re.compile(r"\.(?:__\w+__|append|get|items|type|index|startswith)$")


def calls_in(repository: Path) -> Counter[str]:
    """How often the Python files of a repository name each call."""
    command = [
        "git",
        "-C",
        str(repository),
        "grep",
        "-hI",
        "-E",
        "cuda|accelerator|pin|torch|block",
    ]
    said = subprocess.run([*command, "HEAD", "--", "*.py"], capture_output=True, check=False).stdout
    text = said.decode(errors="replace")
    return Counter(_OF_RESULTS.sub("", found) for found in _CALLS.findall(text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path, help="the folder of the repositories")
    parser.add_argument("--out", type=Path, required=True, help="write the counts as JSON")
    options = parser.parse_args()
    uses: Counter[str] = Counter()
    made_by: defaultdict[str, set[str]] = defaultdict(set)
    read = []
    for place in sorted(options.checkouts.iterdir()):
        if "+" not in place.name:
            continue
        name = place.name.replace("+", "/")
        read.append(name)
        found = calls_in(place / "repo" if (place / "repo").exists() else place)
        uses += found
        for call in found:
            made_by[call].add(name)
    named = {call for call, names in made_by.items() if len(names) >= LEAST}
    often = sorted(named.difference(_MODULES))
    often.sort(key=lambda call: (-len(made_by[call]), -uses[call], call))
    rows = [
        {"call": call, "repositories": len(made_by[call]), "uses": uses[call]} for call in often
    ]
    write(options.out, {"repositories": read, "calls": rows})
    print(f"{len(rows)} calls that at least {LEAST} of {len(read)} repositories make")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
