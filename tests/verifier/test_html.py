"""The page: sound HTML that loads nothing, in which whatever a script says is text, never longer
than it may be.
"""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from records import cases, micro, model, parameter, run, step, stepped, wrap
from scripts import python
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import RENDERERS, html, html_plots, html_tables, json_report
from verified_fsdp2.verifier.report.facts import facts, summary
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import Place
from verified_fsdp2.verifier.verdict import Comparison, Verdict, verdict_of

VOID = {"meta", "br", "hr", "img", "input", "link"}
PLACE = Place(file="/a/train.py", line=7, function="main", code="opt = AdamW(...)")
TARGET = {"script": "/a/train.py", "command": "fsdp2 verify train.py", "cwd": "/a", "nproc": 2}
ENVIRONMENT = {
    "torch": "2.13.0",
    "python": "3.11",
    "platform": "Linux",
    "backend": "gloo",
    "notes": [],
}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>' onmouseover='alert(1)",
    "<!-- --> ]]> <svg onload=alert(1)> &lt;script&gt; {{ 7 * 7 }} {% raw %}",
    "\x1b[31mFAIL\x1b[0m \x00 \x07 \x9b \x7f",
    "\u202eesrever\u202c \u2066isolated\u2069 \u200bno width \ufeff",
    "\ud800 alone \udfff",
    "x" * 1_000_000,
]


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.wrong.append(f"{tag} has an attribute twice")
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, *names: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag in names]


def sound(text: str) -> Page:
    """The page, after what holds for every one of them."""
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert (page.open, page.wrong) == ([], [])
    assert len(page.all("h1")) == 1 and len(page.all("main")) == 1
    assert not page.all("script", "link", "img", "iframe", "object", "form", "base", "image")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "src"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        for name in ("href", "aria-labelledby"):
            targets = attributes.get(name, "").removeprefix("#").split()
            assert set(targets) <= set(ids), (tag, attributes)
    for reference in re.findall(r"url\(([^)]*)\)", text):
        assert reference.removeprefix("#") in ids
    assert "@import" not in text
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels)), levels
    for attributes in page.all("svg"):
        assert attributes["role"] == "img" and attributes["aria-labelledby"]
    assert len(page.all("table")) == len(page.all("caption"))
    assert all(attributes["scope"] in ("row", "col") for attributes in page.all("th"))
    scrolled = [a for a in page.all("div") if a.get("class") == "scroll"]
    assert all(
        a["tabindex"] == "0" and ("aria-labelledby" in a or "aria-label" in a) for a in scrolled
    )
    return page


def trained(names: list[str], role: str = "train", loss: float = 0.0, steps: int = 3) -> Run:
    records: list[dict[str, Any]] = [model(*(parameter(name) for name in names)), wrap([0, 1])]
    memory = {"kind": "memory", "parameters": 64, "gradients": 64, "optimizer": 128}
    for number in range(1, steps + 1):
        grads = {name: [1.0, 0.5, 0.0, 0.0, 0.0] for name in names}
        moved = {name: [0.01, -0.1, 8.0] for name in names}
        after = {name: [1.0, 0.9 / number, 0.0, 0.0, 0.0] for name in names}
        records += [
            micro(number, 3.0 - 0.5 * number + loss),
            step(
                number, grads, weights={name: [1.0, 1.0 / number, 0.0, 0.0, 0.0] for name in names}
            ),
            stepped(number, weights=after, moved=moved),
            {**memory, "before": 200 << 20, "peak": 300 << 20, "cuda": None},
        ]
    counted = {"all_gather": [2, 1024], "reduce_scatter": [1, 512]}
    expected = {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 0}
    traffic = {
        "kind": "traffic",
        "step": steps,
        "calls": 2,
        "model": counted,
        "script": {},
        "expected": expected,
    }
    return run([*records, traffic], records, role=role, seconds=1.0)


