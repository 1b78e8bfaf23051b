"""Capacity runs: a script on tensors without memory, as rank 0 of many."""

import functools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from scripts import Command, written
from verified_fsdp2.verifier.analysis.capacity import RESERVE, CapacityPlan, Trouble, judge
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.probe.substitutes.fake_tensors.traffic import moved
from verified_fsdp2.verifier.trace import Run, read_run
from verified_fsdp2.verifier.trace.events import CapacityRecord, Collective, Peak

WIDTH, HIDDEN, LAYERS, ROWS, VOCABULARY = 256, 1024, 4, 64, 2048
SCRIPT = f"""
import os
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear({WIDTH}, {HIDDEN}, bias=False)
        self.down = nn.Linear({HIDDEN}, {WIDTH}, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding({VOCABULARY}, {WIDTH})
        self.blocks = nn.ModuleList(Block() for _ in range({LAYERS}))
        self.head = nn.Linear({WIDTH}, {VOCABULARY}, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


with torch.device("meta"):
    model = Model()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
with torch.no_grad():
    for param in model.parameters():
        param.normal_(std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    tokens = torch.randint({VOCABULARY}, ({ROWS},)).to("cuda")
    logits = model(tokens)
    loss = F.cross_entropy(logits.float(), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())  # the read
"""
PARAMETERS = 2 * VOCABULARY * WIDTH + LAYERS * 2 * WIDTH * HIDDEN


def tried(
    launcher: Launcher, folder: Path, text: str = SCRIPT, ranks: int = 64, mode: str = "capacity"
) -> Run:
    """The run of a script as rank 0 of so many, or really with its memory counted."""
    script = written(folder, text, "train.py")
    work = folder.with_name(f"{folder.name}-{mode}-{ranks}")
    work.mkdir()
    request = Request(
        str(work),
        str(script),
        str(folder),
        world_size=ranks,
        mode=mode,
        cuda_on_cpu=True,
        steps=3,
        per_node=8,
        timeout=240,
    )
    return read_run(work, "capacity", launcher.run(request), ranks, "")


def record(run: Run) -> CapacityRecord:
    """The last record of a run."""
    found = run.traces[0].of(CapacityRecord)
    assert found, run.stderr
    assert not run.probe_errors
    return found[-1]


def peak(found: CapacityRecord, phase: str) -> Peak:
    return next(one for one in found.peaks if one.phase == phase)


def test_kinds_and_bytes_are_those_of_arithmetic(launcher: Launcher, tmp_path: Path) -> None:
    run = tried(launcher, tmp_path)
    found = record(run)
    assert (found.steps, found.world_size, found.mesh, found.tokens) == (
        3,
        64,
        {"dp_shard": 64},
        ROWS,
    )
    later = peak(found, "later steps")
    shard = 4 * PARAMETERS // 64
    assert later.kinds["sharded parameters"] == shard
    assert later.kinds["optimizer state"] == 2 * shard
    assert later.bytes == sum(later.kinds.values())
    assert later.at_line is not None and later.at_line.code == "loss.backward()"
    assert later.reserved >= later.bytes
    assert (
        "optimizer state" not in peak(found, "first step").kinds
        or peak(found, "first step").bytes >= later.bytes
    )
    step = [one for one in found.collectives if one.step == 3]
    sent = Counter[tuple[str, str, str]]()
    for one in step:
        sent[one.collective, one.phase, one.dtype] += one.count * one.bytes
        assert (one.group_size, one.stride) == (64, 1)
    assert sent["all_gather", "forward", "bfloat16"] == 2 * PARAMETERS
    assert sent["reduce_scatter", "backward", "float32"] == 4 * PARAMETERS
    assert {one.purpose for one in step} == {"parameters", "gradients"}
    forward = 2 * ROWS * (PARAMETERS - VOCABULARY * WIDTH)  # the embedding computes nothing
    assert sum(one.forward for one in found.flops.values()) == forward
    assert sum(one.backward for one in found.flops.values()) == 2 * forward
    assert found.flops["blocks.3.up"].dtype == "bfloat16"
    reads = [one for one in found.reads if one.in_step]
    assert [(one.what, one.count, one.at_line and one.at_line.code) for one in reads] == [
        ("item()", 3, "print(loss.item())  # the read")
    ]
    assert found.host_peak < 2 << 30


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "F.relu(": "F.silu(",
            "2048": "128",
            "(64,)": "(512,)",
        },  # whose backward calls others where it has no kernel
    ],
)
def test_memory_is_what_real_tensors_need(
    launcher: Launcher, tmp_path: Path, changes: dict[str, str]
) -> None:
    text = functools.reduce(lambda text, change: text.replace(*change), changes.items(), SCRIPT)
    fake, real = (
        record(tried(launcher, tmp_path, text, 2, mode)) for mode in ("capacity", "count")
    )
    for phase in ("initialisation", "first step", "later steps"):
        ours, theirs = peak(fake, phase), peak(real, phase)
        assert ours.bytes == pytest.approx(theirs.bytes, rel=0.02)
        for kind, size in theirs.kinds.items():
            if size > 0.01 * theirs.bytes:
                assert ours.kinds[kind] == pytest.approx(size, rel=0.02), kind


