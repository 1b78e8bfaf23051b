"""What a verdict proved and left out: the two first lines, in every format, and what a team
requires.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_formats import valid, verdict
from test_horizon import survey
from test_laws import of
from torch import nn

from records import LINE, Recorder, cases, micro, model, run, step, stepped
from verified_fsdp2.verifier.analysis.coverage import OnePart, coverage
from verified_fsdp2.verifier.config.option import Option
from verified_fsdp2.verifier.config.parts import PARTS
from verified_fsdp2.verifier.config.policy import Policy
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.config.verify_file import FORM
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding, Uncovered
from verified_fsdp2.verifier.judge import apply_policy
from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.events.compiled import install
from verified_fsdp2.verifier.report import RENDERERS
from verified_fsdp2.verifier.report.assemble import assemble
from verified_fsdp2.verifier.report.brief import brief
from verified_fsdp2.verifier.report.github import summary
from verified_fsdp2.verifier.report.proved import headline
from verified_fsdp2.verifier.report.text import render
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace.events import Place
from verified_fsdp2.verifier.verdict import Verdict, verdict_of

DONE = {"done": True, "there": True, "tried": "", "file": None, "line": None, "option": ""}
PARTS_DONE = dict.fromkeys(PARTS, DONE)
ACCUMULATION = {**DONE, "done": False, "file": "/a/repo/train.py", "line": 88, "option": "--accum"}
CPU = {"gpu": {**DONE, "done": False, "there": False}}


def compared(*findings: Finding, lines: Any = (), **changes: Any) -> Verdict:
    """A verdict with coverage: steps 1 to 9 of 120 on 2 ranks, 1 and 4, without accumulation."""
    parts = {**PARTS_DONE, **CPU, "accumulation": ACCUMULATION}
    found = {"steps": [[1, 9]], "one_process": None, "made": 120, "whole": True}
    facts = {"coverage": {**found, "ranks": [2, 1, 4], "parts": parts, **changes}}
    if lines:
        facts["horizon"] = {"steps": 120, "ended": True, "seconds": 30.0, "lines": list(lines)}
    made = verdict(*(findings or (Finding("matches-ddp", "pass", "agrees"),)))
    return replace(made, facts=facts)


@cases(
    "changes, expected",
    ({}, "pass: steps 1-9 of 120, on 2 ranks, 1, 4; CPU"),
    ({"whole": False}, "pass: steps 1-9 of 120 or more, on 2 ranks, 1, 4; CPU"),
    ({"made": 0}, "pass: steps 1-9 of an unknown number (no run made all), on 2 ranks, 1, 4; CPU"),
    ({"observed": 120}, "pass: steps 1-9 of 120, on 2 ranks, 1, 4; CPU; observed: all 120 steps"),
    (
        {"observed": 120, "whole": False},
        "pass: steps 1-9 of 120 or more, on 2 ranks, 1, 4; CPU; observed: 120 steps",
    ),
    ({"observed": 9, "made": 9}, "pass: steps 1-9 of 9, on 2 ranks, 1, 4; CPU"),
    ({"steps": [[1, 9], [31, 33], [120, 120]]}, "pass: steps 1-9, 31-33 and 120 of 120, on"),
    ({"parts": PARTS_DONE, "ranks": [1]}, "pass: steps 1-9 of 120, on 1 rank; GPU"),
)
def test_the_first_line(changes: dict[str, Any], expected: str) -> None:
    first = headline(compared(**changes))[0]
    assert first.startswith(expected)
    assert ("observed" in first) == ("observed" in expected)


def test_the_first_line_of_a_verdict_that_is_none_of_a_pass() -> None:
    failed = [Finding("matches-ddp", "fail", "differs", consequence=True)]
    failed += [Finding(name, "fail", "built early") for name in ("optim-before-shard", "b")]
    assert headline(compared(*failed))[0].startswith("fail: optim-before-shard and 1 more; steps 1")
    unsure = Finding("matches-ddp", "inconclusive", "not finite")
    first = headline(compared(unsure))[0]
    assert first.startswith("inconclusive: matches-ddp could not be judged; steps 1-9")


def test_the_second_line() -> None:
    lines = [
        {"file": "/a/repo/train.py", "first": 41, "last": 43, "code": "if c:", "after_step": None},
        {"file": "/a/repo/train.py", "first": 50, "last": 50, "code": "if d:", "after_step": 89},
    ]
    made = compared(
        Finding("ending-same-in-one-process", "not_covered", "no end", part="the end"),
        Finding("no-sync-idiom", "not_covered", "one micro-batch", part="accumulation"),
        lines=lines,
        one_process=5,
    )
    second = headline(made)[1]
    assert "accumulation (" in second and "train.py:88, --accum)" in second
    assert "if c: (" in second and "train.py:50, after step 89)" in second
    assert second.endswith(", one process after step 5, steps 10-120, the end")
    assert len(headline(compared(parts=PARTS_DONE, made=9))) == 1


@pytest.mark.parametrize("format", ["text", "github", "html", "json"])
def test_errors_that_were_caught_are_named(format: str) -> None:
    error = {"step": 36, "file": "/a/repo/train.py", "line": 88, "text": "rank 1: OSError: late"}
    made = compared(caught=[error], made=9, parts=PARTS_DONE)
    assert "not covered: an error caught in step 36 (" in headline(made)[1]
    text = RENDERERS[format](made)
    assert "rank 1: OSError: late" in text
    valid(format, text)


def test_sides_of_expressions_take_little_room() -> None:
    at = {"file": "/a/repo/train.py", "last": 41, "after_step": None, "code": "y = 1 if x else 2"}
    sides = (
        "`rate(x) * world` of `rate(x) * world if x else 1`",
        "`x` of `x or z`",
        "`z` of `x or z`",
    )
    lines = [{**at, "first": 41, "side": one} for one in sides[:2]]
    lines.append({**at, "first": 50, "side": sides[2]})
    second = headline(compared(lines=lines, made=9, parts=PARTS_DONE))[1]
    assert second.count("train.py:41") == 1 and "`rate(x) * world` (" in second
    assert "`z` of `x or z` (" in second


@pytest.mark.parametrize("done", [False, True])
def test_what_checkpoint_has_said_stands_behind(done: bool) -> None:
    at = {"file": "/a/repo/train.py", "last": 60, "after_step": None}
    lines = [
        {**at, "first": 40, "code": "if args.resume:"},
        {**at, "first": 60, "code": "if world:"},
    ]
    parts = {**PARTS_DONE, "checkpoint": {**PARTS_DONE["checkpoint"], "done": done}}
    second = headline(compared(lines=lines, made=9, parts=parts))[1]
    assert (second.index("if world") < second.index("if args.resume")) != done


def test_a_part_stands_at_the_branch_that_its_option_leaves_out() -> None:
    branch = {"file": "/a/repo/train.py", "first": 90, "last": 91, "after_step": None}
    lines = [{**branch, "code": "if args.accum > 1:"}, {**branch, "code": "if accumulate:"}]
    assert headline(compared(lines=lines, made=9))[1].count("train.py:90") == 2
    second = headline(compared(lines=lines[:1], made=9))[1]
    assert second.startswith("not covered: accumulation (") and second.count("(") == 1
    # or that leads to its line, and names it
    around = {**branch, "first": 86, "code": "if self.config.accumulation:"}
    for one, shown in ((around, 1), ({**around, "first": 89}, 2), ({**around, "code": "if x:"}, 2)):
        assert headline(compared(lines=[one], made=9))[1].count("(") == shown
    both = headline(
        compared(lines=[{**branch, "code": "if accum:", "first": 1, "last": 2}, around])
    )
    assert "accumulation (" in both[1] and "train.py:86, --accum)" in both[1]


@pytest.mark.parametrize("surveyed", [True, False])
def test_that_no_survey_run_made_a_step(surveyed: bool) -> None:
    made = compared(made=0)
    runs = [{"role": "train"}, *([{"role": "survey"}] if surveyed else [])]
    second = headline(replace(made, runs=runs))[1]
    assert second.startswith("not covered: later steps and branches (")
    assert ("the survey run made no step" in second) == surveyed


@cases(
    "changes, expected",
    ({"file": None, "line": None}, "accumulation (--accum)"),
    ({"file": None, "line": None, "option": ""}, "accumulation"),
    ({"tried": "on 4 ranks: the run stopped"}, "accumulation (on 4 ranks: the run stopped)"),
    ({"done": True, "tried": "it stopped"}, "accumulation (it stopped)"),
    ({"there": False}, "steps 10-120"),
)
def test_what_is_known_of_a_part(changes: dict[str, Any], expected: str) -> None:
    parts = {**PARTS_DONE, "accumulation": {**ACCUMULATION, **changes}}
    second = headline(compared(parts=parts))[1]
    assert second.partition(", steps")[0] == f"not covered: {expected}"


@pytest.mark.parametrize("format", ["text", "github"])
def test_a_branch_is_named_once(format: str) -> None:
    branch = {"file": "/a/repo/train.py", "last": 91, "after_step": None}
    code = "if args.part{} and a_condition_of_some_length_that_fills_a_line:"
    lines = [{**branch, "first": 80 + n, "code": code.format(n)} for n in range(5)]
    made = compared(lines=lines, made=9)
    text = summary(made) if format == "github" else RENDERERS[format](made)
    second, below = text.split("NOT RUN")
    assert [f"args.part{n} " in second for n in range(5)] == [True, True, False, False, False]
    assert [f"args.part{n} " in below for n in range(5)] == [False, False, True, True, True]
    assert all(f"args.part{n} " in render(made, verbose=True).split("NOT RUN")[1] for n in range(5))


PLACE = Place(file="/a/repo/train.py", line=7, function="main", code="x = 1")


@cases(
    "findings, lines",
    ([Finding("a", "pass", "fine")], []),
    ([Finding("b", "fail", "wrong", location=PLACE, fix="Do.")], ["FAIL b: wrong", "7 in", "fix "]),
    (
        [
            Finding("w", "fail", "odd", required=False),
            Finding("e", "fail", "so", consequence=True),
            Finding("b", "fail", "wrong"),
        ],
        ["FAIL b: wrong"],
    ),
    ([Finding("a", "pass", "x"), Finding("w", "fail", "odd", required=False)], ["WARNING w: odd"]),
    ([Finding("u", "inconclusive", "not finite")], ["NOT CHECKED u: not finite"]),
)
def test_a_terminal_has_the_first_lines_and_the_first_finding(
    findings: list[Finding], lines: list[str]
) -> None:
    made = compared(*findings)
    shown = brief(made).splitlines()
    assert [" ".join(shown[:2]).count(line) for line in headline(made)] == [1, 1]
    assert [part in line for part, line in zip(lines, shown[2:], strict=True)] == [True] * len(
        lines
    )


def test_which_steps_rules_saw() -> None:
    rank = [model(), step(), stepped()]
    evidence: Evidence = replace(of(rank, rank), survey=survey(total=6))
    passed = Finding("random-numbers-repeat", "pass", "never")
    for finding, seen in ((passed, 6), (Finding("matches-ddp", "pass", "agrees"), None)):
        made = assemble({}, Path("/w"), evidence, [], [finding], {})
        assert made.facts["coverage"].get("observed") == seen


@cases("status, ranks", ("pass", [2, 1]), ("fail", [2, 1]), ("inconclusive", [2]))
def test_one_process_counts_where_it_was_compared(status: Any, ranks: list[int]) -> None:
    rank = [model(), micro(), step(), stepped()]
    evidence: Evidence = replace(of(rank, rank), single=run(rank, role="single"))
    found = [Finding("matches-single-process", status, "x")]
    made = assemble({}, Path("/w"), evidence, [], found, {})
    assert made.facts["coverage"]["ranks"] == ranks


@pytest.mark.parametrize("format", sorted(RENDERERS))
def test_every_format_says_it(format: str) -> None:
    text = RENDERERS[format](compared())
    whole = " ".join(text.replace("&#39;", "'").split())
    assert "steps 1-9 of 120, on 2 ranks, 1, 4; CPU" in whole, whole[:2000]
    assert "not covered: accumulation (" in whole
    valid(format, text)


def test_what_no_run_did_is_no_obstacle_and_no_proof() -> None:
    passed = Finding("a", "pass", "fine")
    left = Finding("b", "not_covered", "no run saved", part="checkpoint")
    assert verdict_of([passed, left]) == "pass"
    assert verdict_of([left, Finding("c", "not_applicable", "none")]) == "inconclusive"


def test_a_reason_that_says_that_no_run_did_it() -> None:
    rule = RULES["resume-is-exact"]
    found = rule.unknown(Uncovered("give --resume-args", "resume"))
    assert (found.status, found.part) == ("not_covered", "resume")
    assert rule.not_applicable(Uncovered("no end", "the end")).status == "not_covered"
    assert rule.unknown("it stopped").status == "inconclusive"


@cases(
    "require, answer, evidence",
    ((), "pass", ""),
    (("bf16",), "pass", ""),
    (("accumulation",), "inconclusive", "train.py:88: give arguments with which the script does"),
    (("gpu",), "inconclusive", "--device cuda"),
    (("reshard",), "inconclusive", "reshard is required; on 1 rank: the run stopped"),
)
def test_what_a_team_requires(require: Any, answer: str, evidence: str) -> None:
    stopped = {**DONE, "done": False, "tried": "on 1 rank: the run stopped"}
    parts = {**PARTS_DONE, **CPU, "accumulation": ACCUMULATION, "reshard": stopped}
    made = apply_policy(compared(parts=parts), Policy(require=require), ())
    assert made.verdict == answer
    found = [f.evidence for f in made.findings if f.rule == "required"]
    assert len(found) == bool(evidence) and all(evidence in text for text in found)
    report = json.loads(valid("json", RENDERERS["json"](made)))
    assert report["verdict"] == answer


def test_a_required_rule_that_no_run_judged_is_inconclusive() -> None:
    left = Finding("resume-is-exact", "not_covered", "no run resumed", part="resume")
    made = compared(Finding("matches-ddp", "pass", "agrees"), left)
    assert apply_policy(made, Policy(), ()).verdict == "pass"
    assert apply_policy(made, Policy(required=("parity",)), ()).verdict == "inconclusive"


def test_the_option_adds_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "verify.yaml").write_text("require: [bf16]\n")
    target = resolve(tmp_path, {"require": "resume, checkpoint"})
    assert target.policy.require == ("bf16", "checkpoint", "resume")
    with pytest.raises(UserError, match="--require: expected some of checkpoint, "):
        resolve(tmp_path, {"require": "resumes"})


def test_the_schema_names_the_parts() -> None:
    named = FORM.root["definitions"]["require"]["items"]["enum"]
    assert tuple(named) == PARTS


TEXT = """
model.eval()
with torch.autocast("cuda", torch.bfloat16):
    for micro in range(args.accum):
        torch.compile(model)