def verdict(
    *findings: Finding, names: list[str] | None = None, evidence: Evidence | None = None
) -> Verdict:
    if evidence is None:
        names = names or ["w", "b.weight"]
        made = trained(names)
        nudged, oracle = trained(names, "perturbed", 1e-6), trained(names, "reference", 1e-3)
        evidence = Evidence(train=made, full_precision=made, reference=oracle, perturbed=nudged)
    found = [*findings, Finding("held", "pass", "all well", measured=0.5, limit=1.0)]
    runs = [summary(one) for one in evidence.runs]
    return Verdict(
        verdict_of(found),
        TARGET,
        ENVIRONMENT,
        runs,
        found,
        facts(evidence, Path("/work"), gpus=False),
        seconds=2.0,
    )


def test_the_page_of_a_failure() -> None:
    cause = Finding("a-rule", "fail", "it broke", 2.0, 1.0, PLACE, "fix it")
    effect = Finding("an-effect", "fail", "so this broke", consequence=True)
    text = html.render(verdict(cause, effect, Finding("b-rule", "inconclusive", "undecided")))
    page = sound(text)
    said = " ".join("".join(page.text).split())
    order = ["fail", "a-rule", "it broke", "train.py:7 in main", "opt = AdamW(...)", "fix it"]
    order += [
        "fsdp2 explain a-rule",
        "so this broke",
        "undecided",
        "b-rule",
        "all well",
        "Loss of each step",
    ]
    order += [
        "Difference of the loss",
        "2 of 2 parameters are sharded",
        "S(0)",
        "300.0 MiB",
        "all_gather",
        "platform",
    ]
    at = [said.index(part) for part in order]
    assert at == sorted(at), dict(zip(order, at, strict=True))
    assert len(page.all("svg")) == 4 and "://" not in text


def test_what_a_team_left_out_is_reported() -> None:
    open_ = Finding("b-rule", "inconclusive", "undecided", required=False)
    skipped = [{"rule": "c-rule", "reason": "one layer", "until": "2030-01-01"}]
    made = replace(verdict(open_), verdict="pass", skipped=skipped)
    said = "".join(sound(html.render(replace(made, target={**TARGET, "name": "pretrain"}))).text)
    assert (
        "b-rule (not required)" in said
        and "one layer" in said
        and "2030-01-01" in said
        and "pretrain: " in said
    )


def test_what_does_not_apply_has_a_section_of_its_own() -> None:
    nothing = Finding("d-rule", "not_applicable", "no checkpoint is saved")
    made = verdict(nothing)
    assert made.verdict == "pass"
    found = html_tables.tables(json_report.as_dict(made))
    assert found["not_applicable"].rows == [["d-rule", "no checkpoint is saved"]]
    assert [row[0] for row in found["passes"].rows] == ["held"]
    said = "".join(sound(html.render(made)).text)
    assert "1 rule passed" in said and "1 rule not applicable" in said
    alone = "".join(sound(html.render(replace(made, findings=[nothing]))).text)
    assert "Nothing was checked" in alone and "1 rule not applicable" in alone


def test_beside_an_earlier_report() -> None:
    new, known = (Finding(f"{name}-rule", "fail", "x", location=PLACE) for name in ("new", "known"))
    made = verdict(new, known)
    held = Comparison(
        "old.json", (new,), (known,), (replace(new, rule="gone-rule", location=None),), ()
    )
    said = " ".join("".join(sound(html.render(replace(made, baseline=held))).text).split())
    assert "old.json" in said and "fail: 1 new failure, 1 known, 1 gone" in said
    rows = html_tables.tables(json_report.as_dict(replace(made, baseline=held)))["baseline"].rows
    assert [row[0] for row in rows] == ["new-rule", "known-rule", "gone-rule"]


