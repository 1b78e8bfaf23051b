"""The gate on malformed inputs and hostile scripts, without sockets and interrupted: a clear
answer, and nothing left.

`benchmarks/robustness.py` does the same at length.
"""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import robustness
from records import cases
from robustness_inputs import KINDS
from robustness_processes import survivors
from robustness_scripts import SAVING, TRAIN, hostile
from scripts import Command, Verify, training
from verdicts import valid
from verified_fsdp2.skill.cli import main
from verified_fsdp2.skill.reports import FORMATS
from verified_fsdp2.verifier.errors import MachineRefuses
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.rules.hang.run_completes import RunCompletes
from verified_fsdp2.verifier.trace import Run, read_run
from verified_fsdp2.verifier.trace.seal import mark
from verified_fsdp2.verifier.verdict import Verdict

TESTS = Path(__file__).parent
EVERY_FORMAT = [word for name in FORMATS for word in ("--report", f"{name}=out.{name}")]


@pytest.mark.filterwarnings("ignore")  # of Python, on the scripts that it parses
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_inputs(kind: str, tmp_path: Path) -> None:
    trials = [
        robustness.in_process(kind, number, tmp_path / "trial", seed=1) for number in range(12)
    ]
    assert [robustness.described(trial) for trial in trials if not trial.clean] == []
    assert robustness.row(kind, trials)["inputs"] == 12


def test_a_path_that_leads_nowhere(folder: Path, command: Command) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "a.py").write_text("")
    assert "leads to itself" in command("lint", "a.py", "--report", "json=loop", code=2).err
    assert "cannot be written" in command("lint", "a.py", "--report", "json=loop/x", code=2).err
    error = command("lint", "x" * 5000, code=2).err
    assert error.startswith("File name ") and "xxx" in error
    assert (folder / "loop").is_symlink()


def test_errors_are_of_bounded_length(folder: Path, command: Command) -> None:
    (folder / "spec.yaml").write_text("".join(f"key{number}: 1\n" for number in range(90)))
    error = command("spec", "check", "spec.yaml", code=2).err
    assert error.count("\n") <= 150 and len(error) < 8_100 and error.endswith("... (cut)\n")
    assert len(command("explain", "a", "x" * 20_000).err) < 9_000
    assert len(command("verify", "--tier", "x" * 20_000, code=2).err) < 9_000


@pytest.mark.parametrize("text", ["x = " + "[" * 3000, "x = " + "9" * 6000], ids=["deep", "long"])
def test_toml_that_python_cannot_take(text: str, folder: Path, command: Command) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.fsdp2]\n{text}\n")
    (folder / "train.py").write_text("")
    assert (
        "pyproject.toml:1:1: not valid TOML"
        in command("verify", ".", "--tier", "static", code=2).err
    )


def test_a_script_nested_too_deeply(folder: Path, command: Command) -> None:
    (folder / "a.py").write_text("x = " + "-" * 9000 + "1")
    assert "a.py:1:" in command("verify", "a.py", "--tier", "static", code=2).err


# -- a part of a verification is no verdict

TWICE = """
marks = pathlib.Path(os.environ["MARKS"])
again = (marks / "started").exists()
dist.barrier()
(marks / "started").touch()
while again:
    (marks / "again").touch()
    time.sleep(1)
"""


