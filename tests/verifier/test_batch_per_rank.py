"""One process takes the batch of all ranks, by the script's own option."""

from pathlib import Path

import pytest

from records import cases
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.pipeline import verify

SCRIPT = Path(__file__).parents[1] / "zoo" / "per_rank_batch.py"
OPTION = (
    'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--batch-size", type=int, default=8)\n'
)


@pytest.mark.launch
@cases("option, status", (OPTION, "pass"), ("", "inconclusive"))
def test_a_batch_per_rank(tmp_path: Path, option: str, status: str) -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    if option:
        text = text.replace("BATCH_PER_RANK, SAMPLES, STEPS = 16, 8, 512, 20", "SAMPLES, STEPS = 16, 512, 20")
        text = text.replace(
            "\n@dataclass", f"\n{option}BATCH_PER_RANK = parser.parse_args().batch_size\n\n\n@dataclass", 1
        )
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    verdict = verify(resolve(script, {"steps": "3"}), tmp_path / "work", ["matches-single-process"])
    assert [finding.status for finding in verdict.findings] == [status], verdict.findings
    assert any("--batch-size 16" in note for note in verdict.environment["notes"]) is bool(option)
