"""Where reports go: several at once, whole or not at all, and wrong paths before anything is
run.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from records import Capsys, Patch, cases
from scripts import Command, python
from verdicts import valid
from verified_fsdp2.skill import progress, reports
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.report import LINT, RENDERERS

TESTS = Path(__file__).parents[1]
LATE = TESTS / "faults" / "optim_before_shard.py"
RIGHT = TESTS / "zoo" / "minimal.py"
DDP = TESTS / "migrate" / "ddp_class.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    path = tmp_path / "train.py"
    path.write_bytes(LATE.read_bytes())
    return path


def test_the_help_names_every_format() -> None:
    assert set(reports.FORMATS) == set(RENDERERS) == set(LINT)
    page = (TESTS.parent / "references" / "verify-project.md").read_text(encoding="utf-8")
    assert all(f"\n| {name} | " in page for name in reports.FORMATS)


def test_all_formats_at_once(script: Path, command: Command) -> None:
    words = [word for name in reports.FORMATS for word in ("--report", f"{name}=out/report.{name}")]
    out = command("lint", "train.py", *words, code=1).out
    assert out.startswith("1 finding in ") and "\nFAIL optim-before-shard: " in out
    written = {path.suffix[1:]: path.read_text(encoding="utf-8") for path in Path("out").iterdir()}
    assert set(written) == set(reports.FORMATS), "no temporary file is left"
    assert all("optim-before-shard" in valid(name, text) for name, text in written.items())


@cases("words", ["--json"], ["--report", "json=/dev/stdout"], ["--report", "junit=x", "--json"])
def test_what_is_asked_for_on_stdout_stands_there_alone(
    script: Path, words: list[str], command: Command
) -> None:
    read = command("lint", "train.py", *words, code=1)
    assert not read.out or valid("json", read.out)


@cases(
    "words, message",
    (["--report", "json=folder"], "folder: is a folder; give a path of a file in it"),
    (["--report", "json=train.py/x.json"], "train.py/x.json: cannot be written"),
    (["--report", "json=a", "--report", "text=./a"], "another report goes to the same path"),
    (["--report", "junit", "--report", "sarif"], "two reports cannot both go to stdout"),
    (["--baseline", "none.json"], "none.json: no such file"),
    (["--baseline", "other.json"], "a report on lint other.py, not on verify train.py"),
)
def test_wrong_before_anything_is_run(
    script: Path, words: list[str], message: str, command: Command, monkeypatch: Patch
) -> None:
    Path("folder").mkdir()
    Path("other.py").write_text("")
    command("lint", "other.py", "--report", "json=other.json", code=4)
    monkeypatch.setattr(
        "verified_fsdp2.verifier.pipeline.verify", lambda *args, **more: pytest.fail("it ran")
    )
    assert message in command("verify", "train.py", *words, code=2).err


def test_a_report_is_whole_or_not_there(script: Path, monkeypatch: Patch) -> None:
    Path("a.txt").write_text("verdict: pass")
    wanted = reports.wanted_reports(["one=a.txt", "two=b.txt"], False, ("one", "two"))
    with Path("a.txt").open() as reader:
        reports.write(Path("a.txt"), "after")
        assert (reader.read(), Path("a.txt").read_text()) == (
            "verdict: pass",
            "after",
        ), "one file takes the other's place"
    reports.write(Path("a.txt"), "verdict: pass")
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "a.txt" in path.name:
            real(path, data[:2])
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"one=a.txt: .*: No space left"):
        reports.write_reports(wanted, "x", {"one": lambda v: "after", "two": lambda v: "other"})
    assert Path("a.txt").read_text() == "verdict: pass"
    assert Path("b.txt").read_text() == "other", "the others are written all the same"
    assert not [name for name in os.listdir() if name.endswith(".part")]


@cases(
    "name, text",
    ("train.py", LATE.read_text()),
    ("pkg/__init__.py", ""),
    ("notes.txt", "mine"),
    ("data.json", '{"schema": 1, "verdict": "pass"}'),
    ("page.html", "<!DOCTYPE html>\n<title>mine</title>"),
    ("results.xml", '<?xml version="1.0"?>\n<testsuites name="pytest"/>'),
    ("deep.json", "{" + '"a":{' * 50_000),
)
def test_a_report_replaces_no_file_of_the_user(
    name: str, text: str, script: Path, command: Command, monkeypatch: Patch
) -> None:
    (script.parent / name).parent.mkdir(exist_ok=True)
    (script.parent / name).write_text(text)
    monkeypatch.setattr(
        "verified_fsdp2.verifier.pipeline.verify", lambda *args, **more: pytest.fail("it ran")
    )
    for words in (("lint", "train.py"), ("lint", "--migrate", "train.py"), ("verify", "train.py")):
        assert name in command(*words, "--report", f"json={name}", code=2).err
    assert name in command("plan", "train.py", "--nproc", "2", "--html", name, code=2).err
    assert (script.parent / name).read_text() == text


def test_a_report_of_ours_and_an_empty_file_may_be_replaced(script: Path, command: Command) -> None:
    words = [word for name in reports.FORMATS for word in ("--report", f"{name}=report.{name}")]
    for name in reports.FORMATS:
        Path(f"report.{name}").touch()
    for _ in range(2):
        command("lint", "train.py", *words, code=1)
        command("verify", "train.py", "--tier", "static", *words, code=1)
    for _ in range(2):
        command(
            "lint",
            "--migrate",
            "train.py",
            "--report",
            "text=migrate.txt",
            "--report",
            "json=migrate.json",
            code=0,
        )
        command(
            "lint",
            "--migrate",
            DDP,
            "--report",
            "text=todo.txt",
            "--report",
            "json=todo.json",
            code=1,
        )
    Path("plain").write_bytes(b"")
    Path("plain").rename("script")  # without a suffix, and empty
    command("lint", "script", "--report", "json=script", code=2)


def test_a_report_to_a_pipe(script: Path, command: Command) -> None:
    os.mkfifo("fifo")
    command("lint", "train.py", "--report", "json=fifo", code=2)
    reader, writer = os.pipe()
    command("lint", "train.py", "--report", f"json=/dev/fd/{writer}", code=1)
    assert b'"schema"' in os.read(reader, 1 << 16)
    os.close(reader)
    command("lint", "train.py", "--report", f"json=/dev/fd/{writer}", code=2)  # nobody reads it
    os.close(writer)
    command("lint", "train.py", "--report", f"json=/dev/fd/{writer}", code=2)


def test_links_and_devices_stay_what_they_are(script: Path, monkeypatch: Patch) -> None:
    Path("real.txt").write_text("")
    Path("link.txt").symlink_to("real.txt")
    reports.wanted_reports(["text=link.txt", "json=/dev/null"], False, RENDERERS)
    reports.write(Path("link.txt"), "x")
    reports.write(Path("/dev/null"), "x")
    assert Path("link.txt").is_symlink() and Path("real.txt").read_text() == "x"
    assert Path("/dev/null").is_char_device()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not stop root
    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        reports.wanted_reports(["json=real.txt"], False, RENDERERS)
    assert Path("real.txt").read_text() == "x"


def test_the_step_summary(script: Path, command: Command, monkeypatch: Patch) -> None:
    Path("summary.md").write_text("# ours\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    command("lint", "train.py", "--report", "text", code=1)
    assert Path("summary.md").read_text() == "# ours\n", "only the format github writes it"
    lines = command("lint", "train.py", "--report", "github", code=1).out.splitlines()
    assert "::error file=train.py,line=67,title=fsdp2%3A optim-before-shard::" in "\n".join(lines)
    assert "FAIL optim-before-shard [static]" in lines, "the log has the text report, too"
    text = Path("summary.md").read_text()
    assert text.startswith("# ours\n## fsdp2: Failed\n") and "train.py:67 in main" in text
    Path("summary.md").write_text("x" * (1024 * 1024 - 100))
    command("lint", "train.py", "--report", "github", code=1)
    assert len(Path("summary.md").read_bytes()) < 1024 * 1024
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(script / "none"))
    assert "the step summary" in command("lint", "train.py", "--report", "github", code=1).err


def test_lint_with_a_baseline(script: Path, command: Command) -> None:
    def lint(*words: str, code: int = 0) -> str:
        return command("lint", "train.py", "--baseline", "old.json", *words, code=code).out

    command("lint", "train.py", "--report", "json=old.json", code=1)
    script.write_text("# moved\n\n" + script.read_text())
    out = lint()
    assert "KNOWN optim-before-shard [static]" in out and "train.py:69" in out
    held = json.loads(lint("--json"))["baseline"]
    assert held["verdict"] == "no_findings" and [one["rule"] for one in held["standing"]] == [
        "optim-before-shard"
    ]
    script.write_text(script.read_text().replace("lr=3e-3", "lr=2e-3"))
    lint(code=1)  # an edited line is looked at again
    script.write_bytes(RIGHT.read_bytes())
    assert lint().split("ms; ")[-1].endswith("1 gone (optim-before-shard)\n")
    assert (
        lint("--skip", "optimizer")
        .split("ms; ")[-1]
        .endswith("1 not judged (optim-before-shard)\n")
    )
    lint("--migrate", code=2)


def test_what_the_terminal_cannot_show_is_no_fault(script: Path) -> None:
    script.write_text(
        "# \u00e4\n" + script.read_text().replace("optimizer = ", "\u00f6ptimizer = optimizer = ")
    )
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = python("-m", "verified_fsdp2.skill", "lint", "train.py", status=1, env=ascii_only)
    assert "\\xf6ptimizer = optimizer" in done.stdout


def screen(written: bytes) -> list[str]:
    """The lines that a terminal without escape sequences shows."""
    lines = [[]]  # type: list[list[str]]
    column = 0
    for sign in written.decode().replace("\r\n", "\n"):
        if sign == "\n":
            lines.append([])
            column = 0
        elif sign == "\r":
            column = 0
        else:
            assert sign.isprintable(), "no escape sequences"
            lines[-1][column : column + 1] = [sign]
            column += 1
    return ["".join(line).rstrip() for line in lines]


PROGRESS = """
import sys, time
from verified_fsdp2.skill import progress
progress.TICK = 0.05
with progress.Live(sys.stderr) as live:
    live("", ["train 2 ranks"])
    time.sleep(0.3)
    live("train 2 ranks 5 steps", ["reference 2 ranks", "single 1 rank"])
    time.sleep(float(sys.argv[1]))
