"""`fsdp2 lint --migrate`: every construct of the scripts in tests/migrate is listed at its line,
and no other; FSDP2 needs nothing.

A line of these scripts that must change ends in `# -> construct; construct`.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from records import cases
from scripts import Command, written
from verified_fsdp2.verifier.report.migration import render
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.source import migration
from verified_fsdp2.verifier.source.lint import look
from verified_fsdp2.verifier.source.migration import STEPS, migrate

TESTS = Path(__file__).parents[1]
ROWS = json.loads(Path(migration.__file__).with_suffix(".json").read_text(encoding="utf-8"))
SCRIPTS = sorted((TESTS / "migrate").glob("*.py"))
FSDP2 = [*sorted((TESTS / "zoo").glob("*.py")), *sorted((TESTS / "faults").glob("*.py"))]
FSDP2 += [
    path
    for path in sorted((TESTS / "hosts").iterdir())
    if path.is_dir() and path.name != "converted"
]
FSDP2 += [
    path
    for path in sorted((TESTS / "hosts" / "converted").glob("*.py"))
    if path.name != "before.py"
]
LIBRARIES = ("accelerate", "lightning", "peft", "torch", "transformers")
FSDP2 += [TESTS / "libraries" / name / "train.py" for name in LIBRARIES]

FSDP1 = (
    "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision,"
    " ShardingStrategy\n"
)
FSDP1 += "m = torch.nn.Linear(2, 2)\n"
DDP = (
    "import torch\nfrom torch.nn.parallel import DistributedDataParallel as"
    " D\ntorch.manual_seed(0)\nm = torch.nn.Linear(2, 2)\n"
)
TRAIN = "\nopt = torch.optim.SGD(m.parameters())\nm(torch.zeros(2)).sum().backward()\nopt.step()\n"
INLINE = yaml.safe_load((TESTS / "migrate" / "inline.yaml").read_text(encoding="utf-8"))
SECTIONS = dict.fromkeys(("accelerate", "transformers"), "accelerate")
SECTIONS |= dict.fromkeys(("lightning", "pytorch_lightning"), "lightning")


def constructs(folder: Path, text: str) -> list[str]:
    """What a script of this text has to change."""
    return [item.construct for item in migrate([written(folder, text)]).items]


def found(script: Path) -> dict[int, set[str]]:
    lines: dict[int, set[str]] = {}
    for item in migrate([script]).items:
        for place in item.places:
            lines.setdefault(place["line"], set()).add(item.construct)
    return lines


def marked(script: Path) -> dict[int, set[str]]:
    lines = enumerate(script.read_text(encoding="utf-8").splitlines(), start=1)
    return {
        number: set(line.partition(" # -> ")[2].split("; "))
        for number, line in lines
        if " # -> " in line
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_every_construct_at_its_line(script: Path) -> None:
    assert found(script) == marked(script)


@pytest.mark.parametrize("path", FSDP2, ids=lambda p: p.relative_to(TESTS).as_posix())
def test_fsdp2_has_nothing_to_migrate(path: Path) -> None:
    assert migrate([path]).items == ()


@pytest.mark.parametrize("row", INLINE, ids=lambda row: row["construct"])
def test_in_one_line(tmp_path: Path, row: dict[str, str]) -> None:
    lines = row["lines"].replace("= F(", "= FullyShardedDataParallel(")
    script = written(tmp_path, (DDP if "D(m" in lines else FSDP1) + lines + TRAIN)
    items = {item.construct: item for item in migrate([script]).items}
    assert row["fsdp2"] in items[row["construct"]].fsdp2
    package = next((name for name in SECTIONS if f" {name}" in lines), None)
    if package:
        assert items[row["construct"]].reference.endswith("#" + SECTIONS[package])


def test_the_script_before_a_conversion() -> None:
    """What it lists is what the script after it has otherwise."""
    constructs = [
        item.construct for item in migrate([TESTS / "hosts" / "converted" / "before.py"]).items
    ]
    assert constructs[:3] == ["DistributedDataParallel", ".module", "with no_sync()"]
    assert constructs[3:] == ["model.state_dict()", "torch.save of the model alone"]


def test_every_row_is_whole_and_found_somewhere() -> None:
    names = {name for script in SCRIPTS for line in marked(script).values() for name in line}
    assert names | {row["construct"] for row in INLINE} == set(ROWS)
    for name, row in ROWS.items():
        assert set(row) <= {"step", "action", "fsdp2", "mind", "rules", "section"}, name
        assert row["step"] in STEPS and row["action"] in (
            "add",
            "replace",
            "drop",
            "move",
            "check",
        ), name
        assert (row["action"] == "drop") == row["fsdp2"].startswith(
            "nothing"
        ) or name == "register_comm_hook", name
        assert set(row.get("rules", ())) <= set(RULES), name


def test_every_section_is_a_heading() -> None:
    page = TESTS.parent / "references" / "converting.md"
    headings = {
        heading.lower()
        for heading in re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.M)
    }
    assert {"single", "ddp", "fsdp1", "accelerate", "lightning"} <= headings
    assert {row["section"] for row in ROWS.values() if "section" in row} <= headings


@cases(
    "lines",
    "import torch\nx = torch.zeros(2)\n",
    "import json\nprint(json.dumps({}))\n",
    "import torch\nmodel = torch.nn.Linear(2,"
    " 2)\nprint(model(torch.zeros(2)))\ntorch.save(model.state_dict(), 'm.pt')\n",
    ids=["tensors", "no torch", "inference"],
)
def test_what_trains_nothing(tmp_path: Path, lines: str) -> None:
    script = written(tmp_path, lines, "script.py")
    assert migrate([script]).items == () and "no training loop" in render(migrate([script]))


def test_a_script_that_is_fsdp2_in_part_lists_the_wrapper_only(tmp_path: Path) -> None:
    lines = (
        "from torch.distributed.fsdp import fully_shard\nif torch.cuda.is_available():\n   "
        " fully_shard(m)\nelse:\n    m = D(m)"
    )
    assert constructs(tmp_path, DDP + lines + TRAIN + "torch.save(m.state_dict(), 'm.pt')\n") == [
        "DistributedDataParallel"
    ]


PARTS = """import torch
from torch.nn import parallel

