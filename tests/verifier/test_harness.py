"""How ranks are started: as a module, by fork or by torchrun, beside one another, several on a
GPU.
"""

import json
import os
import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from made_up import made_up_plan

from records import Patch, cases
from scripts import FAULTS, TORCHRUN, ZOO, Command, Verify, python, training, written
from trees import build_file_tree
from verified_fsdp2.verifier import stages
from verified_fsdp2.verifier.config.modules import find, root
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.execute import Executor, backend_for
from verified_fsdp2.verifier.isolation.worlds import Worlds
from verified_fsdp2.verifier.launch import devices, manager, sharing
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.planned import PlannedRun
from verified_fsdp2.verifier.launch.rank_slots import free_memory, room
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.pipeline import planned, select, verify_with
from verified_fsdp2.verifier.source import environment as settings
from verified_fsdp2.verifier.source.project import Files
from verified_fsdp2.verifier.source.sources import project_files

TRAIN = """\
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from .model import build
from pkg.data import batch
import common

assert __name__ == "__main__" and __package__ == "pkg", (__name__, __package__)
assert sys.path[0] == os.getcwd() and sys.argv[0] == __file__, (sys.path[0], sys.argv)
assert sys.argv[1:] == ["--lr", "0.1"]

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
    for step in range(10):
        model(batch(step, dist.get_rank(), dist.get_world_size())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""
DATA = """\
import torch
def batch(step, rank, world):
    torch.manual_seed(step)
    return torch.randn(8, 8).chunk(world)[rank]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    files = {
        "pkg/__init__.py": "",
        "pkg/train.py": TRAIN,
        "pkg/data.py": DATA,
        "pkg/other.py": "x = 1\n",
    }
    files["pkg/model.py"] = "import torch\ndef build():\n    return torch.nn.Linear(8, 8)\n"
    more = {"common.py": "y = 1\n", "single.py": "print(1)\n", "run/__main__.py": "print(2)\n"}
    build_file_tree(tmp_path, files | more)
    return tmp_path


