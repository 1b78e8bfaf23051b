"""What the guard is asked to do, and how it begins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verified_fsdp2.skill.cli import main
from verified_fsdp2.verifier.guard.settings import VARIABLE, Settings, read

SITE = Path(__file__).parents[3] / "verifier" / "guard" / "site"
TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(model.weight.detach().view(torch.int32).sum().item())
"""

# Reads of a value by the host in each step, for which a GPU would have to be waited for. (What a
# loss is divided by stays on the host.)
WAITS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 4))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
reads = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
for step in range(1, 13):
    tokens = torch.arange(8) * step % 9
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(2):
            model(tokens).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(step, sum(event.name in reads for event in seen.events()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(every=7, on_breach="stop", out="a folder/guard.jsonl", hook="cat > 'x'")],
)
def test_words_are_read_again(settings: Settings) -> None:
    assert read(settings.words()) == settings


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("evry=100", "did you mean 'every'"),
        ("every=often", "every is 'often', not a number"),
        ("every=0", "every is 0"),
        ("on-breach=panic", "one of warn, stop, checkpoint-and-stop"),
        ("hang=-1", "more than 0 seconds"),
    ],
)
def test_wrong_words_are_named(words: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(words)


def run(
    words: str, folder: Path, text: str = TRAIN, **more: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(text)
    path = os.pathsep.join([str(SITE), *([more["before"]] if "before" in more else [])])
    env = {**os.environ, VARIABLE: words, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, str(script)],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.launch
def test_a_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    plain, guarded = run("", tmp_path), run("every=10", tmp_path)
    assert plain.returncode == guarded.returncode == 0
    assert plain.stdout == guarded.stdout
    lines = (tmp_path / "guard.jsonl").read_text().splitlines()
    assert [kind(line) for line in lines] == ["start", "note", *["check"] * 4, "end"]
    assert {"loss", "norm", "step_seconds"} <= json.loads(lines[-2]).keys()


@pytest.mark.launch
def test_a_step_that_is_not_checked_waits_for_no_device(tmp_path: Path) -> None:
    plain, guarded = run("", tmp_path, WAITS), run("every=5", tmp_path, WAITS)
    without, with_it = (
        {int(step): int(count) for step, count in map(str.split, found.stdout.splitlines())}
        for found in (plain, guarded)
    )
    assert [*with_it] == [*range(1, 13)], guarded.stderr
    more = {step for step, count in with_it.items() if count > without[step]}
    assert more and more <= {1, 5, 10}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("every=10 out=/dev/full", "No space left on device; nothing more is written"),
        ("evry=10", "the run goes on without a guard"),
    ],
)
def test_a_guard_that_fails_ends_no_run(tmp_path: Path, words: str, says: str) -> None:
    found = run(words, tmp_path)
    assert found.returncode == 0
    assert found.stderr.count("\n") == 1
    assert says in found.stderr


@pytest.mark.launch
def test_another_sitecustomize_runs_too(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other one')")
    found = run("every=10", tmp_path, before=str(other))
    assert found.stdout.splitlines()[0] == "the other one"
    assert (tmp_path / "guard.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["guard"], "give the command after `--`"),
        (["guard", "--", "no-such-launcher", "train.py"], "there is no such command"),
        (["guard", "--every", "0", "--", "true"], "every is 0"),
        (["guard", "report"], "give the journal"),
    ],
)
def test_bad_use_of_the_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def kind(line: str) -> str:
    return str(json.loads(line)["kind"])