pattern = re.compile("x")
"""


def having(sources: dict[str, str], *more: Any, **others: Any) -> dict[str, OnePart]:
    """The parts of a script with these sources, of which the train run recorded this, too."""
    rank = [model(), micro(), micro(), step(), stepped(), *more]
    made = replace(of(rank, rank), sources=Sources(sources, tuple(sources)), **others)
    found = coverage(made, gpus=False)
    assert found is not None and (found.last, found.ranks[0]) == (1, 2)
    return dict(found.parts)


def test_which_parts_the_sources_have_and_the_runs_did() -> None:
    parts = having({"t.py": TEXT})
    left = {name: part.line for name, part in parts.items() if part.left_out}
    assert left == {"bf16": ("t.py", 3), "compile": ("t.py", 5), "evaluation": ("t.py", 2)}
    assert parts["accumulation"].done and not parts["checkpoint"].done


def compiling(file: str, line: int, function: str, module: bool = False) -> dict[str, Any]:
    place = {"file": file, "line": line, "function": function, "code": ""}
    return {"kind": "compiled", "module": module, "at_line": place}


OWN = {
    "t.py": "from o import attend\ndef main():\n    model.compile()\nstep = torch.compile(make)\n",
    "o.py": "import torch, triton\n@torch.compile(fullgraph=True)\ndef f(x): ...\n"
    "attend = torch.compile(f)\ntriton.compile(f)\n",
}


@cases(
    "records, done",
    ([], False),
    ([compiling("t.py", 3, "main", module=True)], True),
    ([compiling("t.py", 4, "<module>")], True),
    ([compiling("o.py", 2, "<module>")], False),  # a decorator
)
def test_a_training_is_compiled_where_a_run_compiled_it(records: Any, done: bool) -> None:
    part = having(OWN, *records)["compile"]
    assert (part.done, part.left_out) == (done, not done)


class Session(Recorder):
    """With these lines of the user's, innermost first."""

    def __init__(self, *functions: str) -> None:
        super().__init__()
        stack = [replace(LINE, function=name) for name in functions]
        self.frames = SimpleNamespace(stack=lambda: stack)

    def first(self, key: str, most: int) -> bool:
        return True

    def around(self, target: str, before: Any) -> None:
        self.before = before