def test_a_norm_keeps_its_input_and_one_scale_for_each_row(
    launcher: Launcher, tmp_path: Path
) -> None:
    normed = SCRIPT.replace("self.up(x)", f"self.up(F.rms_norm(x, ({WIDTH},)))")
    later = [
        peak(record(tried(launcher, tmp_path, text, ranks)), "later steps")
        for text, ranks in ((SCRIPT, 64), (normed, 32))
    ]
    plain, with_norms = (one.kinds["activations"] for one in later)
    # As CUDA's one kernel (its parts keep 2 in float32); at the peak the last block's are free.
    assert with_norms - plain == (LAYERS - 1) * ROWS * (2 * WIDTH + 4)


OFFLOADED = (
    ('init_process_group("nccl")', 'init_process_group("cpu:gloo,cuda:nccl")'),
    ("import MixedPrecisionPolicy,", "import CPUOffloadPolicy, MixedPrecisionPolicy,"),
    ("mp_policy=policy)", "mp_policy=policy, offload_policy=CPUOffloadPolicy())"),
    ('model.to_empty(device="cuda")', 'model.to_empty(device="cpu")'),
    (
        "    loss.backward()\n",
        "    loss.backward()\n    F.cross_entropy(model(tokens).float(), tokens).backward()\n",
    ),
)


def test_offloaded_gradients_are_on_the_host(launcher: Launcher, tmp_path: Path) -> None:
    """FSDP2 copies each reduced gradient to the host, or adds it there."""
    text = SCRIPT
    for old, new in OFFLOADED:
        assert old in text
        text = text.replace(old, new)
    fake, real = (
        record(tried(launcher, tmp_path, text, 2, mode)) for mode in ("capacity", "count")
    )
    for phase in ("initialisation", "first step", "later steps"):
        ours, theirs = peak(fake, phase), peak(real, phase)
        assert ours.bytes == pytest.approx(theirs.bytes, rel=0.02)
        for kinds in (ours.kinds, theirs.kinds):
            assert not kinds.keys() & {"sharded parameters", "gradients", "optimizer state"}


def test_time_does_not_grow_with_ranks(launcher: Launcher, tmp_path: Path) -> None:
    seconds = {}
    for ranks in (8, 512):
        started = time.process_time()
        run = tried(launcher, tmp_path, ranks=ranks)
        seconds[ranks] = run.seconds
        assert time.process_time() - started < 5
        assert record(run).steps == 3
    assert seconds[512] < 3 * seconds[8] + 5


