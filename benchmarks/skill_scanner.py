"""The installed copy before cisco-ai-skill-scanner, and the length of SKILL.md in tokens.

    python benchmarks/skill_scanner.py --scanner VENV/bin/skill-scanner --out \\
        benchmarks/results/skill_scanner.json

Behavioural checks are on; nothing goes over the network. Exit 1 if there is a finding of high or
critical severity. The tokens are those of the tokenizers that the scanner's own dependencies bring
along.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from results_file import write

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("balanced", "strict")


def scan(scanner: Path, copy: Path, policy: str, work: Path) -> dict[str, Any]:
    """The findings on a copy under one policy."""
    out = work / "report.json"
    command = [
        str(scanner),
        "scan",
        str(copy),
        "--policy",
        policy,
        "--use-behavioral",
        "--use-trigger",
    ]
    command += ["--format", "json", "--output", str(out)]
    keep = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    done = subprocess.run(
        command,
        env={**keep, "HOME": str(work)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if not out.is_file():
        raise RuntimeError(done.stdout + done.stderr)
    report = json.loads(out.read_text(encoding="utf-8"))
    keys = ("severity", "rule_id", "file_path", "line_number", "description")
    return {
        "analyzers": report["analyzers_used"],
        "severities": dict(Counter(finding["severity"] for finding in report["findings"])),
        "findings": [{key: finding.get(key) for key in keys} for finding in report["findings"]],
    }


def tokens(scanner: Path) -> dict[str, int]:
    """{tokenizer: length of SKILL.md}."""
    command = [str(scanner.parent / "python"), __file__, "--count"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def count() -> dict[str, int]:
    """For the scanner's Python: litellm ships the files of these tokenizers."""
    from importlib.util import find_spec

    import tiktoken
    from tokenizers import Tokenizer

    spec = find_spec("litellm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    found = {
        name: len(tiktoken.get_encoding(name).encode(text))
        for name in ("cl100k_base", "o200k_base")
    }
    found["anthropic"] = len(
        Tokenizer.from_file(str(folder / "anthropic_tokenizer.json")).encode(text).ids
    )
    return found


def main() -> int:
    """Install into a temporary folder, scan, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scanner",
        type=Path,
        metavar="PATH",
        help="the command skill-scanner, in an environment of its own",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "skill_scanner.json"
    )
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        print(json.dumps(count()))
        return 0
    from verified_fsdp2.skill import installer
    from verified_fsdp2.skill.copies import contents

    version = subprocess.run(
        [str(options.scanner), "--version"], capture_output=True, text=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="scan-") as folder:
        copy = Path(folder) / "skills" / contents.NAME
        plan = installer.plan_install(installer.Target(copy, ("any",)), contents.pack_files())
        installer.apply([plan])
        files = [path for path in copy.rglob("*") if path.is_file()]
        results = {
            "environment": {
                "scanner": version.strip(),
                "python": platform.python_version(),
                "platform": platform.platform(),
            },
            "files": len(files),
            "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 2),
            "tokens_of_skill_md": tokens(options.scanner),
            "policies": {
                policy: scan(options.scanner, copy, policy, Path(folder)) for policy in POLICIES
            },
        }
    write(options.out, results)
    bad = [
        f
        for one in results["policies"].values()
        for f in one["findings"]
        if f["severity"] in ("HIGH", "CRITICAL")
    ]
    for policy, one in results["policies"].items():
        print(policy, one["severities"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
