"""One silent fault through every format at once, then with a baseline."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts import Command
from verdicts import valid
from verified_fsdp2.skill.reports import FORMATS

TESTS = Path(__file__).parent
PLACE = {"uri": "train.py", "uriBaseId": "SRCROOT"}

pytestmark = pytest.mark.launch


@pytest.mark.full
def test_a_silent_fault(folder: Path, command: Command) -> None:
    script = folder / "train.py"
    never_called = (
        "\n\ndef keep(model):\n    torch.save(model.state_dict(), 'model.pt')\n   "
        " torch.load('model.pt')\n"
    )
    script.write_text((TESTS / "faults" / "optim_before_shard.py").read_text() + never_called)
    rules = ("optimizer", "load-without-set", "root-not-wrapped")
    words = [
        "verify",
        "train.py",
        "--steps",
        "5",
        *(word for rule in rules for word in ("--only", rule)),
    ]
    paths = [word for name in FORMATS for word in ("--report", f"{name}=out.{name}")]
    command(*words, "--only", "matches-ddp", *paths, code=1)
    texts = {
        name: valid(name, (folder / f"out.{name}").read_text(encoding="utf-8")) for name in FORMATS
    }

    statuses = {f["rule"]: f["status"] for f in json.loads(texts["json"])["findings"]}
    assert statuses["optim-before-shard"] == statuses["matches-ddp"] == "fail"
    assert statuses["load-without-set"] == "inconclusive" and statuses["root-not-wrapped"] == "pass"

    kinds = {
        c.get("name"): [child.tag for child in c]
        for c in ET.fromstring(texts["junit"]).iter("testcase")
    }
    assert kinds["optim-before-shard"] == kinds["matches-ddp"] == ["failure"]
    assert kinds["load-without-set"] == ["error"] and kinds["root-not-wrapped"] == ["system-out"]

    sarif = json.loads(texts["sarif"])
    results = {r["ruleId"]: r for r in sarif["runs"][0]["results"]}
    physical = results["optim-before-shard"]["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == PLACE and physical["region"]["startLine"] == 67
    assert (results["matches-ddp"]["level"], results["load-without-set"]["kind"]) == (
        "warning",
        "open",
    )
    assert "root-not-wrapped" not in results

    commands = [line for line in texts["github"].splitlines() if line.startswith("::")]
    assert commands[0].startswith(
        "::error file=train.py,line=67,title=fsdp2%3A optim-before-shard::"
    )
    assert (
        "FAIL optim-before-shard" in texts["text"]
        and "## fsdp2: Failed" in (folder / "summary.md").read_text()
    )

    script.write_text("# a line more\n" + script.read_text(encoding="utf-8"))
    out = command(*words, "--baseline", "out.json", code=4).out
    assert "KNOWN optim-before-shard" in out and "verdict: fail\n" in out
    last = " ".join(out.split("verdict: fail\n")[1].split())
    assert "out.json: inconclusive" in last and "0 new" in last and "(optim-before-shard)" in last