@cases(
    "what, functions, recorded",
    (nn.Linear(1, 1), ["main", "<module>"], [True]),
    (nn.Linear(1, 1).forward, ["main", "<module>"], [True]),
    (len, ["<module>"], [False]),
    (len, ["helper", "<module>", "<module>"], []),  # as a file of the project is imported
)
def test_what_is_compiled_is_recorded(what: Any, functions: Any, recorded: list[bool]) -> None:
    session = Session(*functions)
    install(session)  # type: ignore[arg-type]
    session.before(Call((what,), {}))
    assert [event.module for event in session.events] == recorded


def test_a_place_is_near_what_runs_reached() -> None:
    sources = {"t.py": "train(args)\n", "a.py": "def other(m):\n    m.eval()\n"}
    sources["b.py"] = "def unused(m):\n    m.eval()\ndef used(m):\n    step(m)\n    m.eval()\n"
    part = having(sources)["evaluation"]
    assert part.left_out and part.line is None
    assert having(sources, compiling("b.py", 4, "used"))["evaluation"].line == ("b.py", 5)
    assert having(sources, compiling("b.py", 9, "else"))["evaluation"].line == ("b.py", 2)
    # a survey run comes to all files that the script has
    reached = {"kind": "reached", "steps": 1, "lines": {"t.py": [1]}, "backwards": 1}
    surveyed = {"survey": run([{**reached, "stack": [LINE]}], role="survey")}
    assert not having(sources, **surveyed)["evaluation"].there
    sources["t.py"] += "ast.literal_eval(x), eval(y)\n"
    assert not having(sources, **surveyed)["evaluation"].there
    sources["t.py"] += "if args.eval:\n    launch_eval(args)\n"
    assert having(sources, **surveyed)["evaluation"].line == ("t.py", 4)