def test_what_was_not_seen_is_left_out() -> None:
    call = {
        "callee": "<lib>.go",
        "file": "a.py",
        "line": 3,
        "kind": "outside the project",
        "reason": "lib",
        "calls": 2,
    }
    counts = {
        "files": 1,
        "functions": 7,
        "calls_not_followed": 2,
        "without_training": 0,
        "training_required": True,
    }
    sources = {**counts, "rules": [], "not_followed": [call], "suppressed": []}
    environment = {"torch": "not imported", "python": "3.11", "platform": "Linux"}
    lint = Verdict(
        "no_findings", {"script": "a.py", "files": 1}, environment, (), [], {"sources": sources}
    )
    page = sound(html.render(lint))
    assert "7 followed functions" in "".join(page.text) and "<lib>.go" in "".join(page.text)
    assert not page.all("svg")
    assert re.findall(r'<h2 id="(\w+)"', html.render(lint)) == ["unfollowed", "environment"]
    broken = Run("train", 2, ())
    sound(
        html.render(
            verdict(Finding("run-completes", "fail", "died"), evidence=Evidence(train=broken))
        )
    )


@pytest.mark.parametrize(
    "text", HOSTILE, ids=["tag", "attribute", "markup", "control", "bidi", "surrogate", "long"]
)
def test_what_a_script_says_is_text(text: str) -> None:
    made = verdict(
        Finding(
            "a-rule",
            "fail",
            text,
            location=Place(file=text[:5000], line=1, function=text, code=text),
            fix=text,
        ),
        Finding("b-rule", "inconclusive", text),
        Finding("c-rule", "pass", text),
        names=[text, "w"],
    )
    target = {**TARGET, "script": text, "command": text, "cwd": text[:5000], "args": text}
    runs = [{**one, "command": text, "note": text} for one in made.runs]
    page_text = html.render(
        replace(
            made,
            target=target,
            runs=runs,
            environment={**ENVIRONMENT, "notes": [text], "torch": text},
        )
    )
    page_text.encode("utf-8")
    page = sound(page_text)
    assert len(page_text.encode()) <= html.LIMIT
    assert "<script" not in page_text and "<img" not in page_text
    assert all(c.isprintable() or c in "\n\t" for c in page_text), "a character that does not print"
    begin = html._visible(50, str.__class__)(text)[:40]  # as it is to be read
    assert "".join(page.text).count(begin) > 5
    uneven = {**made.facts["shards"][0], "name": text, "elements": [16, 0]}
    sound(html.render(replace(made, facts={**made.facts, "shards": [uneven] * 3})))


@cases(
    "elements, columns, cells",
    ([[8, 8], [4, 4]], ["Each of 2 ranks"], [["8"], ["4"]]),
    ([[8, 0], [4, 4]], ["Rank 0", "Rank 1"], [["8", "0"], ["4", "4"]]),
    ([[8, None]], ["Rank 0", "Rank 1"], [["8", None]]),
    ([[8000] * 8 + [None]], ["Least on a rank", "Most on a rank"], [["8,000", "8,000"]]),
    ([[8]], ["Rank 0"], [["8"]]),
)
def test_the_shard_table(
    elements: list[list[int | None]], columns: list[str], cells: list[list[str | None]]
) -> None:
    shard = verdict().facts["shards"][0]
    facts_ = {
        "ranks": list(range(len(elements[0]))),
        "shards": [{**shard, "elements": e} for e in elements],
    }
    table = html_tables._shards({"facts": facts_})
    assert [title for title, _ in table.columns[5:]] == columns
    assert [row[5:] for row in table.rows] == cells
    assert table.rows[0][:5] == ["w", "4 x 4", "float32", "S(0)", "(root)"]


def test_what_was_found_in_a_checkpoint() -> None:
    one = {
        "path": "p",
        "after_step": 3,
        "op": "save",
        "ranks": 2,
        "tensors": 9,
        "wrong": 0,
        "error": None,
    }
    states: list[dict[str, Any]] = [
        {"state": "opened"},
        {"state": "opened", "wrong": 2},
        {"state": "gone"},
    ]
    states += [{"state": "closed", "error": "no .metadata"}]
    table = html_tables._saved({"facts": {"checkpoints": [{**one, **state} for state in states]}})
    cells = [row[-1] for row in table.rows]
    assert (
        len(set(cells)) == 4
        and cells[1].startswith("2 tensors")
        and cells[3].endswith("no .metadata")
    )


