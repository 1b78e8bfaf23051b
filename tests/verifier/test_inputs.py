"""How commands open what they read: regular files, of a bounded size, without waiting."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from records import Patch, cases
from scripts import FAULTS, Command, written
from verified_fsdp2.verifier.config.reading import inputs

LATE = (FAULTS / "optim_before_shard.py").read_text(encoding="utf-8")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the whole path may be too long


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": a_socket,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
}


@cases("kind", *KINDS)
def test_what_is_no_regular_file(kind: str, folder: Path) -> None:
    KINDS[kind](folder / "x")
    with pytest.raises(inputs.Refused, match=kind):
        inputs.whole(folder / "x", 10)


def test_files(tmp_path: Path) -> None:
    path = written(tmp_path, "0123456789")
    assert (inputs.whole(path, 10), inputs.head(path, 3), inputs.text(path, 10)) == (
        b"0123456789",
        b"012",
        "0123456789",
    )
    with pytest.raises(inputs.Refused, match="larger than 0 KiB"):
        inputs.whole(path, 9)
    with path.open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(inputs.Refused, match="larger than 4 MiB"):
        inputs.whole(path, inputs.SCRIPT)
    assert inputs.whole(Path("/dev/null"), 10) == b""
    for other in (tmp_path, tmp_path / "none", tmp_path / "none" / "x"):
        with pytest.raises(OSError):
            inputs.whole(other, 10)
    written(tmp_path, "a\r\nb", "dos")
    assert inputs.text(tmp_path / "dos", 10) == "a\nb"


@cases(
    "words",
    ("lint", "x.py"),
    ("lint", "--migrate", "x.py"),
    ("lint", "train.py", "--baseline", "x.py"),
    ("spec", "check", "x.py"),
    ("spec", "show", "x.py"),
    ("new", "x.py", "out"),
    ("verify", "x.py"),
    ("verify", "train.py", "--config", "x.py"),
    ("verify", "train.py", "--baseline", "x.py"),
    ("plan", "x.py", "--nproc", "2"),
    ("convert", "x.py", "-o", "new.py"),
    ("report", "matches-ddp", "x.py"),
    ids=" ".join,
)
def test_no_command_waits(words: tuple[str, ...], folder: Path, command: Command) -> None:
    written(folder, LATE)
    os.mkfifo("x.py")
    error = command(*words, code=2).err
    assert "x.py" in error and error.count("\n") == 1


COPY = ".claude/skills/verified-fsdp2"


@cases("name", f"{COPY}/INSTALLED.json", ".fsdp2/manifest.json", "verify.yaml")
def test_no_command_waits_for_what_it_finds(name: str, folder: Path, command: Command) -> None:
    written(folder, LATE)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(name)
    commands = {
        "I": ("install", "--check", "--client", "claude"),
        "m": ("diff", "."),
        "v": ("verify", ".", "--tier", "static"),
    }
    assert name in command(*commands[Path(name).name[0]], code=2).err


def test_lint_of_a_folder_leaves_out_what_is_no_file(folder: Path, command: Command) -> None:
    written(folder, LATE)
    os.mkfifo("x.py")
    found = command("lint", ".", "--json", code=1).data
    assert found["facts"]["sources"]["files"] == 1
    os.unlink("train.py")
    command("lint", ".", code=2)


def test_a_module_that_is_too_large_is_not_followed(folder: Path, command: Command) -> None:
    written(folder, f"import helper\n{LATE}")
    Path("helper.py").touch()
    os.truncate("helper.py", 1 << 32)
    command("lint", "train.py", code=1)


# -- what the caller has connected to a descriptor


def test_a_pipe_is_read_once_and_may_be_asked_for_again() -> None:
    reader, writer = os.pipe()
    path = Path(f"/dev/fd/{reader}")
    os.write(writer, b"abc")
    threading.Timer(0.1, lambda: (os.write(writer, b"def"), os.close(writer))).start()
    assert [inputs.whole(path, 10), inputs.head(path, 2)] == [b"abcdef", b"ab"]
    os.close(reader)
    with pytest.raises(OSError):
        inputs.whole(path, 10)
    with pytest.raises(OSError):
        inputs.whole(Path("/dev/fd/9999999999999999999999"), 10)


def test_a_pipe_that_does_not_end(monkeypatch: Patch) -> None:
    monkeypatch.setattr(inputs, "PATIENCE", 0.1)
    reader, writer = os.pipe()
    os.write(writer, b"abc")
    started = time.monotonic()
    with pytest.raises(inputs.Refused, match="not ended"):
        inputs.whole(Path(f"/dev/fd/{reader}"), 10)
    assert time.monotonic() - started < 5
    os.close(reader)
    os.close(writer)


@cases("words", ("spec", "check"), ("lint",))
def test_standard_input_and_process_substitution(words: tuple[str, ...], folder: Path) -> None:
    files = {
        "spec": FAULTS.parents[1] / "examples" / "quickstart.yaml",
        "lint": FAULTS / "optim_before_shard.py",
    }
    file, code = files[words[0]], int(words[0] == "lint")
    command = [sys.executable, "-m", "verified_fsdp2.skill", *words]
    of_stdin = [*command, "/dev/stdin"]
    plain = subprocess.run(of_stdin, input=file.read_bytes(), capture_output=True, timeout=60)
    line = ["bash", "-c", '"$@" <(cat "$0")', file, *command]
    substituted = subprocess.run(line, capture_output=True, timeout=60, check=False)
    with file.open("rb") as opened:
        redirected = subprocess.run(of_stdin, stdin=opened, capture_output=True, timeout=60)
    assert [done.returncode for done in (plain, substituted, redirected)] == [code] * 3, substituted
