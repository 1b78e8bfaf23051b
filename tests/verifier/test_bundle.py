"""What leaves the user's machine with `fsdp2 report`: no source lines, folders or arguments, but
names and numbers.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from records import cases
from verdicts import verdict
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import json_report
from verified_fsdp2.verifier.report.bundle import bundle
from verified_fsdp2.verifier.report.without_code import without_code
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.lint import lint
from verified_fsdp2.verifier.trace.events import Line, Place

ROOT = Path(__file__).parents[2]
CODE = 'shutil.rmtree(out / "old")'
USER = Place(file="/home/jürgen/my run/train.py", line=7, function="main", code=CODE)
INNER = Line(file="/home/jürgen/my run/lib.py", line=3, function="save", code="del state['x']")


def of(evidence: str, location: Place | None = USER, **target: Any) -> dict[str, Any]:
    """The bundle of a report with one failure."""
    found = Finding(
        "matches-ddp", "fail", evidence, 2.0, 1.0, location, RULES["matches-ddp"].page()["Fix"]
    )
    made = verdict(found, root="/home/jürgen/my run", **target)
    report = json.loads(json_report.render(made))
    return bundle(report, report["findings"][0])


@cases(
    "text, expected",
    (
        'rank 1 raised OSError: x (`os.remove("a b")`); only',
        "rank 1 raised OSError: x (`...`); only",
    ),
    ("(`print(f'`{x}`')`) there", "(`...`) there"),
    ("`loss = model(x).sum()` at step 2", "`...` at step 2"),
    ("`batch['ids'][:4]` differs", "`...` differs"),
    (
        "one process was given `--batch-size 8`, the batch",
        "one process was given `--batch-size ...`, the batch",
    ),
    ("`fully_shard`, `main()`, `a.b.weight`, `--save-args`, `{checkpoint}` and `lr=0.1`", None),
    ("`fsdp2 plan` shows where; `fsdp2 verify a.py -- --x 1`", "`fsdp2 plan` shows where; `...`"),
    ("'layers.0.weight' is missing; \"dp\" is not", None),
    ("No such file: 'my data/a b.txt'", "No such file: '...'"),
    ("the ranks' loss isn't the other's", None),
    (
        'File "a.py", line 3, in main\n    x = secret()\nValueError: 1',
        'File "a.py", line 3, in main\n    ...\nValueError: 1',
    ),
    ("message:\n    model = Net()\nend", "message:\n    ...\nend"),
    ("in /home/me/run/train.py:7 main", "in train.py:7 main"),
    ("in src/train.py:7 and ../a/b/c.yaml", "in train.py:7 and c.yaml"),
    ("in /home/me and /Users/me, ~me/x/y", "in ~ and ~, y"),
    ("file:///srv/data/a.bin", "file://a.bin"),
    ("forward/backward, tokens/s, 3/4, S(0)/R, n/a", None),
    ("{checkpoint}/a.distcp has no `.grad` of `ema.shadow['norm.weight']`", None),
    ("grad.mul_(scale / norm(g)) scales", "grad.mul_(...) scales"),
    ("rank(s) of torch.Size([4, 4]) and set_requires_gradient_sync(False)", None),
)
def test_code_and_paths_are_left_out(text: str, expected: str | None) -> None:
    assert without_code(text, []) == (text if expected is None else expected)


def test_lines_that_the_report_quotes_are_left_out() -> None:
    place = replace(USER, library=INNER, through=[INNER], callers=[replace(INNER, code="run(cfg)")])
    found = of(f"{CODE} came before del state['x'] and run(cfg) in lib.py:3", place)
    text = json.dumps(found, ensure_ascii=False)
    assert not any(code in text for code in (CODE, "state['x']", "run(cfg)"))
    assert (found["finding"]["line"], found["finding"]["measured"]) == (3, 2.0)
    assert "lib.py:3" in found["finding"]["evidence"]


def test_folders_and_arguments_are_left_out() -> None:
    args = "--config Big_8b.yaml --seed 4 --mode train"
    found = of("Big_8b.yaml in /home/jürgen/my run/train.py:7: the train run at step 4", args=args)
    assert found["finding"]["evidence"] == "... in train.py:7: the train run at step 4"
    assert found["options"] == ["--config", "--mode", "--seed"]
    assert "jürgen" not in json.dumps(found, ensure_ascii=False)


@cases(
    "given, kind",
    ("fork", "fork"),
    ("ssh:me@gpu1,gpu2", "ssh"),
    ("srun --jobid 7 {worker}", "command"),
)
def test_of_the_launcher_its_kind_is_kept(given: str, kind: str) -> None:
    made = verdict(Finding("matches-ddp", "fail", "x"))
    report = json.loads(
        json_report.render(replace(made, environment={**made.environment, "launcher": given}))
    )
    assert bundle(report, report["findings"][0])["environment"]["launcher"] == kind


def test_the_fix_of_a_rule_stays() -> None:
    found = of("x")
    assert found["finding"]["fix"] == RULES["matches-ddp"].page()["Fix"]


def test_no_line_of_a_script_with_a_fault_is_in_its_bundle() -> None:
    bundles = 0
    for path in sorted((ROOT / "tests" / "faults").rglob("*.py")):
        source = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
        code = {line for line in source if len(line) > 12 and ("(" in line or "=" in line)}
        report = json.loads(json_report.render(lint([path])))
        for finding in report["findings"]:
            text = bundle(report, finding)["finding"]["evidence"]
            assert [line for line in code if line in text] == [], path
            bundles += 1
    assert bundles > 5
