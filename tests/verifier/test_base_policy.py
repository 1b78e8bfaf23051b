"""What the base branch leaves of a pull request's policy: its configuration, baseline and
suppressions.
"""

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pairs import HEAD, PRELUDE
from records import Patch, cases
from scripts import Command, edited
from trees import build_file_tree, file_tree
from verdicts import verdict
from verified_fsdp2.verifier.config.base_policy import TIGHTER
from verified_fsdp2.verifier.config.policy import Checkouts, Skip, Widening
from verified_fsdp2.verifier.config.target import Target, resolve_all
from verified_fsdp2.verifier.config.verify_file import FORM
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.finding import Finding, Remark
from verified_fsdp2.verifier.integrations.base_branch import base_branch, changed_policy
from verified_fsdp2.verifier.report import baseline, github, json_report
from verified_fsdp2.verifier.rules.lint import lint
from verified_fsdp2.verifier.trace.events import Place

DAY = datetime.date.today()
FIRST, LAST = DAY.isoformat(), (DAY + datetime.timedelta(9)).isoformat()
SCRIPT = "import torch\n"
PLACE = Place(file="verify.yaml", line=1, function="skip", code="")


def skip(rule: str, until: str = LAST) -> Skip:
    return Skip(rule, "reason", until, over=False, location=PLACE, column=1)


def held(tmp_path: Path, monkeypatch: Patch, base: str | None, own: str | None) -> list[Target]:
    """The targets of a pull request with this verify.yaml; the scripts are those of both."""
    scripts = dict.fromkeys(("train.py", "one.py", "two/train.py"), SCRIPT)
    for name, config in (("base", base), ("own", own)):
        build_file_tree(tmp_path / name, {**scripts, "verify.yaml": config})
    monkeypatch.chdir(tmp_path / "own")
    return resolve_all(Path(), {}, checkouts=Checkouts(tmp_path / "own", tmp_path / "base"))


def said(target: Target) -> list[str]:
    return [one.text for one in target.policy.remarks]


def test_the_table_has_every_key() -> None:
    schema = FORM.root
    known = {*schema["properties"], *schema["definitions"]["one_target"]["properties"]}
    assert set(TIGHTER) == known - {"targets", "name"}


@cases(
    "key, own, base, used",
    ("skip", [skip("a"), skip("b")], [skip("a", FIRST), skip("c")], [skip("a", FIRST)]),
    ("skip", [skip("a", FIRST)], [skip("a")], [skip("a", FIRST)]),
    ("skip", None, [skip("a")], []),
    ("required", ["a"], None, None),
    ("required", ["a"], ["b"], ["a", "b"]),
    ("require", None, ["resume"], ["resume"]),
    ("require", ["bf16"], ["resume"], ["bf16", "resume"]),
    ("watch", "ema", ["best"], ["ema", "best"]),
    ("reshard_to", [1], None, None),
    ("reshard_to", [1], [4], [1, 4]),
    ("steps", 3, 7, 7),
    ("steps", 9, 7, 9),
    ("steps", None, 7, 7),
    ("steps", 3, None, "auto"),
    ("steps", "auto", 4, "auto"),
    ("windows", "none", None, None),
    ("windows", "31-33", "auto", "auto"),
    ("windows", "31-33", "none", "31-33"),
    ("nproc", 1, None, 2),
    ("nproc", None, 4, 4),
    ("nproc", 4, 2, 4),
    ("budget", 60, None, None),
    ("budget", 60, 90, 90),
    ("quick", True, None, None),
    ("thorough", None, True, True),
    ("save_args", None, "--save", "--save"),
    ("save_args", "--out", "--save", "--out"),
    ("args", "--small", None, "--small"),
    ("device", "cpu", "cuda", "cuda"),
    ("isolation", "none", None, None),
    ("allow_writes", ["a", "b"], ["b"], ["b"]),
)
def test_a_pull_request_tightens_and_does_not_loosen(
    key: str, own: Any, base: Any, used: Any
) -> None:
    assert TIGHTER[key](own, base) == used
    assert key in ("skip", "reshard_to") or TIGHTER[key](used, used) == used


