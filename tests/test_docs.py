"""Every code block of every document is run: Python in a small setting, `fsdp2` and `torchrun`
lines through their parsers.
"""

import ast
import hashlib
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from documents import DOCUMENTS, ROOT, Block, blocks, claims, diagnosis, python_blocks
from scripts import python
from verified_fsdp2.skill import cli, reference
from verified_fsdp2.verifier import tolerances
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace.roles import ROLES

SETTING = Path(__file__).parent / "docs_setting.py"
RUN = [block for block in [*python_blocks(), *claims()] if block.library is None]
ELSEWHERE = [block for block in [*python_blocks(), *claims()] if block.library is not None]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The outcome of all blocks and claims: {"failed": {name: error}, "raised": {name:
    message}}.
    """
    folder = tmp_path_factory.mktemp("blocks")
    for block in RUN:
        (folder / f"{block.name}.{block.ranks}.py").write_text(block.text, encoding="utf-8")
    done = python(SETTING, folder, timeout=420, status=None)
    merged = (
        json.loads(done.stdout.splitlines()[-1])
        if done.stdout
        else {"failed": {"setting": done.stderr[-2000:]}}
    )
    where = {block.name: block.where for block in RUN}
    return {
        kind: {where.get(name, name): text for name, text in texts.items()}
        for kind, texts in merged.items()
    }


def test_blocks_use_names_that_are_there(tmp_path: Path) -> None:
    """In every test run; `make test-all` runs the blocks."""
    tree = ast.parse(SETTING.read_text(encoding="utf-8"))
    given = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            given |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            given.add(node.name)
        elif isinstance(node, ast.Assign):
            given |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    builtins = sorted(name for name in given if name.isidentifier())
    for block in RUN:
        (tmp_path / f"{block.name}.py").write_text(block.text, encoding="utf-8")
    ruff = [
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F821",
        "--output-format",
        "concise",
        "--config",
        f"builtins = {builtins}",
    ]
    done = python(*ruff, tmp_path, status=None)
    assert done.stdout.splitlines() == ["All checks passed!"]


@pytest.mark.full
@pytest.mark.launch
def test_blocks_and_claims_run(outcome: dict[str, dict[str, str]]) -> None:
    assert len(RUN) > 250
    assert outcome["failed"] == {}


@pytest.mark.full
@pytest.mark.launch
def test_errors_raised_in_rule_docs_are_in_the_diagnosis(
    outcome: dict[str, dict[str, str]],
) -> None:
    """The message of every error that the docs of a rule raise leads, in the diagnosis, to that
    rule.
    """
    missed = {}
    for where, message in outcome["raised"].items():
        command, _, rule = where.split(":")[0].partition(" ")
        assert command == "explain"
        if not any(rule in row.rules and row.fits(message) for row in diagnosis()):
            missed[rule] = message
    assert len(outcome["raised"]) > 20
    assert missed == {}


@pytest.mark.parametrize("block", ELSEWHERE, ids=lambda block: block.where)
def test_blocks_for_libraries_were_run_unchanged(block: Block) -> None:
    """Their packages are not installed here: `benchmarks/library_blocks.py` runs them and keeps
    their hashes.
    """
    results = json.loads(
        (ROOT / "benchmarks" / "results" / "library_blocks.json").read_text(encoding="utf-8")
    )
    ran = results.get(hashlib.sha256(block.text.encode()).hexdigest())
    assert ran is not None, "run benchmarks/library_blocks.py"
    assert ran["error"] is None
    assert block.library in ran["versions"]


def test_every_block_names_a_language_that_is_tested() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        opened = re.findall(r"^```(\w*)$", text, re.M)[::2]
        assert set(opened) <= {"python", "sh", "yaml", "json", "text", "diff"}, document.name


def test_the_contract_is_what_the_rules_say() -> None:
    text = (ROOT / "references" / "contract.md").read_text(encoding="utf-8")
    assert text.rstrip("\n") == reference.contract().rstrip("\n"), "run `make references`"


def test_the_tolerance_is_what_the_code_allows() -> None:
    text = (ROOT / "references" / "verify.md").read_text(encoding="utf-8")
    assert f"{tolerances.MULTIPLE:.0f} times what one unit in the last place" in text
    assert f"plus 2^{math.log2(tolerances.FLOOR):.0f}" in text
    assert f"exceeds {tolerances.UNREPRODUCIBLE:.0%}".replace("%", " %") in text


def test_the_skill_names_rules() -> None:
    skill = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    named = re.findall(
        r"[a-z0-9]+(?:-[a-z0-9]+)+", " ".join(re.findall(r"\(([a-z0-9,\s-]+)\)", skill))
    )
    assert len(set(named) & set(RULES)) > 20
    assert {word for word in named if word.count("-") > 1} <= set(RULES)


def test_a_role_is_in_the_schema_and_in_the_table() -> None:
    schema, table = "verifier/report/report.schema.json", "references/verify.md"
    report = json.loads((ROOT / schema).read_text(encoding="utf-8"))
    text = (ROOT / table).read_text(encoding="utf-8")
    known = report["properties"]["runs"]["items"]["properties"]["role"]["enum"]
    places = {
        "verifier/trace/roles.py": set(ROLES),
        f"the enum `role` of {schema}": set(known),
        f"the table of roles of {table}": set(re.findall(r"^\| ([a-z_]+) \|", text, re.M)),
    }
    roles = set(ROLES) | set(known)
    missing = [
        f"add {role} to {where}"
        for where, those in places.items()
        for role in sorted(roles - those)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(("where", "text"), blocks("sh"))
def test_command_lines_are_valid(where: str, text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["fsdp2"]:
            cli.parse(words[1:])
        if words[:1] == ["torchrun"]:
            get_args_parser().parse_args(words[1:])


@pytest.mark.parametrize(("where", "text"), blocks("json"))
def test_json_blocks_are_json(where: str, text: str) -> None:
    json.loads(text)
