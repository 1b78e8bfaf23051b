"""Would the tests notice a rule that does nothing?

Each rule in turn passes everything, and its tests must go red.

    python benchmarks/mutation.py --out benchmarks/results/mutation.json [--only RULE]

A mutant is a rule whose `judge` returns a pass. The tests that can kill it are those of
tests/verifier that name the rule: the seeded faults of the corpus. Only the fast part runs; a
mutant that lives is a rule without a proof.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from corpus import faults, representative
from results_file import write
from verified_fsdp2.verifier.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
TEST = "tests/verifier/test_corpus.py::test_fault_is_found"
ELSEWHERE = {
    "gloo-avg-is-sum": "tests/verifier/test_average.py::test_what_was_measured_decides"
}  # no script has the fault


def survives(rule: str) -> bool:
    """Whether the tests stay green with this rule switched off."""
    cases = [f"{TEST}[{case.name}]" for case in representative(faults()) if case.rule == rule]
    cases = cases or [ELSEWHERE[rule]]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        *cases[:1],
    ]
    path = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "FSDP2_MUTANT": rule},
        capture_output=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout.decode())
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--only", help="this rule alone")
    options = parser.parse_args()
    rules = [options.only] if options.only else list(RULES)
    started = time.monotonic()
    living = []
    for rule in rules:
        lives = survives(rule)
        living += [rule] * lives
        print(f"{'LIVES' if lives else 'killed':<8}{rule}", flush=True)
    print(
        f"{len(rules) - len(living)} of {len(rules)} mutants killed in"
        f" {time.monotonic() - started:.0f} s"
    )
    if options.out:
        write(options.out, {"mutants": len(rules), "living": living})
    return 1 if living else 0


if __name__ == "__main__":
    raise SystemExit(main())
