"""`fsdp2 verify` on scripts that behave badly: verdict, exit code, seconds, and what is left of
their processes.

    python benchmarks/awkward.py [--only NAME] [--launcher torchrun]

Every case is a small script that trains, with one awkward act of rank 1 in its third step (`ACTS`),
or a target that is none. The tests (tests/verifier/test_awkward.py) run the same cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "FSDP2_AWKWARD"
TEMPLATE = """\
import ctypes, os, pathlib, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def act(rank):
{act}

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        model(torch.full((2, 8), float(rank + step))).sum().backward()
        if step == 2 and {when}:
            act(rank)
        optimizer.step()
        optimizer.zero_grad()

main()
"""
ACT_LINE = TEMPLATE[: TEMPLATE.index("{act}")].count("\n") + 1
DAEMONS = """\
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)"""


@dataclass(frozen=True)
class Awkward:
    """One case.

    `act` runs on rank 1, or on all ranks if `everywhere`; `says` must stand in the finding on the
    run's end.
    """

    name: str
    act: str
    verdict: str
    says: tuple[str, ...] = ()
    everywhere: bool = False
    nproc: int = 2
    at_line: bool = False  # the finding's line is the first line of the act

    def write(self, folder: Path) -> Path:
        """The script, in `folder`."""
        path = folder / "script.py"
        lines = "\n".join("    " + line for line in self.act.splitlines())
        path.write_text(
            TEMPLATE.format(act=lines, when="True" if self.everywhere else "rank == 1"),
            encoding="utf-8",
        )
        return path


SILENT = "while the others went on"
ACTS = (
    Awkward(
        "hang", "time.sleep(600)", "fail", ("rank 1 was not in a collective", "act"), at_line=True
    ),
    Awkward(
        "ignores_sigterm",
        'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsubprocess.Popen(["sleep", "600"],'
        " start_new_session=True)\nwhile True:\n    time.sleep(600)",
        "fail",
        ("rank 1 was not in a collective",),
    ),
    Awkward("children", DAEMONS, "pass"),
    Awkward("prints_100_mb", "for _ in range(100):\n    print('x' * 2**20)", "pass"),
    Awkward(
        "os_exit_0",
        "os._exit(0)",
        "fail",
        ("rank 1 called os._exit(0) in script.py:", SILENT),
        at_line=True,
    ),
    Awkward(
        "sys_exit_7", "sys.exit(7)", "fail", ("rank 1 called sys.exit(7)", SILENT), at_line=True
    ),
    Awkward(
        "sigkill", "os.kill(os.getpid(), signal.SIGKILL)", "fail", ("rank 1 was ended by SIGKILL",)
    ),
    Awkward(
        "sigsegv",
        "ctypes.string_at(0)",
        "fail",
        ("rank 1 was ended by SIGSEGV", "act"),
        at_line=True,
    ),
    Awkward(
        "exception",
        "raise ValueError('bad')",
        "fail",
        ("rank 1 raised ValueError: bad in script.py:", "act <- :"),
        at_line=True,
    ),
    Awkward(
        "gloo_abort",
        "for _ in range(50):\n    dist.all_reduce(torch.ones(1 + 1000 * rank))",
        "fail",
        ("rank ",),
        everywhere=True,
    ),
    Awkward(
        "needs_3_ranks_has_2",
        "assert dist.get_world_size() == 3, 'needs 3 ranks'",
        "fail",
        ("raised AssertionError: needs 3 ranks",),
        everywhere=True,
        at_line=True,
    ),
    Awkward(
        "needs_3_ranks",
        "assert dist.get_world_size() == 3, 'needs 3 ranks'",
        "pass",
        everywhere=True,
        nproc=3,
    ),
    Awkward("reads_stdin", "assert sys.stdin.read() == ''", "pass", everywhere=True),
    Awkward("changes_folder", "os.chdir('/')", "pass", everywhere=True),
    Awkward(
        "loader_worker_ends", "list(torch.utils.data.DataLoader(range(4), num_workers=1))", "pass"
    ),
    Awkward("forks_without_exec", "if os.fork() == 0:\n    time.sleep(600)", "pass"),
    Awkward(
        "kills_its_group",
        "os.killpg(os.getpgrp(), signal.SIGKILL)",
        "fail",
        ("rank 1 was ended by SIGKILL",),
    ),
    Awkward(
        "writes_beside_itself",
        "pathlib.Path(__file__).with_name('mine.txt').write_text('x')",
        "pass",
    ),
)
NO_TARGETS = {
    "not_python": (b"x = = 1\n", 2, "script.py:1:5: this is not Python"),
    "not_text": (b"\x7fELF\0\0", 2, "this is not Python"),
    "does_not_exist": (None, 2, "no such file or folder"),
    "empty": (b"", 4, "the script ended without a step"),
}


@dataclass(frozen=True)
class Row:
    """What came of one case."""

    name: str
    exit: int
    seconds: float
    left: tuple[str, ...]  # command lines of processes that the verification left behind
    kept: int  # bytes in the folder of the runs
    text: str


def verify(
    name: str, script: Path, options: list[str], folder: Path, before: tuple[str, ...] = ()
) -> Row:
    """Run the command on a target; `before` is what it is run with, such as `unshare`."""
    mark = uuid.uuid4().hex
    work = folder / "work"
    command = [
        *before,
        "env",
        "-C",
        folder,
        f"{MARK}={mark}",
        sys.executable,
        "-m",
        "verified_fsdp2.skill",
        "verify",
    ]
    started = time.monotonic()
    done = subprocess.run(
        [*command, script, "--only", "run-completes", "--json", "--work", work, *options],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    seconds = time.monotonic() - started
    kept = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    text = done.stderr.strip()
    with contextlib.suppress(ValueError):
        report = json.loads(done.stdout)
        text = report.get("refused") or report["findings"][0]["evidence"]
    return Row(name, done.returncode, seconds, tuple(marked(mark)), kept, text)


def marked(mark: str) -> Iterator[str]:
    """The command lines of all living processes that have inherited `mark` in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if mark.encode() in (folder / "environ").read_bytes() and not dead:
                yield (folder / "cmdline").read_text().replace("\0", " ").strip()