def wrap(m):
    return parallel.DistributedDataParallel(m)

def save(m):
    torch.save(m.module.state_dict(), 'm.pt')
"""


def test_modules_of_one_project_are_followed_from_the_script(tmp_path: Path) -> None:
    script = DDP + "from parts import wrap, save\nm = wrap(m)" + TRAIN + "save(m)\n"
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
    items = migrate([tmp_path]).items
    places = {
        item.construct: [(Path(p["file"]).name, p["line"], p["function"]) for p in item.places]
        for item in items
    }
    assert places["DistributedDataParallel"] == [("parts.py", 5, "wrap")]
    assert places[".module"] == places["model.state_dict()"] == [("parts.py", 8, "save")]


def test_the_order_of_work_and_the_text(command: Command) -> None:
    script = TESTS / "migrate" / "ddp_functions.py"
    out = command("lint", "--migrate", str(script), code=1).out
    heads = re.findall(r"^\d\. (.*)$", out, re.M)
    assert heads == [step for step in STEPS if step in heads] and len(heads) == 4
    head, text = out.split("\n\n")[0].split(), " ".join(out.split())
    assert head[:3] == [str(script), "(DDP):", "23"] and head[-1] == "references/converting.md#ddp"
    assert re.search(
        r"move optimizer before .* ddp_functions.py:69 .*optim-before-shard\)\n +-> below the last",
        out,
    )
    assert text.endswith(f"fsdp2 lint COPY, fsdp2 verify COPY --reference {script}")
    none = command("lint", "--migrate", TESTS / "zoo" / "minimal.py", code=0)
    assert "nothing to migrate (it is FSDP2)" in none.out


def test_the_text_is_bounded_and_the_json_has_all(command: Command) -> None:
    words = ["lint", "--migrate", *map(str, SCRIPTS)]
    out = command(*words, code=1).out
    assert len(out) < 10_500 and "(cut; --report json=PATH has all)" in out
    report = command(*words, "--json", code=1).data
    assert report["schema"] == 1 and report["files"] == len(SCRIPTS)
    assert set(report["kinds"]) == {"ddp", "fsdp1", "single", "dataparallel"}
    keys = {"step", "construct", "action", "fsdp2", "mind", "rules", "reference", "places"}
    assert all(set(item) == keys and item["places"] for item in report["items"])
    steps = [STEPS.index(item["step"]) for item in report["items"]]
    assert steps == sorted(steps)


@cases("words", ["--only", "checkpoint"], ["--skip", "root-only-wrap"], ["--report", "xml"])
def test_bad_usage(words: list[str], command: Command) -> None:
    message = "unknown format 'xml'" if "xml" in words else "--migrate judges no rules"
    assert message in command("lint", "--migrate", SCRIPTS[0], *words, code=2).err


def test_it_edits_nothing(tmp_path: Path, command: Command) -> None:
    text = (TESTS / "migrate" / "fsdp1_trainer.py").read_text(encoding="utf-8")
    script = written(tmp_path, text)
    command("lint", "--migrate", script, code=1)
    assert script.read_text(encoding="utf-8") == text and list(tmp_path.iterdir()) == [script]


BRANCH = """
import sys, copy, torch
from torch.distributed.fsdp import fully_shard
DEFAULTS = {'copy': ''}
options = dict(DEFAULTS)
for word in sys.argv[1:]:
    options[word] = type(word)(word)
model = torch.nn.Linear(2, 2)
fully_shard(model)
if options['copy']:
    other = copy.deepcopy(model)
"""


def test_lint_looks_into_a_branch_whose_setting_may_be_replaced(tmp_path: Path) -> None:
    assert [hit.rule for hit in look([written(tmp_path, BRANCH)]).hits] == [
        "deepcopy-of-fsdp-model"
    ]
