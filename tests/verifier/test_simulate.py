"""The simulated tier: one process, a fake process group, the structure and traffic of any world
size.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from corpus import TESTS
from scripts import Command, training, written
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.verifier.config.target import Target, resolve
from verified_fsdp2.verifier.execute import Executor
from verified_fsdp2.verifier.isolation.worlds import Worlds
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import gather, planned, read, select, verify_with
from verified_fsdp2.verifier.report import renderers
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.verdict import Verdict

COUNTED = """
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo")
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    with CommDebugMode() as counter:
        loss = model(torch.ones(2, 16)).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if dist.get_rank() == 0:
            counts = {str(op): n for op, n in counter.get_comm_counts().items()}
            with open(OUT, "w") as file:
                json.dump(counts, file)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_counts_are_those_of_comm_debug_mode(launcher: Launcher, tmp_path: Path) -> None:
    counts = tmp_path.with_name(
        tmp_path.name + "-counts.json"
    )  # a run writes there because it is allowed to
    counts.touch()
    script = written(tmp_path, COUNTED.replace("OUT", repr(str(counts))), "script.py")
    verdict = verify_with(
        launcher,
        resolve(script, {"steps": 2, "allow_writes": str(counts)}),
        tmp_path / "work",
        ["run-completes"],
    )
    torch_counts = json.loads(counts.read_text())
    ours = verdict.facts["traffic"]
    assert sum(torch_counts.values()) > 0
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        names = (kind, kind.replace("all_", "all"))
        theirs = sum(n for op, n in torch_counts.items() if any(name in op for name in names))
        assert theirs == ours.get(f"{kind}_model", 0) + ours.get(f"{kind}_script", 0), (
            kind,
            torch_counts,
            ours,
        )


def test_counts_by_micro_batch(launcher: Launcher, tmp_path: Path) -> None:
    target = resolve(TESTS / "zoo" / "gradient_accumulation.py", {"steps": 2})
    verdict = verify_with(launcher, target, tmp_path / "work", ["accum-never-resynced"])
    found = verdict.facts["traffic_by_micro_batch"]
    assert found["reduce_scatter"] == [0, 0, 0, verdict.facts["groups"]]
    assert all(number > 0 for number in found["all_gather"])
    assert "reduce_scatter 0, 0, 0, 3" in " ".join(renderers(verbose=True)["text"](verdict).split())


BESIDE = """
thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), kwargs={"group": other})
thread.start()
thread.join()
"""


def test_what_another_thread_sends_is_not_counted(launcher: Launcher, tmp_path: Path) -> None:
    beside = training("other = dist.new_group()", "nn.Linear(16, 16)", "torch.ones(2, 16)", BESIDE)
    target = resolve(written(tmp_path, beside), {"steps": 3})
    facts = verify_with(launcher, target, tmp_path / "work", ["run-completes"]).facts
    assert facts["expected_traffic"] == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 0}
    counted = {key: value for key, value in facts["traffic"].items() if not key.endswith("bytes")}
    assert counted == {"fsdp_forwards": 1, "all_gather_model": 1, "reduce_scatter_model": 1}


def test_at_full_size_the_structure_is_the_same(launcher: Launcher, tmp_path: Path) -> None:
    target = resolve(TESTS / "zoo" / "minimal.py", {"steps": "3"})
    sized = replace(target, full_size=True)
    small, large = (
        verify_with(launcher, one, tmp_path / name, select((), (), "simulate"), tier="simulate")
        for one, name in ((target, "small"), (sized, "large"))
    )
    for key in ("parameters", "elements", "sharded", "groups", "largest_share", "mesh", "traffic"):
        assert small.facts[key] == large.facts[key], key
    found = [{f.rule: f.status for f in one.findings} for one in (small, large)]
    assert {
        rule: (found[0][rule], status)
        for rule, status in found[1].items()
        if found[0][rule] != status
    } == {}
    assert large.verdict == small.verdict == "pass"