def rows(only: str, launcher: str) -> Iterator[Row]:
    """Every case, one after the other."""
    options = ["--launcher", launcher, "--timeout", "20" if launcher == "fork" else "60"]
    for case in ACTS:
        if only in case.name:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                yield verify(
                    case.name, case.write(folder), [*options, "--nproc", str(case.nproc)], folder
                )
    for name, (content, _, _) in NO_TARGETS.items():
        if only in name:
            with tempfile.TemporaryDirectory() as place:
                script = Path(place) / "script.py"
                if content is not None:
                    script.write_bytes(content)
                yield verify(name, script, options, Path(place))
    if only in "no_train_py":
        with tempfile.TemporaryDirectory() as place:
            yield verify("no_train_py", Path(place), options, Path(place))
    if only in "no_loopback":
        with tempfile.TemporaryDirectory() as place:
            yield verify(
                "no_loopback", ACTS[0].write(Path(place)), options, Path(place), ("unshare", "-rn")
            )


def main() -> int:
    """Print the table; 1 if anything was left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--launcher", default="fork", choices=("fork", "torchrun"))
    options = parser.parse_args()
    bad = 0
    print(f"{'case':<22}{'exit':>5}{'seconds':>9}{'left':>6}{'kept':>10}  text")
    for row in rows(options.only, options.launcher):
        text = row.text.replace("\n", " ")[:110]
        print(
            f"{row.name:<22}{row.exit:>5}{row.seconds:>9.1f}{len(row.left):>6}{row.kept:>10,} "
            f" {text}",
            flush=True,
        )
        bad += len(row.left)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