def test_limits_are_the_narrower() -> None:
    wide, narrow = Widening(9.0, "x"), Widening(2.0, "y")
    own = {"matches-ddp": wide, "reshard-keeps-trajectory": narrow}
    assert TIGHTER["tolerances"](own, {"matches-ddp": narrow}) == {"matches-ddp": narrow}


def test_each_difference_is_one_line(tmp_path: Path, monkeypatch: Patch) -> None:
    base = "nproc: 3\nrequire: [resume]\nsteps: 5\nquick: true\n"
    own = "args: --small\nnproc: 2\nsteps: 9\n"
    own += f"skip:\n  - {{rule: clipping, reason: x, until: {LAST}}}\n"
    (target,) = held(tmp_path, monkeypatch, base, own)
    assert (target.nproc, target.steps, target.quick) == (3, 9, False)
    assert (target.policy.require, target.policy.skips) == (("resume",), ())
    assert said(target) == [
        "args: not set on the base branch, --small here; used: as here",
        "nproc: 3 on the base branch, 2 here; used: as on the base branch",
        "steps: 5 on the base branch, 9 here; used: as here",
        f"skip: not set on the base branch, clipping until {LAST} here; used: as on the base"
        " branch",
        "require: resume on the base branch, not set here; used: as on the base branch",
        "quick: True on the base branch, not set here; used: as here",
    ]
    assert said(held(tmp_path, monkeypatch, base, base)[0]) == []


def test_a_configuration_that_is_removed_still_holds(tmp_path: Path, monkeypatch: Patch) -> None:
    (target,) = held(tmp_path, monkeypatch, "script: one.py\nrequire: [resume]\n", None)
    assert (target.script.name, target.policy.require) == ("one.py", ("resume",))
    assert said(target) == ["target one.py is left out here; it is verified as on the base branch"]


def test_a_configuration_that_is_new_cannot_loosen(tmp_path: Path, monkeypatch: Patch) -> None:
    (target,) = held(tmp_path, monkeypatch, None, "steps: 3\nargs: --small\nrequire: [bf16]\n")
    assert (target.steps, target.args, target.policy.require) == (0, ("--small",), ("bf16",))
    assert said(target) == [
        "a configuration is not on the base branch",
        "steps: not set on the base branch, 3 here; used: auto",
    ]


def test_a_link_is_no_way_around_it(tmp_path: Path, monkeypatch: Patch) -> None:
    held(tmp_path, monkeypatch, "require: [resume]\n", None)
    build_file_tree(tmp_path / "own", {"other/loose.yaml": "steps: 3\n"})
    (tmp_path / "own" / "verify.yaml").symlink_to("other/loose.yaml")
    checkouts = Checkouts(tmp_path / "own", tmp_path / "base")
    (target,) = resolve_all(Path(), {}, checkouts=checkouts)
    assert target.policy.require == ("resume",)


def test_a_target_that_is_left_out_is_verified(tmp_path: Path, monkeypatch: Patch) -> None:
    base = """
require: [resume]
targets:
  - {name: first, script: one.py}
  - {name: second, folder: two, nproc: 4}
  - {name: third, script: gone.py}
"""
    own = """
targets:
  - {name: renamed, script: one.py, steps: 3}
  - {name: new, script: train.py}
"""
    found = {target.name: target for target in held(tmp_path, monkeypatch, base, own)}
    assert list(found) == ["renamed", "new", "second"]
    assert all(target.policy.require == ("resume",) for target in found.values())
    assert (found["renamed"].steps, found["second"].nproc) == (0, 4)
    assert said(found["renamed"])[:2] == [
        "target second is left out here; it is verified as on the base branch",
        "target third is left out here; its code is gone",
    ]
    assert said(found["new"]) == [
        "target new is not on the base branch",
        "require: resume on the base branch, not set here; used: as on the base branch",
    ]