def test_what_a_survey_run_cannot_see_may_be_there() -> None:
    """The files of a library that the script drives are not followed."""
    sources = {"/p/scripts/t.py": "train(args)\n", "/p/scripts/other.py": "model.eval()\n"}
    lines = {"lines": {"/p/scripts/t.py": [1]}, "stack": [LINE]}
    reached = {"kind": "reached", "steps": 1, "backwards": 1, **lines}
    surveyed = {"survey": run([reached], role="survey")}
    assert not having(sources, **surveyed)["evaluation"].there
    part = having({**sources, "/p/trainer/t.py": "model.eval()\n"}, **surveyed)["evaluation"]
    assert part.there and part.line is None


def test_a_place_by_a_whole_name_comes_first() -> None:
    text = "torch.backends.cuda.allow_bf16_reduction = True\ndtype = torch.bfloat16\n"
    assert having({"t.py": text})["bf16"].line == ("t.py", 2)
    assert having({"t.py": text.splitlines()[0]})["bf16"].line == ("t.py", 1)


@cases(
    "part, named, others",
    (
        "evaluation",
        ["--eval", "--do-eval", "set:val_loss_every", "eval.every", "--run_val_every_n_steps"],
        ["--eval_packing", "--eval_dataset", "checkpoint.eval.every", "eval.name", "--val-tokens"],
    ),
    (
        "accumulation",
        ["--grad-accum", "set:gradient_accumulation_steps", "grad_acc_steps"],
        ["--accum-dtype"],
    ),
    ("bf16", ["--mixed-precision", "distributed.model_dtype"], ["--bf16-full-eval"]),
    ("compile", ["--no_compile", "distributed.compile"], ["--compile-backend"]),
)
def test_an_option_that_turns_a_part_on(part: Any, named: list[str], others: list[str]) -> None:
    switched = ("eval", "packing", "compile", "precision", "bf16")

    def offered(name: str) -> Option:
        flag = any(word in name for word in switched) and "every" not in name
        return Option(name, flag=flag, default="" if flag else "1")

    for name in named:
        options = (*map(offered, others), offered(name))
        assert having({"t.py": TEXT}, options=options)[part].option == name
    assert having({"t.py": TEXT}, options=tuple(map(offered, others)))[part].option == ""


