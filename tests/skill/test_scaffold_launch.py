"""Generated projects, really run: the same losses on any number of ranks, resume, and a clean stop.

The quickstart's verification (tests/test_scaffold_verified.py) covers losses, resume and reshard in
`make test`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint_project import flip
from records import cases
from scripts import TORCHRUN, forked, python
from trees import SMALL, write_project
from verified_fsdp2.verifier.isolation.proc import children

pytestmark = pytest.mark.launch
STEPS = 6
# Some right gloo runs die like this at interpreter exit, when their work is done (pytorch#190489):
# no fault of the project.
TEARDOWN_ABORT = "terminate called without an active exception\n"
EXACT = ("step", "loss", "grad_norm", "lr")
SPEC = {
    **SMALL,
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 20, "global_batch": 8, "max_norm": 0.5},
    "checkpoint": {"keep": 9},
    "verify": {"reshard_to": [4]},
}


def start(
    project: Path, ranks: int, out: Path, *flags: str, restarts: int = 0
) -> subprocess.Popen[str]:
    launcher = (
        [*TORCHRUN, str(ranks), "--max-restarts", str(restarts)] if ranks > 1 else ["-W", "error"]
    )
    command = [sys.executable, *launcher, "train.py", "--out", str(out), *flags]
    return subprocess.Popen(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def shown_until(process: subprocess.Popen[str], step: int) -> str:
    shown = ""
    for line in process.stdout or ():
        shown += line
        if line.startswith(f"step {step:6}"):
            break
    return shown


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            # torchrun hands it on to its ranks; a kill would leave them running
            process.terminate()
            process.communicate(timeout=60)
    if TEARDOWN_ABORT not in output:
        assert process.returncode == status, output[-3000:]
    return output.replace(TEARDOWN_ABORT, "")


def run(
    project: Path, ranks: int, out: Path, steps: int = STEPS, *flags: str
) -> list[dict[str, Any]]:
    """The steps of a run with `start`'s flags in forked ranks, which import torch once for all
    runs.
    """
    forked(project, ranks, "--out", out, "--steps", steps, *flags)
    return steps_of(out)


def steps_of(out: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (out / "run-001" / "metrics.jsonl").read_text().splitlines())
    return [{key: record[key] for key in EXACT} for record in records if "loss" in record]


def assert_close(
    found: list[dict[str, Any]], wanted: list[dict[str, Any]], limit: float = 1e-6
) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert {key: one[key] for key in EXACT} == pytest.approx(
            {key: other[key] for key in EXACT}, rel=limit
        )


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_project(tmp_path_factory.mktemp("sample"), SPEC)


@pytest.fixture(scope="module")
def undisturbed(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    run(sample, 2, out, STEPS, "--checkpoint-interval", "1")
    return out


@pytest.fixture(scope="module")
def straight(undisturbed: Path) -> list[dict[str, Any]]:
    return steps_of(undisturbed)


def stopped_at(step: int, undisturbed: Path, out: Path) -> Path:
    """The run as if it had gone no further than this step."""
    shutil.copytree(undisturbed, out, dirs_exist_ok=True)
    for checkpoint in (out / "run-001" / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    return out


@pytest.mark.parametrize("mode", ["sync", pytest.param("process", marks=pytest.mark.full)])
def test_sigterm_leaves_a_checkpoint(mode: str, tmp_path: Path) -> None:
    """torchrun signals all processes of a rank: that which writes, too, here while it is being
    started.
    """
    folder = write_project(tmp_path, SPEC, f"checkpoint.mode={mode}", "checkpoint.keep=1")
    process = start(folder, 2, tmp_path / "out", "--steps", "1000000", "--checkpoint-interval", "2")
    shown = shown_until(process, 3)
    process.send_signal(signal.SIGTERM)
    # torchrun always returns 1 after a signal, whatever its ranks return
    shown += finish(process, status=1)
    assert "continue with --resume" in shown
    last = steps_of(tmp_path / "out")[-1]["step"]
    assert [path.name for path in (tmp_path / "out/run-001/checkpoints").iterdir()] == [
        f"step_{last:08d}"
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_and_a_second_one_ends_it(ranks: int, tmp_path: Path) -> None:
    """torchrun sends SIGINT to its ranks, and SIGTERM for the second one."""
    folder = write_project(tmp_path, SPEC)
    process = start(folder, ranks, tmp_path / "out", "--steps", "1000000")
    shown = shown_until(process, 3)
    process.send_signal(signal.SIGINT)
    shown += finish(process, status=ranks - 1)
    assert "KeyboardInterrupt" not in shown and ("Traceback" in shown) == (ranks > 1)
    last = steps_of(tmp_path / "out")[-1]["step"]
    saved, ended = re.findall(r"^(?:saved|stopped) .*$", shown, flags=re.MULTILINE)
    assert saved.startswith(f"saved step_{last:08d}, ") and ended.startswith("stopped by a signal")

    text = (folder / "checkpoint.py").read_text()
    assert text.count("        dcp.save(") == 1
    slow = '        print("saving", flush=True)\n        time.sleep(600)\n        dcp.save('
    (folder / "checkpoint.py").write_text(text.replace("        dcp.save(", slow))
    process = start(folder, ranks, tmp_path / "again", "--steps", "1000000")
    shown_until(process, 1)
    process.send_signal(signal.SIGINT)
    for line in process.stdout or ():
        if line == "saving\n":
            break
    process.send_signal(signal.SIGINT)
    assert "stopped" not in finish(process, status=-signal.SIGINT if ranks == 1 else 1)
    assert not [*(tmp_path / "again/run-001/checkpoints").iterdir()]


@pytest.mark.full
def test_ranks_that_torchrun_restarts_go_on_by_themselves(
    straight: list[dict[str, Any]], tmp_path: Path
) -> None:
    flags = ("--steps", "40", "--checkpoint-interval", "2")
    process = start(
        write_project(tmp_path, SPEC, "checkpoint.mode=thread"),
        2,
        tmp_path / "out",
        *flags,
        restarts=1,
    )
    shown = shown_until(process, 5)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    shown += finish(process)
    starts = re.findall(r"^run .*, step (\d+) of 40", shown, flags=re.MULTILINE)
    assert len(starts) == 2 and 2 <= int(starts[1]) <= 38 and int(starts[1]) % 2 == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run-001"]
    found = steps_of(tmp_path / "out")
    assert [record["step"] for record in found] == list(range(1, 41))
    assert found[:STEPS] == straight


@pytest.mark.full
def test_a_damaged_checkpoint_is_refused(
    sample: Path, undisturbed: Path, straight: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = stopped_at(4, undisturbed, tmp_path) / "run-001" / "checkpoints"
    flip(folder / "step_00000004" / "__1_0.distcp")
    shown = finish(start(sample, 2, tmp_path, "--steps", str(STEPS), "--resume"))
    assert (
        f"warning: {folder}/step_00000004 is damaged (__1_0.distcp), it is"
        " step_00000004.damaged now" in shown
    )
    assert f"run    {tmp_path}/run-001, step 3 of {STEPS}" in shown
    assert steps_of(tmp_path) == straight
    for checkpoint in folder.glob("step_*"):
        flip(checkpoint / ".metadata")
    shown = finish(start(sample, 1, tmp_path, "--resume"), status=2)
    assert (
        shown.splitlines()[-1] == f"error: nothing to resume: no complete checkpoint in {tmp_path}"
    )


@pytest.mark.full
def test_a_full_disk_leaves_the_last_good_checkpoint(
    sample: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A limit on the size of a file stands for the disk: it gets in the way of the data, and of
    nothing else.
    """
    stopped_at(2, undisturbed, tmp_path)
    limit = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
    )
    program = limit + "runpy.run_path('train.py', run_name='__main__')"
    done = python(
        "-c", program, "--out", tmp_path, "--steps", "5", "--resume", cwd=sample, status=None
    )
    assert done.returncode == 1 or TEARDOWN_ABORT in done.stderr
    folder = tmp_path / "run-001" / "checkpoints"
    last = folder / "step_00000002"
    assert re.fullmatch(
        rf"error: step_00000005 could not be saved: .* were free\); last good checkpoint: {last}\n",
        done.stderr.replace(TEARDOWN_ABORT, ""),
    ), done.stderr
    assert max(path.name for path in folder.iterdir()) == last.name


@pytest.mark.full
def test_hsdp_in_bfloat16_with_async_checkpoints(tmp_path: Path) -> None:
    settings = [
        "parallel.dp_replicate=2",
        "precision.param_dtype=bfloat16",
        "checkpoint.mode=thread",
    ]
    out = write_project(
        tmp_path, SPEC, *settings, "verify.nproc=4", "verify.reshard_to=[2]", "checkpoint.keep=2"
    )
    straight = run(out, 4, tmp_path, 6, "--checkpoint-interval", "2")
    folder = tmp_path / "run-001" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000004", "step_00000006"]
    shutil.rmtree(folder / "step_00000006")
    assert run(out, 4, tmp_path, 6, "--resume") == straight


@pytest.mark.full
@cases(
    "flags, message",
    (["--micro-batch", "3"], "error: a global batch of 8 samples does not divide"),
    (["--resume"], "error: nothing to resume"),
)
def test_what_the_user_can_correct_is_one_line(
    sample: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    output = finish(start(sample, 1, tmp_path, *flags), status=2)
    assert output.startswith(message) and output.count("\n") == 1


@pytest.mark.full
def test_its_own_tests_pass(sample: Path) -> None:
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=sample)
