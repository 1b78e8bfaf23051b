"""The code blocks and claims of the references that need a package beside torch, run on two ranks
with pinned versions.

    python benchmarks/library_blocks.py FOLDER

FOLDER holds the environments of benchmarks/libraries.py. Results, by the hash of each block, go to
benchmarks/results/library_blocks.json.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from libraries import ROOT, environment, versions
from results_file import write

sys.path.insert(0, str(ROOT / "tests"))

from documents import Block, claims, python_blocks

SETTING = ROOT / "tests" / "docs_setting.py"
RESULTS = ROOT / "benchmarks" / "results" / "library_blocks.json"


def run(python: Path, blocks: list[Block]) -> dict[str, str]:
    """{name: error} of the blocks that failed."""
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks:
            (Path(folder) / f"{block.name}.{block.ranks}.py").write_text(
                block.text, encoding="utf-8"
            )
        done = subprocess.run(
            [str(python), str(SETTING), folder],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    if not done.stdout:
        raise RuntimeError(done.stderr)
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])["failed"]
    return failed


def main() -> int:
    folder = Path(sys.argv[1])
    results: dict[str, Any] = {}
    for name, wanted in (
        ("huggingface", {"accelerate", "peft", "transformers"}),
        ("lightning", {"lightning"}),
    ):
        blocks = [block for block in [*python_blocks(), *claims()] if block.library in wanted]
        python = environment(folder, name)
        failed = run(python, blocks)
        if "setting" in failed:
            raise RuntimeError(failed["setting"])
        found = versions(python)
        for block in blocks:
            key = hashlib.sha256(block.text.encode()).hexdigest()
            results[key] = {
                "document": block.where.split(":")[0],
                "versions": found,
                "error": failed.get(block.name),
            }
            print(block.where, failed.get(block.name) or "ran")
    write(RESULTS, results)
    return 1 if any(result["error"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