"""


def written(columns: int, term: str, seconds: float = 0.3) -> list[bytes]:
    """What PROGRESS writes to a terminal, in pieces."""
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    words = ["env", f"TERM={term}", sys.executable, "-c", PROGRESS, str(seconds)]
    running = subprocess.Popen(words, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    pieces: list[bytes] = []
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            pieces.append(os.read(ours, 4096))
        except OSError:  # the other end has closed
            break
    os.close(ours)
    assert running.wait(timeout=10) == 0
    return pieces


def test_a_terminal_shows_what_goes_on_in_one_line() -> None:
    pieces = written(80, "xterm", 1.6)
    shown = [screen(b"".join(pieces[: k + 1])) for k in range(len(pieces))]
    assert ["  running: train 2 ranks 0 s"] in shown
    for seconds in (0, 1):
        line = f"  running: reference 2 ranks {seconds} s, single 1 rank {seconds} s"
        assert ["  train 2 ranks 5 steps", line] in shown
    assert shown[-1] == ["  train 2 ranks 5 steps", ""], "nothing is left of it at the end"


def test_a_narrow_terminal_never_wraps_and_others_get_plain_lines(capsys: Capsys) -> None:
    pieces = written(20, "xterm")
    shown = [line for k in range(len(pieces)) for line in screen(b"".join(pieces[: k + 1]))]
    assert max(len(line) for line in shown if "running" in line) == 19
    for term in ("dumb", ""):
        assert b"".join(written(80, term)) == b"  train 2 ranks 5 steps\r\n"
    with progress.Live(sys.stderr) as live:  # a pipe
        live("", ["train 2 ranks"])
        live("train 2 ranks 5 steps", [])
    assert capsys.readouterr().err == "  train 2 ranks 5 steps\n"