def test_a_large_model_and_many_runs_fit() -> None:
    names = [f"model.layers.{k // 9}.self_attention.block_{k % 9}.weight" for k in range(2_000)]
    base = verdict(names=["w"])
    shard = base.facts["shards"][0]
    many = [
        {**shard, "name": name, "shape": [4096, 14336], "elements": [7340032] * 8} for name in names
    ]
    facts_ = {**base.facts, "shards": many, "ranks": list(range(8))}
    runs = [
        {**base.runs[k % 3], "losses": [1.0 / s + 1e-3 * k for s in range(1, 101)]}
        for k in range(100)
    ]
    findings = [
        replace(base.findings[0], rule=f"rule-{k}", evidence="word " * 200) for k in range(150)
    ]
    text = html.render(replace(base, facts=facts_, runs=runs, findings=findings))
    page = sound(text)
    assert len(text.encode()) <= html.LIMIT
    said = "".join(page.text)
    assert all(name in said for name in names) and "rule-149" in said
    assert "84 more" in said and "60 more steps" in said
    assert len(RENDERERS["json"](replace(base, facts=facts_)).encode()) < 2_000_000


def test_more_than_fits_is_cut_and_says_so() -> None:
    many = [
        Finding("a-rule", "fail", f"{k} " + "<" * 5_000, location=PLACE, fix="fix")
        for k in range(900)
    ]
    text = html.render(verdict(*many))
    assert len(text.encode()) <= html.LIMIT
    assert (
        "more are in <code>--report json=PATH" in text
        and "more characters; --report json=PATH has all" in text
    )
    sound(text)


@pytest.mark.parametrize(
    "losses", [[0.0, 0.0], [-1e300, 1e300], [5e-324, 1e-310], [7.0], [None, 1e-30]], ids=str
)
def test_any_numbers_can_be_drawn(losses: list[float | None]) -> None:
    made = verdict()
    runs = [{**one, "losses": losses, "grad_norms": losses} for one in made.runs]
    allowed = {"loss": 0.0, "grad_norm": None}
    comparisons = [
        {**made.facts["comparisons"][0], "loss": losses, "grad_norm": losses, "allowed": allowed}
    ]
    page = sound(
        html.render(replace(made, runs=runs, facts={**made.facts, "comparisons": comparisons}))
    )
    assert len(page.all("svg")) == 4


def test_curves_need_no_package(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from verified_fsdp2.verifier.report import"
        " html_plots as p; "
    )
    run_ = {"role": "train", "world_size": 2, "losses": [2.0, 1.0], "grad_norms": [1.0]}
    code += f"print(len(p.figures({{'runs': [{run_}], 'facts': {{}}}})))"
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout == "2\n" and not list(tmp_path.iterdir())


def test_curves_have_the_colours_of_the_page() -> None:
    text = html.render(verdict())
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{3,6}", drawn) and "font-size" not in drawn
    for page in (text, text[text.index("prefers-color-scheme: dark") :]):
        assert all(f"{name}: #" in page for name in set(re.findall(r"var\((--line-\d)\)", drawn)))


def test_points_stand_where_their_values_are() -> None:
    svg = html_plots.figures(json_report.as_dict(verdict()))[0]["svg"]
    first = re.findall(r'<polyline [^>]*points="([^"]*)"', svg)[0].split()
    (left, high), (_, middle), (right, low) = (
        tuple(map(float, point.split(","))) for point in first
    )
    assert (left, right) == (html_plots.LEFT, html_plots.RIGHT)
    ticks = {
        text: float(y) - 4
        for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', svg)
    }
    assert [high, middle, low] == [ticks[text] for text in ("2.5", "2", "1.5")]
    assert html.render(verdict()) == html.render(verdict())


def test_differences_are_those_that_the_rules_judge() -> None:
    (found,) = [c for c in verdict().facts["comparisons"] if c["rule"] == "matches-ddp"]
    assert found["loss"] == pytest.approx(
        [1e-3 / (2.5 + 1e-3)] * 3
    )  # on the scale of the largest loss
    assert found["allowed"]["loss"] > 0.0
    assert json_report.as_dict(verdict())["runs"][found["oracle"]]["role"] == "reference"