def test_checkpoints_of_a_script_without_an_option_have_none_to_give() -> None:
    place = Place(file="t.py", line=2, function="main", code="torch.save(s, f)")
    without = having({"t.py": TEXT}, saving=place)
    assert without["checkpoint"].left_out and without["checkpoint"].option == ""
    save = {"kind": "checkpoint", "op": "torch.save", "after_step": 1, "to": "/w/e", "keys": []}
    saved = {"saving": place, "survey": run([model(), step(), stepped(), save], role="survey")}
    assert having({"t.py": TEXT}, **saved)["checkpoint"].left_out
    assert having({"t.py": TEXT}, save, saving=place)["checkpoint"].done
    loading = (replace(place, file="other.py"), replace(place, line=7))
    beside = having({"t.py": TEXT}, saving=place, loading=loading)
    assert [beside[name].line for name in ("checkpoint", "resume")] == [("t.py", 2), ("t.py", 7)]
    options = (Option("--save-every", default="5"), Option("--resume", default=""))
    parts = having({"t.py": TEXT}, saving=place, options=options)
    assert [parts[name].option for name in ("checkpoint", "resume")] == [
        "--save-args",
        "--resume-args",
    ]


def test_a_resume_that_stopped_is_named_with_its_ranks() -> None:
    rank = [model(), step(), stepped()]
    sizes = {2: [rank] * 2, 4: [[]] * 4, 1: [[]]}
    place = Place(file="t.py", line=2, function="main", code="torch.save(s, f)")
    runs = tuple(run(*ranks, role="reshard") for ranks in sizes.values())
    parts = having({"t.py": TEXT}, saving=place, reshards=runs, resume=run([], role="resume"))
    assert parts["reshard"].tried == "on 4 ranks and 1 rank: the run stopped"
    assert parts["resume"].tried == "the run stopped" and parts["reshard"].done
    left = having({"t.py": TEXT}, saving=place, reshards=runs[1:])["reshard"]
    assert left.tried and left.left_out
    assert having({"t.py": TEXT}, saving=place, reshards=runs[:1])["reshard"].done
