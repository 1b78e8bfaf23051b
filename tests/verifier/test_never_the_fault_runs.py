"""What the verifier does to a run, and to the user's files, is never reported as a fault of the
script.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from records import cases, run, steps
from scripts import FAULTS, Verify, written
from verified_fsdp2.verifier.analysis.checkpoints import loaded_before, unwritten
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.pipeline import planned, select, verify_with
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.source.scan import scan
from verified_fsdp2.verifier.stages.results import without_metadata
from verified_fsdp2.verifier.verdict import Verdict

SCRIPT = """\
import argparse, os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--resume")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state(done):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "done": done}


def save(folder, done):
    dcp.save(state(done), checkpoint_id=folder)


def load(folder):
    found = state(0)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    return found["done"]


begin = 0
#begin
for number in range(begin, 20):
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).chunk(world)[rank]
    optimizer.zero_grad()
    model(data).square().mean().backward()
    #gradients
    optimizer.step()
    #stepped
dist.destroy_process_group()
"""
SAVES = (
    'if args.out and (number + 1) % 2 == 0:\n        save(f"{args.out}/step_{number + 1}", number'
    " + 1)"
)
RESUMES = "if args.resume:\n    begin = load(args.resume)"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """write(begin=, gradients=, stepped=) -> the script, in the current folder, which is a project
    of its own.
    """
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)

    def made(**parts: str) -> Path:
        text = SCRIPT
        for name, part in parts.items():
            text = text.replace(f"#{name}", part)
        return written(project, text)

    return made


def statuses(verdict: Verdict) -> dict[str, str]:
    return {f.rule: f.status for f in verdict.findings}


def tree(folder: Path) -> dict[str, bytes]:
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


CHECKS_ITS_NORM = """norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e2)
    if norm > 1e3: raise RuntimeError("it diverges")"""


def test_huge_gradients_are_not_in_the_run_whose_end_is_judged(
    write: Write, verify_script: Verify
) -> None:
    verdict = verify_script(
        write(gradients=CHECKS_ITS_NORM), ("run-completes", "manual-local-norm-clip")
    )
    assert [(run["role"], run["completed"]) for run in verdict.runs] == [
        ("train", True),
        ("provoked", False),
    ]
    assert statuses(verdict)["run-completes"] == "pass"
    assert statuses(verdict)["manual-local-norm-clip"] != "fail"


def test_memory_is_filled_only_where_it_is_looked_for(write: Write, verify_script: Verify) -> None:
    """What is written by arithmetic on memory that nobody has written is wrong, and seen; the
    script's end is its own.
    """
    begin = (
        'model.to_empty(device="cpu")\nfor p in model.parameters():\n    torch.nn.init.normal_(p)'
    )
    verdict = verify_script(write(begin=begin), ("run-completes", "meta-params-not-reset"))
    assert statuses(verdict) == {"run-completes": "pass", "meta-params-not-reset": "pass"}
    assert [run["role"] for run in verdict.runs] == ["train", "provoked"]


def test_what_touches_no_gradient_is_not_provoked(write: Write) -> None:
    assert not scan(write()).gradients
    assert scan(write(gradients=CHECKS_ITS_NORM)).gradients


RESUMES_BY_ITSELF = 'if os.path.exists("ckpt/.metadata"):\n    begin = load("ckpt")'
SAVES_ALWAYS = (
    'if number < 4: save("ckpt", number + 1)\n    if rank == 0: open("log.txt", "a").write("a'
    ' step\\n")'
)


def test_runs_do_not_meet_in_a_fixed_folder(
    write: Write, verify_script: Verify, tmp_path: Path
) -> None:
    script = write(begin=RESUMES_BY_ITSELF, stepped=SAVES_ALWAYS)
    (script.parent / "log.txt").write_text("mine\n")
    before = tree(script.parent)
    verdict = verify_script(
        script, ("run-completes", "matches-ddp", "checkpoint-holds-what-ranks-held")
    )
    assert set(statuses(verdict).values()) == {"pass"}, verdict.findings
    assert tree(script.parent) == before and not (script.parent / "ckpt").exists()
    assert any("log.txt" in note or "ckpt" in note for note in verdict.environment["notes"])


@pytest.mark.full
def test_a_checkpoint_that_was_there_before_is_named(
    write: Write, verify_script: Verify, tmp_path: Path
) -> None:
    """A first run outside of it leaves a checkpoint; a verification must not go on from it in
    silence.
    """
    script = write(begin=RESUMES_BY_ITSELF, stepped=SAVES_ALWAYS)
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    with Launcher() as own:
        own.run(Request(str(by_hand), str(script), str(script.parent), world_size=2, steps=2))
    before = tree(script.parent)
    assert any(name.startswith("ckpt/") for name in before)
    (found,) = verify_script(script, ("resume-is-exact",), resume_args="--resume ckpt").findings
    assert found.status == "inconclusive" and str(script.parent / "ckpt") in found.evidence
    assert tree(script.parent) == before


def test_what_a_run_loads_of_its_own_is_not_there_before(tmp_path: Path) -> None:
    load = {"kind": "checkpoint", "op": "load", "to": "/x/ckpt", "after_step": 0, "keys": []}
    assert "/x/ckpt" in loaded_before(run([load]), ())
    assert loaded_before(run([{**load, "to": str(tmp_path)}]), (), without_metadata) == "", (
        "pretrained safetensors"
    )
    (tmp_path / ".metadata").touch()
    assert str(tmp_path) in loaded_before(
        run([{**load, "to": str(tmp_path)}]), (), without_metadata
    )
    assert loaded_before(run([load]), ("/x/ckpt",)) == ""
    assert loaded_before(run([{**load, "op": "torch.load", "to": "/x/pretrained.pt"}]), ()) == ""


def test_an_export_to_a_fixed_path_is_given_back(write: Write, verify_script: Verify) -> None:
    export = (
        SAVES + "\n    whole = {name: p.full_tensor() for name, p in model.named_parameters()}"
        '\n    if rank == 0 and number == 2: torch.save(whole, "export.pt")'
    )
    script = write(begin=RESUMES, stepped=export)
    (script.parent / "export.pt").write_bytes(b"of the user")
    before = tree(script.parent)
    only = ("checkpoint-holds-what-ranks-held", "resume-is-exact")
    options = {
        "save_args": "--out {checkpoint}",
        "resume_args": "--resume {checkpoint}/step_4",
        "reshard_to": "",
    }
    verdict = verify_script(script, only, **options)
    assert set(statuses(verdict).values()) == {"pass"}, verdict.findings
    assert tree(script.parent) == before


@cases(
    "flags, option",
    ({"args": ["--no-such"]}, "after `--`"),
    ({"save_args": "--out {checkpoint} --sve"}, "--save-args"),
    (
        {"save_args": "--out {checkpoint}", "resume_args": "--resum {checkpoint}/step_4 --no-such"},
        "--resume-args",
    ),
)
def test_arguments_that_the_script_refuses_are_a_usage_error(
    write: Write, verify_script: Verify, flags: dict[str, str], option: str
) -> None:
    with pytest.raises(UserError) as error:
        verify_script(
            write(begin=RESUMES, stepped=SAVES), ("resume-is-exact",), reshard_to="", **flags
        )
    assert option in str(error.value) and "unrecognized arguments" in str(error.value)


@cases("step", 6, 500)
def test_steps_are_chosen_so_that_the_checkpoint_is_written(
    write: Write, verify_script: Verify, step: int
) -> None:
    resume = f"--resume {{checkpoint}}/step_{step}"
    options = {"save_args": "--out {checkpoint}", "resume_args": resume, "reshard_to": ""}
    script = write(begin=RESUMES, stepped=SAVES)
    if step == 6:
        verdict = verify_script(script, ("resume-is-exact",), **options)
        assert statuses(verdict) == {"resume-is-exact": "pass"}, verdict.findings
        return
    with pytest.raises(UserError, match=r"\{checkpoint\}/step_500.*\{checkpoint\}/step_2"):
        verify_script(script, ("resume-is-exact",), **options)


@cases(
    "words, lost",
    (("--resume", "{checkpoint}/step_4"), ""),
    (("--resume={checkpoint}/step_6",), "step_6"),
    (("--resume", "{checkpoint}"), ""),
    (("--resume", "{checkpoint}/step_4", "--out", "{checkpoint}/again"), ""),
    (("--resume", "{checkpoint}/step"), ""),
)
def test_paths_that_resume_args_name(words: tuple[str, ...], lost: str) -> None:
    assert unwritten(words, ["step_2", "step_4", "step_4/.metadata"]) == lost


class TestCheckpointsThatAreNotThere:
    def judged(self, **more: Any) -> dict[str, str]:
        train = run(steps(), steps())
        names = [name for name, rule in RULES.items() if rule.about_checkpoints]
        return {f.rule: f.status for f in judge(Evidence(train=train, **more), names)}

    def test_a_script_that_saves_nothing(self) -> None:
        assert set(self.judged().values()) == {"not_applicable"}
        assert {"resume-is-exact", "reshard-keeps-trajectory"} <= set(self.judged())

    def test_one_whose_sources_can_save(self, write: Write) -> None:
        saving = scan(write(stepped=SAVES)).saving
        assert saving is not None and saving.function == "save"
        assert set(self.judged(saving=saving).values()) == {"not_covered"}

    @cases(
        "line, saves",
        ("torch.save(model, 'x')\ntorch.load('x')", True),
        ("torch.save(model, 'x')", False),  # an export: nothing is ever loaded
        ("from torch import save as put\nput(1, 'x')\ntorch.load('x')", True),
        ("import torch.distributed.checkpoint as c\nc.async_save({})", True),
        ("manager.save(step, model.state_dict())", True),
        ("trainer.save_model('x')", True),
        ("image.save('x.png')", False),
        ("model.state_dict()", False),
    )
    def test_what_counts_as_saving(self, tmp_path: Path, line: str, saves: bool) -> None:
        script = written(tmp_path, f"import torch\n{line}\n")
        assert (scan(script).saving is not None) is saves

    def test_skip_checkpoint_leaves_out_all_that_needs_a_resume(self, write: Write) -> None:
        chosen = select((), ("checkpoint",))
        assert not any(RULES[name].about_checkpoints for name in chosen)
        assert "resume" not in planned(resolve(write(), {}), chosen).needs
        assert "resume" in planned(resolve(write(), {}), select((), ())).needs


def test_a_failure_of_the_first_run_is_reported_before_later_runs_begin(
    launcher: Launcher, tmp_path: Path
) -> None:
    lines: list[tuple[str, tuple[str, ...]]] = []

    def progress(line: str, going: Sequence[str]) -> None:
        lines.append((line, tuple(going)))

    script = FAULTS / "optim_before_shard.py"
    chosen = select(("optim-before-shard", "matches-ddp"), ())
    verify_with(launcher, resolve(script, {"steps": 5}), tmp_path / "work", chosen, progress)
    first = next(n for n, (line, _) in enumerate(lines) if "optim-before-shard" in line)
    assert first < next(
        n
        for n, (_, going) in enumerate(lines)
        if any(name.startswith("reference") for name in going)
    )
    assert script.name in lines[first][0]


DEFAULT_DEVICE = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 32))
for part in (model[1], model[3], model):
    fully_shard(part)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.randint(0, 32, (64, 9))
torch.set_default_device("meta")
made = (torch.randint(2, (1,)), torch.randn(1), torch.rand(1), torch.empty(1))
assert all(one.is_meta for one in made)
for step in range(6):
    share = 8 // dist.get_world_size()
    batch = tokens[step * 8 + dist.get_rank() * share :][:share]
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_default_device_serves_the_script_alone(verify_script: Verify, tmp_path: Path) -> None:
    """A loop that makes no tensor is right with any default device; what the probe makes must not
    follow it.
    """
    verdict = verify_script(written(tmp_path, DEFAULT_DEVICE))
    assert verdict.verdict == "pass"