def written(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The reports of EVERY_FORMAT, valid, and the JSON data."""
    texts = {
        name: valid(name, (folder / f"out.{name}").read_text(encoding="utf-8")) for name in FORMATS
    }
    return texts, json.loads(texts["json"])


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.launch
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_an_interrupted_verification_says_so_in_every_format(
    number: signal.Signals, folder: Path
) -> None:
    (folder / "a.py").write_text(training(TWICE, "nn.Linear(4, 4)", "torch.ones(2, 4)"))
    marks = folder.with_name(
        folder.name + "-marks"
    )  # what a run writes in its project no other run finds
    marks.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "FSDP2_ROBUSTNESS": str(folder),
        "MARKS": str(marks),
    }
    command = [sys.executable, "-m", "verified_fsdp2.skill", "verify", "a.py", "--steps", "5"]
    command += ["--allow-writes", str(marks), *EVERY_FORMAT]
    running = subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for(marks / "again")
    running.send_signal(number)
    _, error = running.communicate(timeout=30)
    assert running.returncode == 128 + number and error.endswith("interrupted\n")
    assert list(folder.glob("fsdp2-verify-*")) == [] and survivors(str(folder), 5) == []

    texts, report = written(folder)
    assert (report["interrupted"], report["verdict"]) == (number.name, "inconclusive")
    assert [run["role"] for run in report["runs"]] == ["train"]
    found = {f["rule"]: f for f in report["findings"]}
    assert found["run-completes"]["status"] == found["root-not-wrapped"]["status"] == "pass"
    assert (
        "interrupted" in found["matches-ddp"]["evidence"]
        and found["matches-ddp"]["status"] == "inconclusive"
    )
    no_verdict = f"INTERRUPTED by {number.name} after 1 run: "
    assert texts["text"].startswith(no_verdict) and no_verdict in "\n".join(
        texts["text"].splitlines()[-4:]
    )
    assert no_verdict in texts["html"]
    assert texts["github"].startswith("::error") and no_verdict in texts["github"].splitlines()[0]
    whole = next(
        c
        for c in ET.fromstring(texts["junit"]).iter("testcase")
        if c.get("name") == "the whole verification"
    )
    assert no_verdict in whole[0].attrib["message"] and whole[0].tag == "error"
    sarif = json.loads(texts["sarif"])
    invocation = sarif["runs"][0]["invocations"][0]
    assert not invocation["executionSuccessful"] and invocation["exitCode"] == 128 + number
    assert no_verdict in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert no_verdict in (folder / "summary.md").read_text()


@cases(
    "part, status, answer",
    ({}, "pass", "pass"),
    ({"interrupted": "SIGINT"}, "pass", "inconclusive"),
    ({"interrupted": "SIGINT"}, "fail", "inconclusive"),
    ({"refused": "no sockets"}, "pass", "inconclusive"),
    ({"refused": "no sockets"}, "fail", "fail"),
)
def test_a_part_never_passes(part: dict[str, str], status: str, answer: str) -> None:
    made = Verdict("inconclusive", {}, {}, (), (), **part)  # type: ignore[arg-type]
    assert made.of([Finding("a", status, "")]) == answer  # type: ignore[arg-type]


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Launcher.start

    def refuse(self: Launcher, request: Request) -> int:
        if request.mode != "simulate":
            raise MachineRefuses("this environment refuses sockets")
        return start(self, request)

    monkeypatch.setattr(Launcher, "start", refuse)


@pytest.mark.launch
@pytest.mark.usefixtures("no_sockets")
@cases(
    "script, only, status",
    pytest.param("zoo/minimal.py", (), "pass", marks=pytest.mark.full),
    ("faults/root_only_wrap.py", (), "fail"),
    pytest.param("zoo/minimal.py", ("--only", "root-only-wrap"), "pass", marks=pytest.mark.full),
    ids=["right", "faulty", "right, and nothing open"],
)
def test_without_sockets_the_other_tiers_are_judged(
    script: str, only: tuple[str, ...], status: str, folder: Path, command: Command
) -> None:
    (folder / "a.py").write_bytes((TESTS / script).read_bytes())
    code = 4  # root-only-wrap warns
    assert (
        "this environment refuses sockets"
        in command("verify", "a.py", *only, *EVERY_FORMAT, code=code).err
    )
    texts, report = written(folder)
    assert report["refused"] == "this environment refuses sockets"
    assert [run["role"] for run in report["runs"]] == ["simulate"]
    findings = {f["rule"]: f for f in report["findings"]}
    assert (findings["root-only-wrap"]["status"], findings["root-only-wrap"]["tier"]) == (
        status,
        "simulate",
    )
    if not only:
        assert findings["set-device-missing"]["tier"] == "static"
        assert (findings["matches-ddp"]["status"], findings["matches-ddp"]["tier"]) == (
            "inconclusive",
            "ranks",
        )
        assert "this environment refuses sockets" in findings["matches-ddp"]["evidence"]
    for name in ("text", "junit", "sarif", "github", "html"):
        assert "NO RANKS WERE JUDGED, only the static and the simulated tier" in texts[name], name


# -- what a script writes is data


RANK = {"rank": 0, "code": 0, "killed": False, "at": 1.0}
RUN = ("train", {"ranks": [RANK], "timed_out": False, "seconds": 1.0}, 1, "a.py")


def run_of(folder: Path, lines: list[str]) -> Run:
    (folder / "rank0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return read_run(folder, *RUN, secret="secret")


def marked(number: int, text: str, secret: str = "secret") -> str:
    return f"{text}\t{mark(secret, number, text)}"


END = '{"kind": "end", "seq": 1, "at": 0.5, "how": "return", "code": 0}'


@cases(
    "lines",
    *([END], [marked(1, END), "x"], [marked(2, END)], [marked(1, END), marked(1, END)]),
    *([marked(1, END, "guessed")], [""]),
    ids=["no mark", "a line more", "another place", "repeated", "another secret", "empty"],
)
def test_only_the_probe_writes_records(lines: list[str], tmp_path: Path) -> None:
    assert run_of(tmp_path, [marked(1, END)]).completed
    run = run_of(tmp_path, lines)
    assert not run.completed and run.traces[0].records == ()
    found = RunCompletes().judge(Evidence(train=run))
    assert found.status == "fail" and "not written by" in found.evidence


@pytest.mark.parametrize("text", ["+5\n", "7\n", "x\n", "+{\n", "+{}\n0 x\n"])
def test_only_the_probe_writes_progress(text: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.progress").write_text(text)
    assert "rank0.progress" in run_of(tmp_path, [marked(1, END)]).foreign


def test_a_trace_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").symlink_to("/dev/zero")
    assert not read_run(tmp_path, *RUN, secret="secret").completed


@cases(
    "name, status, named",
    pytest.param("writes into its trace", "fail", "line", marks=pytest.mark.full),
    pytest.param("writes into its progress", "fail", "rank", marks=pytest.mark.full),
    pytest.param("breaks json", "fail", "json", marks=pytest.mark.full),
    pytest.param("forges a verdict", "inconclusive", "backward", marks=pytest.mark.full),
    pytest.param("raises what has no text", "fail", "Bad", marks=pytest.mark.full),
    pytest.param("ends the manager", "refused", "process"),
)
def test_hostile_scripts(
    name: str, status: str, named: str, verify_script: Verify, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(hostile(name))
    if status == "refused":
        with pytest.raises(MachineRefuses, match=named):
            verify_script(tmp_path / "a.py", ("run-completes",), steps=3)
        return
    (found,) = verify_script(tmp_path / "a.py", ("run-completes",), steps=3).findings
    assert (found.status, named in found.evidence) == (status, True), found.evidence


@pytest.mark.full
@pytest.mark.launch
def test_runs_that_were_made_count_when_a_later_one_cannot_be(
    folder: Path, command: Command
) -> None:
    marks = folder.with_name(
        folder.name + "-marks"
    )  # what a run writes in its project no other run finds
    marks.mkdir()
    mark = marks / "mark"
    later = f"if Path({str(mark)!r}).exists(): os.kill(os.getppid(), signal.SIGKILL)\n"
    script = TRAIN.replace("# BEFORE\n", later).replace("range(int(done), 20)", "range(3)")
    script = script.replace(
        "dist.destroy_process_group()", f"dist.barrier(); Path({str(mark)!r}).touch()"
    )
    (folder / "a.py").write_text(script)
    rules = ("--only", "root-not-wrapped", "--only", "matches-ddp")
    options = ("--allow-writes", str(marks), "--report", "json=out.json")
    command("verify", "a.py", "--steps", "3", *rules, *options, code=4)
    report = json.loads((folder / "out.json").read_text())
    assert report["refused"] and len(report["runs"]) == 1
    statuses = {f["rule"]: f["status"] for f in report["findings"]}
    assert (statuses["root-not-wrapped"], statuses["matches-ddp"]) == ("pass", "inconclusive")


@cases(
    "name, status",
    ("makes its checkpoint a link", "fail"),
    pytest.param("leaves a pipe in its checkpoint", "pass", marks=pytest.mark.full),
    pytest.param("removes its checkpoint", "fail", marks=pytest.mark.full),
)
def test_what_is_left_in_the_place_of_a_checkpoint(
    name: str, status: str, verify_script: Verify, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(hostile(name))
    words = {"save_args": SAVING[1], "resume_args": SAVING[3]}
    (found,) = verify_script(tmp_path / "a.py", ("resume-is-exact",), steps=3, **words).findings
    assert found.status == status, found.evidence


@pytest.mark.full
@pytest.mark.launch
def test_a_script_that_ends_the_launcher(folder: Path, command: Command) -> None:
    (folder / "a.py").write_text(hostile("ends the launcher"))
    command(
        "verify", "a.py", "--steps", "3", "--only", "wrapping", "--report", "json=out.json", code=4
    )
    report = json.loads((folder / "out.json").read_text())
    assert "launcher" in report["refused"] and report["runs"] == []
    assert {f["tier"] for f in report["findings"] if f["status"] == "pass"} <= {"static"}


PRINTS = r"""
import sys
print("\n::error file=train.py::printed\n##[error]printed\n::stop-commands::x", flush=True)
print("::add-mask::secret", file=sys.stderr, flush=True)
"""


@pytest.mark.full
@pytest.mark.launch
def test_hostile_names_errors_and_prints_in_every_format(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(b"<script>\n::error::x\n##[error]'\"]]>\xff.py")
    (folder / name).write_text(PRINTS + hostile("raises hostile text"))
    assert main(["verify", name, "--only", "run-completes", *EVERY_FORMAT]) == 1
    log = capfd.readouterr()
    assert log.out == ""
    texts, _ = written(folder)
    for kind, text in {
        **texts,
        "summary": (folder / "summary.md").read_text(encoding="utf-8"),
        "log": log.err,
    }.items():
        assert len(text) < 1_000_000 and "\x1b" not in text and "\x00" not in text, kind
        lines = [
            line for line in text.splitlines() if line.lstrip().startswith("::") or "##[" in line
        ]
        assert all(
            kind == "github" and line.startswith(("::error file=", "::warning file="))
            for line in lines
        ), kind