LARGE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(0)
with torch.device("meta"):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(65536, 65536), nn.ReLU()) for _ in range(4)])
BLOCKS
fully_shard(model)
model.to_empty(device="cuda")
for param in model.parameters():
    nn.init.normal_(param, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    loss = model(torch.ones(2, 65536, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("blocks", "status"),
    [("", "fail"), ("for block in model:\n    fully_shard(block)", "pass")],
    ids=["root", "blocks"],
)
def test_a_fault_is_found_at_full_size(
    launcher: Launcher, tmp_path: Path, blocks: str, status: str
) -> None:
    """64 GiB of weights, of which this machine holds none."""
    script = written(tmp_path, LARGE.replace("BLOCKS", blocks), "train.py")
    target = replace(resolve(script, {"nproc": 64, "steps": 2}), full_size=True)
    verdict = verify_with(
        launcher, target, tmp_path / "work", ["run-completes", "root-only-wrap"], tier="simulate"
    )
    found = {f.rule: f.status for f in verdict.findings}
    assert found == {"run-completes": "pass", "root-only-wrap": status}, [
        f.evidence for f in verdict.findings
    ]
    (note,) = [note for note in verdict.environment["notes"] if "GiB" in note]  # type: ignore[attr-defined]
    assert "without memory" in note


def test_full_size_is_for_the_simulated_tier(tmp_path: Path, command: Command) -> None:
    script = written(tmp_path, LARGE, "train.py")
    assert "--tier simulate" in command("verify", script, "--full-size", code=2).err


def test_a_simulated_run_has_the_structure_of_a_real_one(
    launcher: Launcher, tmp_path: Path
) -> None:
    target = resolve(TESTS / "zoo" / "minimal.py", {"steps": "3"})
    real = verify_with(launcher, target, tmp_path / "real", ["root-only-wrap"]).facts
    fake = verify_with(
        launcher, target, tmp_path / "fake", ["root-only-wrap"], tier="simulate"
    ).facts
    for key in ("parameters", "elements", "sharded", "groups", "largest_share", "mesh", "traffic"):
        assert fake[key] == real[key], key


WIDE = """
mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
group = dist.new_group(backend="gloo")
assert dist.get_world_size() == 1024
states = [None] * 1024
dist.all_gather_object(states, {"rank": dist.get_rank()})
dist.barrier()
"""


def whole(launcher: Launcher, target: Target, work: Path) -> Verdict:
    return verify_with(launcher, target, work, select((), (), "simulate"), tier="simulate")


def open_or_failed(verdict: Verdict) -> list[tuple[str, str]]:
    return [
        (f.rule, f.evidence) for f in verdict.findings if f.status not in ("pass", "not_applicable")
    ]


def test_a_two_dimensional_mesh_of_many_ranks(launcher: Launcher, tmp_path: Path) -> None:
    wide = training(
        WIDE, "nn.Linear(64, 64)", "torch.ones(1, 64)", wrap="model, mesh=mesh", optimizer="AdamW"
    )
    verdict = whole(launcher, resolve(written(tmp_path, wide), {"nproc": 1024}), tmp_path / "work")
    assert (verdict.verdict, open_or_failed(verdict)) == ("pass", [])
    assert {f.tier for f in verdict.findings} == {"simulate", "static"}
    assert verdict.facts["mesh"] == {"dp_replicate": 128, "dp_shard": 8}
    assert verdict.facts["traffic"]["all_reduce_model"] == 1
    assert verdict.seconds < 10


def test_a_generated_project_as_one_rank_of_many(launcher: Launcher, tmp_path: Path) -> None:
    loaded = spec.load(
        TESTS.parent / "examples" / "two-nodes.yaml",
        ["train.global_batch=64", "train.micro_batch=1"],
    )
    scaffold.write(scaffold.render(loaded), tmp_path / "project")
    verdict = whole(launcher, resolve(tmp_path / "project", {"nproc": 64}), tmp_path / "work")
    assert (verdict.verdict, open_or_failed(verdict)) == ("pass", [])
    assert verdict.runs[0]["world_size"] == 64
    assert verdict.seconds < 30


def simulated(target: Target, launcher: Launcher, work: Path) -> Run | None:
    settings = planned(target, ["run-completes"], "simulate")
    return gather(settings, Executor(launcher, work, Worlds(work)), read(target)).train


def test_a_store_of_the_script_s_own_needs_no_server(launcher: Launcher, tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import os\nimport torch.distributed as dist\nstore ="
        ' dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 64,'
        ' False)\nstore.set("key", "7")\nprint("it is", store.get("key"))\n',
        "script.py",
    )
    run = simulated(resolve(script, {"nproc": 64, "timeout": 20}), launcher, tmp_path)
    assert run.completed


def test_a_script_that_refuses_is_open_and_not_passed(launcher: Launcher, tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "raise SystemExit('a global batch of 8 does not divide into 64 ranks')\n",
        "script.py",
    )
    verdict = whole(launcher, resolve(script, {"nproc": 64}), tmp_path / "work")
    assert verdict.verdict == "inconclusive"
    assert any("64 ranks" in f.evidence for f in verdict.findings)


def test_one_process_and_no_store(launcher: Launcher, tmp_path: Path) -> None:
    run = simulated(resolve(TESTS / "zoo" / "minimal.py", {"nproc": 8}), launcher, tmp_path)
    assert run.completed
    assert ([trace.rank for trace in run.traces], run.world_size) == ([0], 8)
