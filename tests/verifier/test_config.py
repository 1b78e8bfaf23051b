"""What a configuration may say, what is wrong with one, and what its policy makes of a verdict."""

import datetime
import inspect
import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from documents import blocks
from records import cases
from scripts import FAULTS, ZOO, Command, written
from trees import build_file_tree
from verdicts import REPORT, verdict
from verified_fsdp2.skill.cli.verify import FLAGS
from verified_fsdp2.verifier import pipeline
from verified_fsdp2.verifier.config.policy import Policy, Skip, Widening
from verified_fsdp2.verifier.config.target import resolve, resolve_all
from verified_fsdp2.verifier.config.verify_file import FORM, PYPROJECT, config_in, read
from verified_fsdp2.verifier.errors import MachineRefuses, UserError
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import apply_policy
from verified_fsdp2.verifier.judging.all_findings import widened
from verified_fsdp2.verifier.report import json_report, text
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.naming import unknown
from verified_fsdp2.verifier.trace.events import Place
from verified_fsdp2.verifier.verdict import Verdict

TODAY = datetime.date(2026, 11, 21)
EVERYTHING = """\
timeout: 60
required: [parity, optim-before-shard]
targets:
  - name: small
    script: one.py
    args: --small
    tolerances: {matches-ddp: {times: 3, reason: "a sum in another order"}}
  - name: large
    folder: project
    timeout: 90
    skip:
      - {rule: root-only-wrap, reason: two small layers, until: 2026-11-21}
      - rule: clipping
        reason: never clips
        until: 2026-11-20
"""
IN_TOML = """\
[project]
name = "x"

[tool.fsdp2]
timeout = 60
required = ["parity", "optim-before-shard"]

[[tool.fsdp2.targets]]
name = "small"
script = "one.py"
args = "--small"
tolerances.matches-ddp = {times = 3, reason = "a sum in another order"}

[[tool.fsdp2.targets]]
name = "large"
folder = "project"
timeout = 90

[[tool.fsdp2.targets.skip]]
rule = "root-only-wrap"
reason = "two small layers"
until = 2026-11-21

[[tool.fsdp2.targets.skip]]
rule = "clipping"
reason = "never clips"
until = "2026-11-20"
"""


BOTH = cases("name, content", ("verify.yaml", EVERYTHING), (PYPROJECT, IN_TOML))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = dict.fromkeys(("project/train.py", "one.py"), "import torch\n")
    build_file_tree(
        tmp_path, files | {"project/verify.yaml": "nproc: 3\ntimeout: 30\nsave_args: --save\n"}
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@BOTH
def test_several_targets_and_what_holds_for_all(repository: Path, name: str, content: str) -> None:
    (repository / name).write_text(content)
    small, large = resolve_all(None, {"nproc": None}, config_in(Path()))
    assert (small.name, small.script, small.args, small.timeout) == (
        "small",
        repository / "one.py",
        ("--small",),
        60,
    )
    assert small.policy.tolerances == {"matches-ddp": Widening(3, "a sum in another order")}
    assert small.policy.required == ("parity", "optim-before-shard") and small.policy.skips == ()
    assert (large.script, large.cwd) == (
        repository / "project" / "train.py",
        repository / "project",
    )
    assert (large.nproc, large.timeout, large.save_args) == (
        3,
        90,
        ("--save",),
    ), "the outer file goes first"
    assert large.command == ("fsdp2", "verify", "--target", "large")
    assert resolve(None, {"nproc": "5"}, None, "large").nproc == 5
    with pytest.raises(UserError, match="several targets"):
        resolve(None, {})
    assert [target.command for target in resolve_all(repository, {})] == [
        ("fsdp2", "verify", str(repository), "--target", one) for one in ("small", "large")
    ]
    with pytest.raises(UserError, match=r"--target other: no such target .*known: small, large"):
        resolve(None, {}, None, "other")
    with pytest.raises(UserError, match="has several targets"):
        resolve_all(Path("one.py"), {}, Path(name))


@BOTH
def test_a_skip_holds_on_its_last_day_and_no_longer(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    _, large = read(tmp_path / name, TODAY)
    one, other = large.policy.skips
    assert (one.rule, one.until, one.over) == ("root-only-wrap", "2026-11-21", False)
    assert (other.rule, other.until, other.over) == ("clipping", "2026-11-20", True)
    line = other.location.line
    code = content.splitlines()[line - 1].strip()
    assert other.location == Place(file=str(tmp_path / name), line=line, function="skip", code=code)
    assert other.column == (9 if name == "verify.yaml" else 1)
    assert code == ("- rule: clipping" if name == "verify.yaml" else "[[tool.fsdp2.targets.skip]]")


WRONG = yaml.safe_load(Path(__file__).with_name("wrong_configs.yaml").read_text(encoding="utf-8"))


def refusal(path: Path, content: str) -> str:
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read(path, TODAY, unknown)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, row) for name, rows in WRONG.items() for row in rows]
)
def test_what_is_wrong_is_reported_with_its_place(
    tmp_path: Path, name: str, wrong: dict[str, str]
) -> None:
    said = refusal(tmp_path / name, wrong["content"])
    assert f"{tmp_path / name}:{wrong['error']}" in said and "\n    " in said, (
        "the line and a caret"
    )