def test_a_module_is_found_from_the_current_folder(package: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(package)
    target = resolve(None, {"module": "pkg.train", "nproc": "2", "args": ["--lr", "0.1"]})
    assert (target.script, target.cwd, target.module) == (
        package / "pkg" / "train.py",
        package,
        "pkg.train",
    )
    assert target.command == (
        "fsdp2",
        "verify",
        "-m",
        "pkg.train",
        "--nproc",
        "2",
        "--",
        "--lr",
        "0.1",
    )
    assert target.describe()["module"] == "pkg.train"
    files = [file.relative_to(package).as_posix() for file in project_files(target.script, package)]
    assert sorted(files) == [
        "common.py",
        "pkg/__init__.py",
        "pkg/data.py",
        "pkg/model.py",
        "pkg/train.py",
    ]
    assert root(target.script, target.module) == package
    assert root(find("run", package), "run") == package
    assert find("single", package) == package / "single.py"
    assert find("json.tool", package).name == "tool.py"


def test_a_module_named_in_verify_yaml(package: Path) -> None:
    (package / "verify.yaml").write_text("module: pkg.train\nargs: --lr 0.1\n")
    target = resolve(package, {})
    assert (target.module, target.cwd, target.args) == ("pkg.train", package, ("--lr", "0.1"))
    assert target.command == ("fsdp2", "verify", str(package))
    (package / "verify.yaml").write_text("module: pkg.train\nscript: single.py\n")
    with pytest.raises(UserError, match="give `module` or `script`, not both"):
        resolve(package, {})


def test_a_module_below_folders_without_init(package: Path) -> None:
    build_file_tree(package, {"outer/inner/train.py": ""})
    script = package / "outer" / "inner" / "train.py"
    assert (
        find("outer.inner.train", package) == script
        and root(script, "outer.inner.train") == package
    )


@cases(
    "name, words",
    ("pkg.trian", "-m pkg.trian: no such module in "),
    ("pkg/train.py", "-m pkg/train.py: not a module name; did you mean pkg.train?"),
    ("pkg.train.py", "no such module; did you mean -m pkg.train?"),
    ("pkg..train", "not a module name"),
    ("pkg", "a package without __main__ cannot be run"),
    ("sys", "is not Python source"),
    ("", "nothing to verify"),
)
def test_wrong_modules(
    package: Path, monkeypatch: Patch, command: Command, name: str, words: str
) -> None:
    monkeypatch.chdir(package)
    (message,) = command("verify", *(["-m", name] if name else []), code=2).err.splitlines()
    assert words in message


@cases("how", "fork", pytest.param("torchrun", marks=pytest.mark.full))
def test_a_module_is_run_as_python_m_does(
    launcher: Launcher, package: Path, tmp_path: Path, how: str
) -> None:
    flags = {
        "module": "pkg.train",
        "args": ["--lr", "0.1"],
        "launcher": how,
        "single_args": None,
        "steps": 5,
    }
    chosen = (
        "run-completes",
        *(("matches-ddp",) if how == "fork" else ()),
    )  # with torchrun each run takes seconds
    verdict = verify_with(launcher, resolve(package, flags), tmp_path / "work", select(chosen, ()))
    assert [(f.rule, f.evidence) for f in verdict.findings if f.status != "pass"] == []
    assert (verdict.environment["launcher"], verdict.runs[0]["command"]) == (
        how,
        "-m pkg.train --lr 0.1",
    )
    shard = next(
        record for record in _records(tmp_path / "work" / "01-train-2") if record["kind"] == "shard"
    )
    assert (Path(shard["at_line"]["file"]).name, shard["at_line"]["function"]) == (
        "train.py",
        "main",
    )


@pytest.mark.full
def test_both_launchers_find_the_same(launcher: Launcher, tmp_path: Path) -> None:
    script = FAULTS / "optim_before_shard.py"
    chosen = ("optim-before-shard", "run-completes")
    found = []
    for how in ("fork", "torchrun"):
        verdict = verify_with(
            launcher, resolve(script, {"launcher": how}), tmp_path / how, select(chosen, ())
        )
        found.append(
            [(f.rule, f.status, f.evidence, f.location, f.measured) for f in verdict.findings]
        )
    assert found[0] == found[1]
    assert found[0][0][1] == "fail"


ENVIRONMENT = (
    "import json, os, pathlib\npathlib.Path(os.environ['INTO'] +"
    " os.environ['RANK']).write_text(json.dumps(dict(os.environ)))\n"
)


@pytest.mark.full
@pytest.mark.launch
def test_a_forked_rank_has_the_environment_of_a_real_one(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """What differs: names of files, the port, the run's id, and the store's address, which we give
    as a number.
    """
    script = written(tmp_path, ENVIRONMENT, "script.py")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(
        "TORCHINDUCTOR_CACHE_DIR", raising=False
    )  # torch sets it itself when it imports its compiler
    monkeypatch.setenv("INTO", str(tmp_path / "ours"))
    with Launcher() as launcher:
        launcher.run(Request(str(tmp_path), str(script), str(tmp_path), world_size=2))
    monkeypatch.setenv("INTO", str(tmp_path / "real"))
    python(*TORCHRUN, 2, script)
    for rank in range(2):
        ours = json.loads((tmp_path / f"ours{rank}").read_text())
        real = json.loads((tmp_path / f"real{rank}").read_text())
        assert set(ours) - {"TORCHINDUCTOR_CACHE_DIR"} == set(real)
        differ = {key for key in real if ours[key] != real[key]}
        assert differ <= {
            "INTO",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_ERROR_FILE",
        }


EARLY = """\
import os
os.environ["OMP_NUM_THREADS"] = "2"
os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
os.environ["MY_OWN"] = "1"
import torch
os.environ["MKL_NUM_THREADS"] = "2"
assert torch.get_num_threads() == 2, torch.get_num_threads()
"""


def test_settings_before_torch_are_noted(tmp_path: Path) -> None:
    script = written(tmp_path, EARLY, "script.py")
    sources = Files().sources((script,))
    assert settings.before_torch(sources.tree(str(script))) == [
        (2, "OMP_NUM_THREADS"),
        (3, "TORCH_SHOW_CPP_STACKTRACES"),
    ]
    assert "script.py:2 sets OMP_NUM_THREADS, TORCH_SHOW_CPP_STACKTRACES" in settings.note(
        script, sources
    )
    script.write_text(EARLY.replace("import os\n", "import os\nimport torch\n"))
    assert settings.note(script, Files().sources((script,))) == ""


@pytest.mark.full
def test_with_torchrun_settings_before_torch_have_their_effect(
    launcher: Launcher, tmp_path: Path
) -> None:
    script = written(tmp_path, EARLY, "script.py")
    request: dict[str, Any] = {
        "script": str(script),
        "cwd": str(tmp_path),
        "world_size": 1,
        "timeout": 240.0,
    }
    codes = {}
    for how in ("fork", "torchrun"):
        (tmp_path / how).mkdir()
        answer = launcher.run(Request(folder=str(tmp_path / how), launcher=how, **request))
        codes[how] = [rank["code"] for rank in answer["ranks"]]
    assert codes == {"fork": [1], "torchrun": [0]}


@pytest.mark.full
def test_runs_beside_one_another_give_the_same(
    launcher: Launcher, tmp_path: Path, monkeypatch: Patch
) -> None:
    script = ZOO / "minimal.py"
    found = []
    for ranks in (2, 8):
        monkeypatch.setattr("verified_fsdp2.verifier.execute.Executor.room", ranks)
        work = tmp_path / str(ranks)
        verdict = verify_with(launcher, resolve(script, {}), work, select(("parity",), ()))
        found.append([(f.rule, f.status, f.evidence) for f in verdict.findings])
        times = [
            [record["at"] for record in _records(folder)] for folder in sorted(work.glob("0*"))
        ]
        assert any(a[0] < b[-1] and b[0] < a[-1] for a in times for b in times if a is not b) == (
            ranks == 8
        )
    assert found[0] == found[1]


def _records(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line.partition("\t")[0])
        for line in (folder / "rank0.jsonl").read_text().splitlines()
    ]


@cases(
    "ranks, devices, asked, working, answer",
    (4, 1, False, ("nccl",), ""),
    (2, 2, True, ("nccl",), ""),
    (4, 0, True, ("nccl",), ""),
    (4, 1, True, ("nccl", "gloo"), "nccl"),
    (4, 1, True, ("gloo",), "gloo"),
    (4, 2, True, (), "none"),
)
def test_how_ranks_share_gpus(
    ranks: int, devices: int, asked: bool, working: tuple[str, ...], answer: str
) -> None:
    assert sharing.decide(ranks, devices, asked, lambda backend: backend in working) == answer


def test_ranks_that_share_a_gpu_are_nodes_of_their_own() -> None:
    given = [sharing.environment(rank, 3, 2, "4,6") for rank in range(3)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in given] == ["4", "6", "4"]
    assert len({env["NCCL_HOSTID"] for env in given}) == 3
    assert {env["LOCAL_RANK"] for env in given} == {"0"}
    assert "3 ranks on 1 CUDA device" in sharing.described("gloo", 3, 1)


class WithGPUs:
    """A launcher on a machine with `devices` GPUs, where every launch succeeds."""

    def __init__(self, devices: int) -> None:
        self.versions = {"devices": devices}
        self.requests: list[Request] = []

    def run(self, request: Request) -> dict[str, Any]:
        return self.finish(self.start(request))

    def start(self, request: Request) -> int:
        self.requests.append(request)
        return len(self.requests) - 1

    def first_to_end(self, numbers: Sequence[int]) -> int:
        return numbers[0]

    def finish(self, number: int) -> dict[str, Any]:
        ranks = [
            {"rank": r, "code": 0, "killed": False, "at": 1.0}
            for r in range(self.requests[number].world_size)
        ]
        return {"ranks": ranks, "timed_out": False, "seconds": 1.0}


def test_the_original_shares_a_gpu_too(tmp_path: Path) -> None:
    launcher: Any = WithGPUs(1)
    old = [str(written(tmp_path, "", "old.py"))]
    settings = made_up_plan(
        tmp_path, "matches-original", oversubscribe=True, device="cuda", nproc=2, reference=old
    )
    work = tmp_path / "work"
    backend = backend_for(launcher, 2, True, work)
    original = stages.original(settings, exact=False)
    Executor(launcher, work, Worlds(work), backend=backend).make([original])
    assert [(Path(r.script).name, r.backend) for r in launcher.requests] == [
        ("trial.py", "nccl"),
        ("old.py", "nccl"),
    ]


def test_runs_side_by_side_have_no_gpu_in_common(tmp_path: Path) -> None:
    launcher: Any = WithGPUs(4)
    settings = made_up_plan(tmp_path, "matches-ddp", device="cuda", nproc=2)
    runs = [
        settings.run(role, world)
        for role, world in (("full_precision", 2), ("single", 1), ("reference", 2))
    ]
    work = tmp_path / "work"
    Executor(launcher, work, Worlds(work)).make(runs)  # the third waits for the first
    assert [request.devices for request in launcher.requests] == [[0, 1], [2], [0, 1]]


@cases(
    "devices, own, free, expected",
    (0, 0, None, 5),
    (0, 60 << 20, 8 << 30, 5),
    (0, 200 << 20, 8 << 30, 4),  # large ranks: no more than two a core
    (0, 2 << 30, 8 << 30, 3),
    (0, 20 << 30, 8 << 30, 1),
    (2, 20 << 30, 8 << 30, 2),
)
def test_ranks_at_a_time(
    devices: int, own: int, free: int | None, expected: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert room(devices, own, free) == expected


def test_files_that_a_container_has_cached_are_free(tmp_path: Path, monkeypatch: Patch) -> None:
    for name, text in {
        "max": "1000\n",
        "current": "900\n",
        "stat": "anon 300\nfile 600\nfile_mapped 9\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(
        "verified_fsdp2.verifier.launch.rank_slots._CGROUP", tmp_path / "memory.max"
    )
    assert free_memory() == 700


def test_the_ranks_of_a_run_say_what_they_took(launcher: Launcher, tmp_path: Path) -> None:
    executor = Executor(launcher, tmp_path / "work", Worlds(tmp_path / "work"))
    executor.make([planned(resolve(ZOO / "minimal.py", {}), ["matches-ddp"]).run("train", 2)])
    assert 1 << 20 < executor.own < executor.free


@cases(
    "own, total, visible, seen",
    ([1, 2], 4, None, "1,2"),
    ([1], 2, "6,GPU-8f", "GPU-8f"),
    ([0, 1], 2, "6,7", None),
    ([], 2, None, None),
    ([], 0, "", None),
)
def test_the_gpus_that_a_run_sees(
    own: list[int], total: int, visible: str | None, seen: str | None
) -> None:
    assert devices.environment(own, total, visible).get("CUDA_VISIBLE_DEVICES") == seen
    assert devices.free(2, 4, {0, 2}) == [1, 3]
    assert devices.free(3, 2, ()) == [0, 1]  # they share
    assert devices.free(2, 0, ()) == []


@pytest.mark.parametrize(("backend", "seen"), [("", "5,7"), ("nccl", "7")])
def test_the_environment_of_a_rank_names_its_gpus(
    backend: str, seen: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    request = Request(
        "/x", "/x/train.py", "/x", world_size=4, devices=[0, 2], backend=backend
    ).as_dict()
    assert manager.environment(request, 3, 0)["CUDA_VISIBLE_DEVICES"] == seen


def test_no_gpu_to_share(tmp_path: Path, command: Command) -> None:
    script = written(tmp_path, "", "script.py")
    assert "need `--device cuda`" in command("verify", str(script), "--oversubscribe", code=2).err


CLICK = """\
import click

@click.group()
def cli():
    pass

@cli.command()
@click.option("--lr", type=float, required=True)
def train(lr):
    assert lr == 0.1
    TRAINING
    dist.destroy_process_group()

cli()
"""
PART = "torch.randn(8, 8).chunk(dist.get_world_size())[dist.get_rank()]"


@pytest.mark.full
def test_a_click_command(verify_script: Verify, tmp_path: Path) -> None:
    """click ends every command by sys.exit(0), and catches what it knows on the way."""
    pytest.importorskip("click")
    flags = {"args": ["train", "--lr", "0.1"], "steps": None}
    body = textwrap.indent(training("", "nn.Linear(8, 8)", PART, "torch.manual_seed(step)"), "    ")
    verdict = verify_script(
        written(tmp_path, CLICK.replace("    TRAINING\n", body)),
        ("run-completes", "matches-ddp"),
        **flags,
    )
    assert [f.status for f in verdict.findings] == ["pass", "pass"], verdict.findings


def test_an_error_that_a_launcher_reports_is_the_cause(
    verify_script: Verify, tmp_path: Path
) -> None:
    """Hydra catches what the script raises, prints it and exits with 1."""
    text = "import sys\ntry:\n    raise ValueError('a fault')\nexcept Exception:\n    sys.exit(1)\n"
    (finding,) = verify_script(
        written(tmp_path, text), ("run-completes",), steps=2, device="cpu"
    ).findings
    assert finding.status == "fail" and "ValueError" in finding.evidence
    assert finding.location.line == 3


def test_later_runs_wait_no_longer_than_the_first_makes_likely(
    launcher: Launcher, tmp_path: Path
) -> None:
    step = (
        "from torch import nn, optim\nm = nn.Linear(1, 1)\no = optim.SGD(m.parameters(),"
        " 0.1)\nm(m.weight).sum().backward()\no.step()\n"
    )
    script = f"import sys\nif sys.argv[1:]:\n    raise ValueError('a fault')\n{step}"
    settings = made_up_plan(tmp_path, "run-completes", script=script, nproc=1)
    failing, good = settings.run("train", 1, "fail"), settings.run("reference", 1)
    files = Worlds(tmp_path / "work")
    executor = Executor(launcher, tmp_path / "work", files)

    def completed(run: PlannedRun) -> bool:
        (made,) = executor.make([run])
        return made.run is not None and made.run.completed

    assert executor.timeout(good) == 300
    assert not completed(failing)
    assert executor.timeout(good) == 300, "how long a run takes is not known from one that stopped"
    assert completed(good)
    for longest, minutes in (
        (executor.longest, 1),
        (7.0, 2),
        (70.0, 5),
    ):  # whole: the report is the same each time
        executor.longest = longest
        assert executor.timeout(good) == 60 * minutes


def test_two_torches_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch-2.1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with (
        pytest.raises(
            UserError, match=r"two torches: .* the installed package is 2\.1\.0; remove one"
        ),
        Launcher(),
    ):
        pass


@cases(
    "codes, launches",
    ([-signal.SIGABRT, 0], 2),  # the first launch, the second
    ([-signal.SIGABRT, -signal.SIGSEGV], 2),
    ([-signal.SIGKILL, 0], 1),  # somebody asked for it
    ([1, 0], 1),
)
def test_a_run_that_native_code_ended_is_made_once_more(
    tmp_path: Path, codes: list[int], launches: int
) -> None:
    class Dies(WithGPUs):
        def finish(self, number: int) -> dict[str, Any]:
            rank = {"rank": 0, "code": codes[number], "killed": False, "at": 1.0}
            return {"ranks": [rank], "timed_out": False, "seconds": 1.0}

    launcher, work = Dies(1), tmp_path / "work"
    one = made_up_plan(tmp_path, "matches-ddp", nproc=1).run("single", 1)
    made = Executor(cast("Launcher", launcher), work, Worlds(work)).make([one])
    assert (len(launcher.requests), [item.run.ended[0].code for item in made if item.run]) == (
        launches,
        [codes[launches - 1]],
    )
