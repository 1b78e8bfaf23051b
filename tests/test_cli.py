"""The command line: start time, exit codes, and what wrong usage gets."""

import resource
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from records import cases
from scripts import Command
from verified_fsdp2.skill import cli
from verified_fsdp2.skill.reports import names

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")
SCRIPT = str(ROOT / "tests" / "zoo" / "minimal.py")


@pytest.fixture(scope="module")
def bare() -> float:
    """On a slow machine the bare import of the libraries is the yardstick."""
    return min(
        timed([sys.executable, "-c", "import argparse, jsonschema, yaml"])[1] for _ in range(2)
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["spec", "--help"],
        ["spec", "check", QUICKSTART],
        ["verify", "--help"],
        ["explain"],
    ],
)
def test_starts_fast_and_without_torch(argv: list[str], bare: float) -> None:
    code = (
        "import sys; from verified_fsdp2.skill.cli import main\ntry: main(sys.argv[1:])\nexcept"
        " SystemExit: pass\n"
    )
    heavy = [
        "torch",
        "jinja2",
        "numpy",
        "requests",
        *(["yaml", "jsonschema"] if "--help" in argv else []),
    ]
    code += f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    seconds = []
    for _ in range(5):  # the least of them: other work slows some down, by half and more
        done, spent = timed([sys.executable, "-c", code, *argv])
        assert done.stderr.splitlines()[-1] == "[]"
        seconds.append(spent)
    assert min(seconds) < max(0.3, 2 * bare)


def timed(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """What it printed, and its seconds of computing: those on the clock depend on what else the
    machine does.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@cases(
    "argv, message",
    (["explain", "optim-before-shar"], "did you mean 'optim-before-shard'?"),
    (["verify", "nothing.py"], "no such file or folder"),
    (["verify", SCRIPT, "--only", "nonsense"], "unknown rule or family 'nonsense'"),
    (["verify", SCRIPT, "--report", "pdf"], "unknown format 'pdf'"),
    (["verify", SCRIPT, "--report", "json="], "a path is missing"),
    (["verify", SCRIPT, "--report", "json", "--report", "text"], "cannot both go to stdout"),
    (["verify", SCRIPT, "--nproc", "x"], "nproc: expected a whole number"),
    (["verify", QUICKSTART], "quickstart.yaml:14:7: this is not Python"),
    (["explain", "--", "x"], "only verify, plan and guard take arguments"),
    (["spec", "check", "nothing.yaml"], "nothing.yaml"),
)
def test_wrong_usage(argv: list[str], message: str, command: Command) -> None:
    captured = command(*argv, code=2)
    assert message in captured.err and captured.out == ""


def test_a_bug_of_ours_is_said_to_be_ours(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(cli, "parse", lambda arguments: 1 / 0)
    error = command("doctor", code=3).err
    assert "a fault of fsdp2 itself" in error
    log = Path(error.rsplit(maxsplit=1)[-1])
    assert "ZeroDivisionError" in log.read_text()
    log.unlink()


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "parse", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["doctor"]) == 130


def test_arguments_after_the_bare_dashes_are_the_scripts_own() -> None:
    options = cli.parse(["verify", "train.py", "--nproc", "3", "--", "--nproc", "9", "--", "x"])
    assert (options.nproc, options.script_args) == ("3", ["--nproc", "9", "--", "x"])


def test_explain_as_json(command: Command) -> None:
    page = command("explain", "root-not-wrapped", "--json", code=0).data
    assert {
        "rule",
        "family",
        "statement",
        "why",
        "wrong",
        "right",
        "fix",
        "source",
        "torch",
    } == set(page)


@pytest.mark.launch
def test_doctor(command: Command) -> None:
    report = command("doctor", "--json", code=0).data
    assert report["ok"]
    assert {check["name"] for check in report["checks"]} >= {"python", "torch", "ranks", "devices"}


def test_doctor_tries_a_launcher(command: Command) -> None:
    report = command("doctor", "--launcher", "no-such-command {worker}", "--json", code=4).data
    assert report["checks"][-1] == {
        "name": "launcher",
        "ok": False,
        "value": "no-such-command is no command here",
    }


def test_rules_may_be_separated_by_commas() -> None:
    assert names("wrapping, optim-before-shard,") == ["wrapping", "optim-before-shard"]
