"""The same script twice: the same report byte for byte, but for the fields that the schema
marks.
"""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from corpus import TESTS
from records import cases
from scripts import training, written
from verdicts import REPORT
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.report import json_report
from verified_fsdp2.verifier.report.redact import stable

MODEL = "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))"
FAULTY = (
    "torch.manual_seed(10 * step + dist.get_rank())\nif step == 2 and dist.get_rank() == 1:\n    "
)
FAULTS = {
    "hangs": "time.sleep(1000)",
    "raises": (
        "raise RuntimeError(f'{object()} is not in {sys.argv[1]}, ask localhost:{time.time_ns() %"
        " 60000}')"
    ),
}


def blank(value: Any, schema: dict[str, Any]) -> Any:
    """A report without what the schema says is another in each run."""
    if "$ref" in schema:
        schema = REPORT["definitions"][schema["$ref"].rpartition("/")[2]]
    if "x-varies" in schema:
        return schema["x-varies"]
    if isinstance(value, dict):
        return {
            key: blank(item, schema.get("properties", {}).get(key, {}))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [blank(item, schema.get("items", {})) for item in value]
    return value


def report(launcher: Launcher, script: Path, work: Path, **flags: Any) -> Any:
    """The whole JSON report of a verification, valid."""
    value = json.loads(
        json_report.render(verify_with(launcher, resolve(script, flags), work, select((), ())))
    )
    jsonschema.validate(value, REPORT)
    assert str(work) not in json.dumps(value)
    return value


def test_what_varies_stands_in_fields_of_its_own() -> None:
    found: list[str] = []

    def walk(schema: dict[str, Any], path: str) -> None:
        if "x-varies" in schema:
            found.append(f"{path}: {schema['x-varies']}")
            return
        for key, inner in schema.get("properties", {}).items():
            walk(inner, f"{path}.{key}" if path else key)
        if "items" in schema:
            walk(schema["items"], path)

    walk(REPORT, "")
    times = [
        f"{name}: time" for name in ("findings.seconds", "runs.seconds", "facts.horizon", "seconds")
    ]
    times.insert(3, "facts.memory.process: memory")
    assert [name for name in found if not name.endswith(": path")] == times


@pytest.mark.full
def test_a_right_script_twice(launcher: Launcher, tmp_path: Path) -> None:
    flags = {
        "save_args": "--save-every 3 --out {checkpoint}",
        "resume_args": "--resume {checkpoint}",
    }
    script = TESTS / "zoo" / "checkpoint_stateful.py"
    one, two = (report(launcher, script, tmp_path / name, **flags) for name in ("one", "two"))
    assert one != two
    assert json.dumps(blank(one, REPORT)) == json.dumps(blank(two, REPORT))
    facts = one["facts"]
    assert [run["role"] for run in one["runs"]].count("reshard") >= 2
    checkpoint, *_ = facts["checkpoints"]
    assert checkpoint["path"].startswith("{checkpoint}") and checkpoint["after_step"] == 3
    assert (checkpoint["state"], checkpoint["wrong"], checkpoint["ranks"]) == ("opened", 0, 2)
    assert checkpoint["tensors"] > facts["parameters"]
    back = {one["runs"][entry["run"]]["role"]: entry for entry in facts["returns"]}
    assert back["resume"]["loads"] and back["resume"]["steps"] == 3
    rules = [entry["rule"] for entry in facts["comparisons"]]
    assert set(rules) == {
        "matches-ddp",
        "matches-single-process",
        "resume-is-exact",
        "reshard-keeps-trajectory",
    }
    exact = facts["comparisons"][rules.index("resume-is-exact")]
    assert (exact["loss"], exact["allowed"]["loss"], exact["after_step"]) == ([0.0] * 3, 0.0, 6)
    judged = {f["rule"]: f for f in one["findings"]}
    reshards = [
        max(c["loss"]) for c in facts["comparisons"] if c["rule"] == "reshard-keeps-trajectory"
    ]
    assert max(reshards) == judged["reshard-keeps-trajectory"]["measured"]
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    assert facts["expected_traffic"] == {
        kind: facts["traffic"].get(f"{kind}_model", 0) for kind in kinds
    }
    for shard in facts["shards"]:
        assert sum(shard["elements"]) == math.prod(shard["shape"]), shard
    for row in facts["memory"]:
        held = 4 * sum(shard["elements"][row["rank"]] for shard in facts["shards"])
        assert (
            row["parameters"] == row["gradients"] == held
            and 2 * held <= row["optimizer"] < 2 * held + 8192
        )
        assert (
            0 < row["process"]["before"] < row["process"]["peak"] and row["process"]["cuda"] is None
        )


@pytest.mark.parametrize("fault", [pytest.param("hangs", marks=pytest.mark.full), "raises"])
def test_a_faulty_script_twice(launcher: Launcher, tmp_path: Path, fault: str) -> None:
    script = written(tmp_path, training("", MODEL, "torch.randn(4, 8)", FAULTY + FAULTS[fault]))
    flags = {"args": "{checkpoint}", "timeout": "5"}
    one, two = (report(launcher, script, tmp_path / name, **flags) for name in ("one", "two"))
    assert one["verdict"] == "fail"
    assert json.dumps(blank(one, REPORT)) == json.dumps(blank(two, REPORT))
    if fault == "raises":
        (message,) = [f["evidence"] for f in one["findings"] if f["rule"] == "run-completes"]
        assert "<object object at 0x...> is not in {checkpoint}, ask localhost:..." in message


@cases(
    "text, expected",
    ("/w/files/checkpoint/step_3 is not there", "{checkpoint}/step_3 is not there"),
    ("'/w/03-single-1/world/files/checkpoint'", "'{checkpoint}'"),
    ("'/w/12-resume_full_precision-2/world/files/checkpoint'", "'{checkpoint}'"),
    (
        "/w/world.saved/a, /w/04-train-2/x, /wide/checkpoint",
        "{work}/world.saved/a, {work}/04-train-2/x, ",
    ),
    ("<M object at 0x7f12ab34cd56>, 0xff", "<M object at 0x...>, 0xff"),
    ("[127.0.0.1]:4242: reset, localhost:29500", "[127.0.0.1]:...: reset, localhost:..."),
    ("\ud800", "?"),
)
def test_words_that_are_the_same_each_time(text: str, expected: str) -> None:
    assert stable(text, Path("/w")).startswith(expected)