FAULTS = {
    "device": (
        'tokens = torch.randint(2048, (64,)).to("cuda")',
        "tokens = torch.randint(2048, (64,))",
    ),
    "meta": ('model.to_empty(device="cuda")\n', ""),
    "mesh": ("(dist.get_world_size(),)", "(dist.get_world_size() // 3,)"),
    "batch": (
        "for step in range(20):",
        (
            'assert 100 % dist.get_world_size() == 0, "a batch of 100 does not divide"\nfor step in'
            " range(20):"
        ),
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_error_of_production_is_found_with_its_line(
    launcher: Launcher, tmp_path: Path, kind: str
) -> None:
    old, new = FAULTS[kind]
    assert old in SCRIPT
    run = tried(launcher, tmp_path, SCRIPT.replace(old, new))
    found = judge(run, None)
    assert found.trouble is not None
    assert (found.trouble.kind, found.trouble.unfollowed, found.exit_code) == (
        kind,
        "",
        1,
    ), found.trouble
    assert found.trouble.at_line is not None


def test_script_that_needs_values_is_not_called_wrong(launcher: Launcher, tmp_path: Path) -> None:
    needs = SCRIPT.replace(
        "    print(loss.item())  # the read",
        '    if loss.item() > 0.5:\n        raise ValueError("diverged")',
    )
    found = judge(tried(launcher, tmp_path, needs), None)
    assert found.trouble is not None and "stand-ins" in found.trouble.unfollowed
    assert found.exit_code == 4
    assert found.record is not None and found.record.peaks


def test_whole_tensors_are_sent(launcher: Launcher, tmp_path: Path) -> None:
    sends = """
from torch.distributed.tensor import Shard, distribute_tensor
whole = torch.empty(16384, 1024, device="cuda")
dist.broadcast(whole, src=0)
distribute_tensor(whole, mesh, [Shard(0)])
optimizer = torch.optim"""
    run = tried(launcher, tmp_path, SCRIPT.replace("\noptimizer = torch.optim", sends, 1))
    assert judge(run, None).trouble is None
    before = {one.collective: one.bytes for one in record(run).collectives if one.step == 0}
    assert before == dict.fromkeys(("broadcast", "scatter"), 4 * 16384 * 1024)


def test_the_backend_is_the_one_that_the_script_asked_for(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Trainers choose their device by it, and stop at one that they do not know."""
    asks = """
half = dist.new_group([0])
backends = dist.get_backend(), dist.get_backend(half)
assert backends == ("nccl", "nccl"), backends
optimizer = torch.optim"""
    assert (
        judge(
            tried(launcher, tmp_path, SCRIPT.replace("\noptimizer = torch.optim", asks, 1)),
            None,
        ).trouble
        is None
    )


def test_operators_are_seen_in_parts_without_autograd(launcher: Launcher, tmp_path: Path) -> None:
    inside = """
    with torch.inference_mode():
        model(tokens)
        torch.empty(1 << 14, 1 << 14, device="cuda").t().flatten()
    optimizer.step()
"""
    found = record(tried(launcher, tmp_path, SCRIPT.replace("\n    optimizer.step()\n", inside, 1)))
    forward = 2 * ROWS * (PARAMETERS - VOCABULARY * WIDTH)
    assert sum(one.forward for one in found.flops.values()) == 2 * forward
    assert peak(found, "later steps").bytes > 2 * 4 << 28
    assert found.host_peak < 1 << 30


def test_module_is_planned(command: Command, folder: Path) -> None:
    (folder / "package").mkdir()
    written(
        folder / "package",
        SCRIPT.replace("import os", "import os\nfrom package import sizes", 1),
        "train.py",
    )
    written(folder / "package", "", "sizes.py")
    done = command(
        "plan", str(folder), "-m", "package.train", "--nproc", "8", "--steps", "2", "--json"
    )
    assert done.data["trouble"] is None and done.data["rehearsal"]["steps"] == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x + y", 3 * 4096),
        ("x + 1", 2 * 4096),
        ("x + torch.ones(1, 1, device='cuda').expand(32, 32)", 2 * 4096 + 4),
        ("x.view(1024)", 0),
        ("x.add_(y)", 2 * 4096),
        ("x[torch.tensor([3], device='cuda')]", 128),
        ("torch.empty_like(x)", 0),
        ("x.t().contiguous()", 2 * 4096),
    ],
)
def test_bytes_that_an_operator_moves(text: str, expected: int) -> None:
    x, y = torch.zeros(32, 32), torch.zeros(32, 32)
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.append(
                moved(
                    func,
                    [
                        one
                        for one in tree_flatten((args, kwargs))[0]
                        if isinstance(one, torch.Tensor)
                    ],
                    result,
                )
            )
            return result

    call = compile(text.replace(", device='cuda'", ""), "", "eval")
    with Seen():
        eval(call, {"torch": torch, "x": x, "y": y})
    assert max(seen) == expected


@pytest.mark.parametrize(
    "lacks", ['torch.load("weights.pt")', 'raise TimeoutError("no file of rank 1")']
)
def test_what_is_not_there_is_not_called_wrong(
    launcher: Launcher, tmp_path: Path, lacks: str
) -> None:
    """A file, or what another rank writes."""
    text = SCRIPT.replace("optimizer = torch", f"{lacks}\noptimizer = torch", 1)
    found = judge(tried(launcher, tmp_path, text), None)
    assert found.trouble is not None and found.trouble.unfollowed
    assert found.exit_code == 4


def _judged(
    tensors: int, reserved: int, memory: int | None, trouble: Trouble | None = None
) -> CapacityPlan:
    top = Peak(
        phase="later steps",
        bytes=tensors,
        reserved=reserved,
        expandable=tensors,
        kinds={"temporary": tensors},
        module="",
        at_line=None,
    )
    return CapacityPlan(CapacityRecord(world_size=8, steps=3, peaks=[top]), trouble, memory, 1.0)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "trouble", "fits", "tight", "code"),
    [
        (None, None, None, False, 0),
        (20 * GIB + RESERVE, None, True, False, 0),
        (20 * GIB + RESERVE - 1, None, None, True, 0),
        (16 * GIB + RESERVE - 1, None, False, False, 1),
        (80 * GIB, Trouble("device", "two devices", None), True, False, 1),
        (80 * GIB, Trouble("other", "no file", None, "it is not there"), True, False, 4),
    ],
)
def test_fits(
    memory: int | None, trouble: Trouble | None, fits: bool | None, tight: bool, code: int
) -> None:
    found = _judged(16 * GIB, 20 * GIB, memory, trouble)
    assert (found.fits, found.tight, found.exit_code) == (fits, tight, code)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py",), "--nproc"),
        (("train.py", "--nproc", "0"), "--nproc"),
        (("train.py", "--nproc", "8", "--timeout", "soon"), "--timeout"),
        (("train.py", "--nproc", "8", "--device-memory", "much"), "--device-memory"),
        (("train.py", "--nproc", "8", "--device-memory", "80GB"), "74.5GiB"),
        (("train.py", "--nproc", "8", "--set", "a=1"), "--set"),
        (("train.py", "--nproc", "8", "--gpus-per-node", "x"), "--gpus-per-node"),
        (("train.py", "--nproc", "8", "--gpu", "h10"), "'h100'"),
        (("train.py", "--nproc", "8", "--gpu", "none.yaml"), "none.yaml"),
        (("train.py", "--nproc", "8", "--network", "400"), "--gpu"),
        (("train.py", "--nproc", "8", "--gpu", "h100", "--network", "fast"), "--network"),
        (("none.py", "--nproc", "8"), "none.py"),
        (("none.yaml", "--nproc", "8"), "none.yaml"),
    ],
)
def test_bad_input_is_refused(
    command: Command, folder: Path, words: tuple[str, ...], message: str
) -> None:
    written(folder, SCRIPT, "train.py")
    done = command("plan", *words, code=2)
    assert message in done.err


def test_collective_is_data() -> None:
    one = Collective(
        collective="all_gather",
        group="dp",
        group_size=8,
        bytes=16,
        dtype="bfloat16",
        count=1,
        step=1,
        module="",
        phase="forward",
        purpose="parameters",
        stride=1,
    )
    again = CapacityRecord.from_json(
        CapacityRecord(world_size=8, steps=1, collectives=[one]).to_json()
    )
    assert again.collectives == [one]