def fault(line: int, rule: str = "matches-ddp") -> Finding:
    place = Place(file="/a/repo/train.py", line=line, function="main", code=f"x = {line}")
    return Finding(rule, "fail", "", location=place)


@cases("base, known", ([fault(1)], [1]), ([fault(1), fault(2), fault(3)], [1, 2]), (None, []))
def test_a_baseline_knows_what_that_of_the_base_branch_knows(
    tmp_path: Path, base: list[Finding] | None, known: list[int]
) -> None:
    own, there = [tmp_path / name / "old.json" for name in ("own", "base")]
    for path, found in ((own, [fault(1), fault(2)]), (there, base)):
        path.parent.mkdir()
        if found is not None:
            path.write_text(json.dumps(json_report.as_dict(verdict(*found))))
    checkouts = Checkouts(own.parent, there.parent)
    now = verdict(fault(1), fault(2), fault(3))
    made = baseline.held_against(now, own, baseline.load(own), checkouts)
    assert made.baseline is not None
    assert [f.location.line for f in made.baseline.standing if f.location] == known
    refused = 2 - len(known)
    text = f"{refused} failure{'s' * (refused > 1)} not in that of the base branch"
    assert [text in one.text for one in made.remarks] == [True] * bool(refused)


ROOT_ONLY = PRELUDE + HEAD + "model = Net()\nfully_shard(model){}\nfit(model)\n"


@cases(
    "base, own, count",
    ("  # fsdp2: ignore[root-only-wrap] small", "  # fsdp2: ignore[root-only-wrap] tiny", 0),
    ("  # fsdp2: ignore[root-only-wrap] small", "", 1),
    ("", "  # fsdp2: ignore[root-only-wrap] small", 1),
    ("  # fsdp2: ignore[root-only-wrap]", "  # fsdp2: ignore[root-only-wrap] small", 1),
    (None, "  # fsdp2: ignore[root-only-wrap] small", 1),
)
def test_suppressions_are_those_of_the_base_branch(
    tmp_path: Path, base: str | None, own: str, count: int
) -> None:
    source = None if base is None else ROOT_ONLY.format(base)
    build_file_tree(tmp_path, {"base/train.py": source, "own/train.py": ROOT_ONLY.format(own)})
    checkouts = Checkouts(tmp_path / "own", tmp_path / "base")
    made = lint([tmp_path / "own" / "train.py"], checkouts=checkouts)
    assert [f.rule for f in made.findings].count("root-only-wrap") == count
    refused = bool(own) and count > 0
    assert ["does not count" in one.text for one in made.remarks] == [True] * refused


def git(*words: str) -> None:
    user = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *user, *words], check=True, capture_output=True)


