"""Shared by all tests: one launcher for every test that starts ranks, and the corpus of scripts."""

import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import scripts
from corpus import Case, load
from records import Capsys, brief
from scripts import Command, Done, Verify
from verified_fsdp2.skill.cli import main
from verified_fsdp2.verifier import judge
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import Rule, SourceRule
from verified_fsdp2.verifier.source.registry import DETECTORS

os.environ["COLUMNS"] = "120"  # reports wrap at the width of the terminal


@pytest.fixture(scope="session", autouse=True)
def mutant() -> None:
    """For benchmarks/mutation.py: switch off the rule that the environment names."""
    if name := os.environ.get("FSDP2_MUTANT"):
        rule = RULES[name]
        rule.judge = lambda evidence: rule.passed("switched off")  # type: ignore[method-assign]
        for question in ("too_short", "applies", "unseen"):
            setattr(rule, question, lambda evidence: "")
        if isinstance(rule, SourceRule) and name in DETECTORS:
            del DETECTORS[name]


@pytest.fixture(scope="session", autouse=True)
def messages() -> None:
    """Every message that a rule gives in any test, on recorded traces or real runs, is short and
    states its limit.
    """
    judged = judge._judged

    def checked(rule: Rule, evidence: Evidence, beyond: str) -> Finding:
        found = judged(rule, evidence, beyond)
        if not brief(found):
            pytest.fail(
                f"the message of {rule.name} is too long, or does not state the limit:"
                f" {found.evidence}"
            )
        return found

    judge._judged = checked


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell that starts the tests in the background has SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, seen by a CI system that takes a step summary and names no
    checkout.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return tmp_path


@pytest.fixture
def command(capsys: Capsys) -> Command:
    """command(*words, code=None) -> Done: what `fsdp2` with these words did; the exit code is
    `code`, if that is not None.
    """

    def run(*words: object, code: int | None = None) -> Done:
        capsys.readouterr()
        try:
            ended = main([*map(str, words)])
        except SystemExit as end:  # of argparse
            ended = int(end.code or 0)
        done = Done(ended, *capsys.readouterr())
        assert code in (None, ended), done
        return done

    return run


Once = Callable[[str, Callable[[], Any]], Any]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """once(name, make) -> the JSON data that `make` returns; of all workers of xdist only the first
    one makes it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[], Any]) -> Any:
        file = shared / f"{name}.json"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))

    return get


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    """One launcher process for the whole session: torch is imported once."""
    return scripts.launcher()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `launch` every test that uses the launcher."""
    for item in items:
        if "launcher" in getattr(item, "fixturenames", ()):
            item.add_marker("launch")


STEPS = {"steps": 5}


@pytest.fixture
def verify_script(launcher: Launcher, tmp_path: Path) -> Verify:
    """verify_script(path, only=(), **flags) -> Verdict; a script's corpus header, or a folder's
    verify.yaml, gives more.

    Five steps are compared, without a survey run, unless a test asks for others.
    """

    def run(script: Path, only: tuple[str, ...] = (), **flags: Any) -> Any:
        target = resolve(script, {**STEPS, **load(script).settings, **flags})
        return verify_with(launcher, target, tmp_path / "work", select(only, ()))

    return run


@pytest.fixture
def verify_case(launcher: Launcher, tmp_path: Path) -> Verify:
    """verify_case(case, only=()) -> Verdict of a case of the corpus."""

    def run(case: Case, only: tuple[str, ...] = ()) -> Any:
        target = resolve(case.target(tmp_path), {**STEPS, **case.settings})
        chosen = select(only, (), case.tier)
        return verify_with(launcher, target, tmp_path / "work", chosen, tier=case.tier)

    return run