def test_every_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "verify.yaml"
    said = refusal(path, "nprocs: 2\nsteps: 1\nargs: a 'b\nrequired: [x-y-z]\n")
    assert [line.split(":")[1] for line in said.splitlines() if line.startswith(str(path))] == list(
        "1234"
    )


PIECES = [
    "",
    "\n",
    "  ",
    "- ",
    *"{}[]:",
    "'''",
    '"',
    "#",
    "&a",
    "*a",
    "!!x ",
    "\t",
    "\0",
    "\xe9",
    "=",
    ".",
]
PIECES += [
    "null",
    "true",
    "-1",
    "1e999",
    "9" * 30,
    "targets",
    "skip",
    "name: small\n",
    "nproc: 2\n",
    "until: 2026-99-99",
]
PIECES += ["[tool.fsdp2]\n", "[[tool.fsdp2.targets]]\n"]


@BOTH
def test_a_mangled_file_is_reported_as_wrong_or_read(
    tmp_path: Path, name: str, content: str
) -> None:
    """200 times something is cut out, put in or moved: never an error of another kind."""
    chance = random.Random(0)
    path = tmp_path / name
    wrong = 0
    for _ in range(200):
        text = content
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(text) + 1)
            end = min(len(text), start + chance.choice([0, 0, 1, 5, 40]))
            text = text[:start] + chance.choice(PIECES) + text[end:]
        path.write_text(text)
        try:
            for entry in read(path, TODAY):
                assert isinstance(entry.policy, Policy)
        except UserError as error:
            wrong += 1
            assert str(error).startswith(str(path))
    assert 100 < wrong < 200


def test_one_configuration_a_folder(repository: Path) -> None:
    assert config_in(repository) is None
    (repository / PYPROJECT).write_text("[project]\nname = 'fsdp2'\n")
    assert config_in(repository) is None, "no table of ours"
    with pytest.raises(UserError, match=r"no table \[tool\.fsdp2\]"):
        read(repository / PYPROJECT)
    (repository / PYPROJECT).write_text("[tool.fsdp2]\nnproc = 4\n")
    assert config_in(repository) == repository / PYPROJECT
    (repository / "verify.yaml").write_text("nproc: 4\n")
    with pytest.raises(UserError, match="keep one"):
        config_in(repository)


def test_the_schema_is_draft_7_names_every_key_and_is_printed(command: Command) -> None:
    jsonschema.Draft7Validator.check_schema(FORM.root)
    definitions = FORM.root["definitions"]
    of_target = set(definitions["one_target"]["properties"]) - {"name", "folder"}
    assert of_target == set(FORM.root["properties"]) - {"targets"}
    for name, part in definitions.items():
        if name not in ("one_target", "one_skip", "widening"):
            assert part["description"]
            for example in part["examples"]:
                jsonschema.Draft7Validator(part | {"definitions": definitions}).validate(example)
    assert of_target == {
        *FLAGS,
        "script",
        "args",
        "required",
        "tolerances",
        "skip",
    }, "the same keys as the flags"
    assert json.loads(command("spec", "schema", "--verify", code=0).out) == FORM.root