@pytest.fixture
def pull_request(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A repository whose branch `main` requires what the current one does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_BASE_REF", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    table = "[tool.fsdp2]\nnproc = 3\n"
    files = {"train.py": SCRIPT, "verify.yaml": "require: [resume]\n", "a/pyproject.toml": table}
    build_file_tree(tmp_path, {**files, "a/train.py": SCRIPT})
    git("init")
    git("add", ".")
    git("commit", "-m", "base")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    other = {"verify.yaml": "timeout: 600\n", "a/pyproject.toml": table + "[x]\n"}
    build_file_tree(tmp_path, other)
    git("commit", "-am", "change")
    return tmp_path


def test_a_git_ref_and_a_folder_and_a_file_are_the_same(pull_request: Path) -> None:
    git("worktree", "add", "base", "origin/main")
    before = file_tree(pull_request / ".git")
    for policy in ("origin/main", "base", "base/verify.yaml"):
        with base_branch(policy, Path()) as checkouts:
            assert checkouts is not None
            (target,) = resolve_all(Path(), {"policy": policy}, checkouts=checkouts)
        assert target.policy.require == ("resume",) and target.timeout == 600
        assert target.command == ("fsdp2", "verify", ".", "--policy", policy)
    assert checkouts is not None and file_tree(pull_request / ".git") == before
    with base_branch("origin/main", Path()) as checkouts:
        assert checkouts is not None
        assert set(file_tree(checkouts.base)) >= {"train.py", "verify.yaml", "a/train.py"}
    assert not checkouts.base.exists()


@cases("policy", "origin/other", "-x", "no/folder")
def test_a_policy_must_be_there(pull_request: Path, policy: str, command: Command) -> None:
    for words in (["verify", "train.py"], ["lint", "train.py"]):
        err = command(*words, f"--policy={policy}", code=2).err
        assert f"--policy {policy}: no such file or folder, and git has no such commit" in err


def test_a_ref_goes_before_a_folder(pull_request: Path, monkeypatch: Patch) -> None:
    """A pull request can add such a folder."""
    build_file_tree(pull_request, {"origin/main/verify.yaml": "steps: 9\n"})
    monkeypatch.chdir("a")
    with base_branch("origin/main", Path()) as checkouts:
        assert checkouts is not None and checkouts.own == pull_request
        (target,) = resolve_all(Path(), {}, checkouts=checkouts)
    assert (target.nproc, said(target)) == (3, [])


@cases("policy", "", ".", "verify.yaml")
def test_a_pull_request_is_not_its_own_base(pull_request: Path, policy: str) -> None:
    with pytest.raises(UserError, match="the pull request itself"), base_branch(policy, Path()):
        pass


def test_without_the_option_github_names_what_changed(
    pull_request: Path, monkeypatch: Patch, command: Command
) -> None:
    assert changed_policy(Path()) == ()
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    (remark,) = changed_policy(Path(), pull_request.parent / "old.json")
    assert remark.text.startswith("verify.yaml: not as on the base branch")
    assert changed_policy(Path("a")) == ()  # its table is the same
    (pull_request / "train.py").write_text(SCRIPT + "x = 1  # fsdp2: ignore[clipping] x\n")
    (remark,) = changed_policy(Path())
    assert remark.text.startswith("verify.yaml, comments `# fsdp2: ignore`: not as")
    out = command("verify", "--tier", "static", "--report", "github").out
    assert f"::warning file=train.py,line=1,title=fsdp2%3A policy::{remark.text}" in out
    monkeypatch.setenv("GITHUB_BASE_REF", "unknown")
    assert changed_policy(Path()) == ()


def test_a_remark_is_a_warning_and_a_note() -> None:
    made = verdict().remarked([Remark("steps: 5 on the base branch")])
    (warning,) = [line for line in github.commands(made) if line.startswith("::warning")]
    assert warning == "::warning title=fsdp2%3A policy::steps: 5 on the base branch"
    assert made.environment["notes"] == ["steps: 5 on the base branch"]


@pytest.mark.launch
def test_a_pull_request_that_weakens_its_policy(
    tmp_path: Path, monkeypatch: Patch, command: Command
) -> None:
    """It divides the loss twice, and skips the rules that see it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    (tmp_path / "base").mkdir()
    edited(tmp_path / "base")
    edited(tmp_path, ("loss.backward()", "(loss / world).backward()"))
    skips = [
        f"  - {{rule: {rule}, reason: known, until: {LAST}}}\n"
        for rule in ("double-or-missing-world-scale", "gradient-of-mean-loss")
    ]
    (tmp_path / "base" / "verify.yaml").write_text("quick: true\n")
    (tmp_path / "verify.yaml").write_text("quick: true\nskip:\n" + "".join(skips))
    assert "verdict: pass" in command("verify", code=0).out
    out = command("verify", "--policy", "base", "--report", "github", code=1).out
    assert "::error file=train.py" in out and "FAIL double-or-missing-world-scale" in out
    assert "::warning file=verify.yaml,line=1,title=fsdp2%3A policy::skip: not set on the" in out


def test_a_wrong_configuration_of_the_base_branch_is_an_error(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with pytest.raises(UserError, match="base"):
        held(tmp_path, monkeypatch, "nonsense: 3\n", "steps: 3\n")