def test_limits_that_can_be_widened_are_those_that_are_worked_out() -> None:
    asked = set()
    for name, rule in RULES.items():
        source = " ".join(inspect.getsource(cls) for cls in type(rule).__mro__[:2])
        source = " ".join(source.split())
        parity = rule.family == "parity" and " judge_against(" in source
        if parity or "evidence.times(" in source or "limits(evidence, self.name)" in source:
            asked.add(name)
    assert set(FORM.root["definitions"]["tolerances"]["properties"]) == asked


def skip(rule: str, over: bool = False) -> Skip:
    location = Place(file="/w/verify.yaml", line=3, function="skip", code=f"- rule: {rule}")
    return Skip(rule, "a reason", "2026-11-20", over, location, column=5)


OPEN = Finding("matches-ddp", "inconclusive", "no oracle")
FINE = Finding("optim-before-shard", "pass", "all of them")


@cases(
    "required, expected",
    *((required, "inconclusive") for required in ((), ("matches-ddp",), ("parity",))),
    (("optimizer",), "pass"),
)
def test_only_required_rules_must_be_decided(required: tuple[str, ...], expected: str) -> None:
    found = apply_policy(verdict(OPEN, FINE), Policy(required=required), ())
    assert found.verdict == expected
    loud = "NOT CHECKED, and not required: matches-ddp\nverdict: pass\n"
    assert text.render(found).endswith(loud) == (expected == "pass")
    assert (
        apply_policy(verdict(replace(OPEN, status="fail")), Policy(required=required), ()).verdict
        == "fail"
    )


def test_a_skip_that_is_over_fails_and_the_rule_is_judged_again() -> None:
    policy = Policy(skips=(skip("parity", over=True), skip("clipping")))
    assert policy.skipped == ["clipping"]
    found = apply_policy(verdict(FINE, Finding("unused-suppression", "pass", "none")), policy, ())
    assert found.verdict == "fail"
    (late,) = [f for f in found.findings if f.rule == "unused-suppression"]
    assert late.status == "fail" and all(
        w in late.evidence for w in ("parity", "2026-11-20", "(a reason)")
    )
    assert late.location == skip("parity").location


def test_what_is_skipped_stands_in_the_reports() -> None:
    found = apply_policy(
        verdict(FINE), Policy(skips=(skip("parity"),)), ["matches-ddp", "root-only-wrap"]
    )
    assert json_report.as_dict(found)["skipped"] == [
        {"rule": "matches-ddp", "reason": "a reason", "until": "2026-11-20"},
        {"rule": "root-only-wrap", "reason": "option --skip", "until": None},
    ]
    shown = text.render(found, verbose=True)
    assert "skip matches-ddp\n     skipped: a reason (until 2026-11-20)" in shown
    assert "skip root-only-wrap\n     skipped: option --skip" in shown
    assert found.verdict == "pass"


def test_a_widened_limit_is_reported_first_and_skipped_and_required_is_refused() -> None:
    evidence = Evidence(tolerances={"matches-ddp": Widening(2.5, "a sum in another order")})
    compared = Finding("matches-ddp", "pass", "5 steps", measured=1.0, limit=2.0)
    shown, fine, left_open = widened([compared, FINE, OPEN], evidence)
    assert "2.5 times: a sum in another order" in shown.evidence and shown.evidence.endswith(
        "5 steps"
    )
    assert fine is FINE and left_open is OPEN
    with pytest.raises(UserError, match=r"verify\.yaml:3:5: parity is "):
        Policy(skips=(skip("parity"),), required=("parity",))


IN_FORCE = str(datetime.date.today() + datetime.timedelta(30))  # a test may run over midnight
SHORT = EVERYTHING.replace("2026-11-21", IN_FORCE).replace("2026-11-20", IN_FORCE)


def test_the_command_verifies_all_targets_and_the_worst_counts(
    repository: Path, command: Command
) -> None:
    (repository / "verify.yaml").write_text(SHORT)
    shown = command(
        "verify",
        "--tier",
        "static",
        "--report",
        "json=out/{target}.json",
        "--report",
        "text",
        code=4,
    ).out
    assert shown.index("target small") < shown.index("target large")
    reports = {path.name: json.loads(path.read_text()) for path in (repository / "out").iterdir()}
    assert set(reports) == {"small.json", "large.json"}
    for report in reports.values():
        jsonschema.validate(report, REPORT)
        assert (report["verdict"], report["facts"]["sources"]["files"]) == (
            "inconclusive",
            1,
        ), "these hold no training"
    assert (reports["large.json"]["skipped"][0]["rule"], reports["small.json"]["skipped"]) == (
        "root-only-wrap",
        [],
    )
    (repository / "verify.yaml").write_text(
        SHORT.replace(f"until: {IN_FORCE}\n", "until: 2020-01-01\n")
    )
    command("verify", "--tier", "static", code=1)
    command("verify", "--tier", "static", "--target", "small", code=4)
    (repository / "one.py").write_text((FAULTS / "optim_before_shard.py").read_text())
    (repository / "verify.yaml").write_text(SHORT)
    command("verify", "--tier", "static", code=1)


def test_a_target_that_this_machine_refuses_is_open_and_the_others_are_verified(
    repository: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (repository / "verify.yaml").write_text(SHORT)
    verify = pipeline._launched

    def refusing(one: pipeline.Verification, python: str) -> Verdict:
        if one.target.name == "small":
            raise MachineRefuses("too few devices")
        return verify(one, python)

    monkeypatch.setattr(pipeline, "_launched", refusing)
    said = command("verify", "--tier", "static", code=4)
    assert "too few devices" in said.err and "target large" in said.out
    assert "NO RANKS WERE JUDGED, only the static tier" in said.out


@cases(
    "given, message",
    (["--json"], "several json reports cannot share stdout"),
    (["--report", "json=out.json"], "several targets need {target} in the path"),
    (["--target", "none"], "no such target"),
)
def test_reports_of_several_targets_do_not_meet(
    repository: Path, command: Command, given: list[str], message: str
) -> None:
    (repository / "verify.yaml").write_text(SHORT)
    assert message in command("verify", *given, code=2).err


@pytest.mark.full
@pytest.mark.launch
def test_a_policy_in_a_real_verification(repository: Path, command: Command) -> None:
    """How this script saves is not shown: its open rules are not required, and one limit is
    wider.
    """
    day = datetime.date.today()
    never_called = (
        "\n\ndef keep(model):\n    torch.save(model.state_dict(), 'x')\n    torch.load('x')\n"
    )
    written(repository, (ZOO / "minimal.py").read_text(encoding="utf-8") + never_called)
    (repository / "verify.yaml").write_text(
        "script: train.py\n"
        "required: [optimizer, wrapping]\n"
        "tolerances: {matches-ddp: {times: 50, reason: because}}\n"
        f"skip:\n  - {{rule: clipping, reason: it does not clip, until: {day}}}\n"
    )
    report = command("verify", "--json", code=0).data
    findings = {f["rule"]: f for f in report["findings"]}
    assert report["verdict"] == "pass" and findings["resume-is-exact"]["status"] == "inconclusive"
    assert not findings["resume-is-exact"]["required"]
    wide, plain = findings["matches-ddp"], findings["matches-single-process"]
    assert "50 times: because" in wide["evidence"]
    assert wide["limit"] > plain["limit"] > 0 and not plain["evidence"].startswith("[")
    assert {s["rule"] for s in report["skipped"]} == {
        n for n, rule in RULES.items() if rule.family == "clipping"
    }
    assert not set(findings) & {s["rule"] for s in report["skipped"]}


def test_the_configurations_of_the_documents_are_read(tmp_path: Path) -> None:
    path = tmp_path / "verify.yaml"
    found = [
        text
        for where, text in blocks("yaml")
        if where.startswith("verify-project.md") and "script:" in text
    ]
    found = [text for text in found if "image:" not in text]
    assert len(found) == 3
    said: set[str] = set()
    for one in found:
        path.write_text(one)
        for entry in read(path, TODAY):
            said |= set(entry.values)
    assert said >= {*FLAGS, "skip", "required", "tolerances"} - {
        "module",
        "oversubscribe",
        "reference",
    }
    page = (Path(__file__).parents[2] / "references" / "verify-project.md").read_text()
    for rule in FORM.root["definitions"]["tolerances"]["properties"]:
        assert rule in page[page.index("- `tolerances`") : page.index("- `skip`")]
