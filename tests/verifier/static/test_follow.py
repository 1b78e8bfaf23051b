"""Following a script: aliases, helpers, classes, guards, suppressions of limits; bounded on
anything.
"""

import time
from pathlib import Path

import pytest

from pairs import HEAD, PRELUDE
from records import cases
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.source.entry_points import follow
from verified_fsdp2.verifier.source.follow import Follower
from verified_fsdp2.verifier.source.lint import look
from verified_fsdp2.verifier.source.project import Project, canonical, parse

LATE = "optim-before-shard"


def write(folder: Path, **files: str) -> Path:
    """Files by module name; `train` is the script."""
    for name, source in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder / "train.py"


def found(script: Path) -> list[tuple[str, str, int]]:
    """(rule, file name, line) of every hit."""
    hits = look([script]).hits
    return [(h.rule, Path(h.location.file).name, h.location.line) for h in hits]


ALIASES = {
    "as": "from torch.distributed.fsdp import fully_shard as fs\nSHARD = fs",
    "module": "import torch.distributed.fsdp as fsdp\nSHARD = fsdp.fully_shard",
    "dotted": "import torch.distributed.fsdp\nSHARD = torch.distributed.fsdp.fully_shard",
    "old": "from torch.distributed._composable.fsdp import fully_shard\nSHARD = fully_shard",
    "older": (
        "from torch.distributed._composable.fsdp.fully_shard import fully_shard\nSHARD ="
        " fully_shard"
    ),
    "partial": (
        "import functools\nfrom torch.distributed import fsdp\nSHARD ="
        " functools.partial(fsdp.fully_shard, mesh=None)"
    ),
    "lambda": (
        "from torch.distributed.fsdp import fully_shard\nSHARD = lambda module: fully_shard(module)"
    ),
    "getattr": "import torch.distributed.fsdp as f\nSHARD = getattr(f, 'fully_shard')",
}


@pytest.mark.parametrize("how", ALIASES)
def test_aliases(tmp_path: Path, how: str) -> None:
    body = f"""
import torch
{ALIASES[how]}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(params=model.parameters())
for layer in model:
    SHARD(layer)
SHARD(model)
"""
    assert [rule for rule, _, _ in found(write(tmp_path, train=body))] == [LATE]


def test_canonical_names() -> None:
    assert canonical("torch.distributed._composable.fsdp.fully_shard") == "fsdp.fully_shard"
    assert canonical("torch.distributed.checkpoint.state_dict_saver.save") == "dcp.save"
    assert (
        canonical("torch.distributed.checkpoint.state_dict.get_state_dict") == "dsd.get_state_dict"
    )
    assert canonical("torch.distributed._tensor.DTensor") == "tensor.DTensor"
    assert canonical("torch.optim.adamw.AdamW") == "torch.optim.AdamW"
    assert canonical("numpy.save") == "numpy.save"


MODEL_FILE = PRELUDE.partition("def train(")[0]
TRAINERS = {
    "functions": (
        """
from model import Net, shard
import torch

def build():
    net = Net()
    return net, torch.optim.AdamW(net.parameters())

def main():
    net, optimizer = build()
    return shard(net), optimizer

if __name__ == "__main__":
    main()
"""
    ),
    "methods": (
        """
import model as m
import torch

class Base:
    def __init__(self):
        self.setup()

class Trainer(Base):
    def setup(self):
        self.net = m.Net()
        self.make_optimizer()
        m.shard(self.net)

    def make_optimizer(self):
        self.optimizer = torch.optim.AdamW(self.parameters)

    @property
    def parameters(self):
        return (p for p in self.net.parameters() if p.requires_grad)

Trainer()
"""
    ),
    "async": (
        """
import asyncio
import torch
from model import *

async def prepare(net):
    return torch.optim.AdamW(net.parameters())

async def main():
    net = Net()
    optimizer = await prepare(net)
    shard(net)

asyncio.run(main())
"""
    ),
    "spawned": (
        """
import torch
import torch.multiprocessing as mp
from model import Net, shard

def worker(rank, lr):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    shard(net)

if __name__ == "__main__":
    mp.spawn(worker, args=(0.1,), nprocs=2)
"""
    ),
    "decorated": (
        """
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from model import Net, shard

@record
def main():
    net = Net()
    groups = [{"params": []}]
    for name, p in net.named_parameters():
        groups[0]["params"].append(p)
    optimizer = torch.optim.AdamW(groups)
    with torch.no_grad():
        shard(net)

main()
"""
    ),
    "nobody calls it": (
        """
import torch
from model import shard

def prepare(net, lr):
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    return shard(net), optimizer
"""
    ),
}


@pytest.mark.parametrize("style", TRAINERS)
def test_styles(tmp_path: Path, style: str) -> None:
    script = write(tmp_path, train=TRAINERS[style], model=MODEL_FILE)
    line = next(n for n, text in enumerate(TRAINERS[style].splitlines(), 1) if "AdamW(" in text)
    assert found(script) == [(LATE, "train.py", line)]


def test_a_fault_in_an_imported_file_is_reported_there(tmp_path: Path) -> None:
    helper = (
        "import torch\n\ndef optimizer_of(model):\n    return torch.optim.SGD(model.parameters(),"
        " lr=0.1)\n"
    )
    train = (
        "from pkg.model import Net, shard\nfrom pkg import helper\nnet = Net()\noptimizer ="
        " helper.optimizer_of(net)\nshard(net)\n"
    )
    script = write(
        tmp_path, train=train, pkg____init__="", pkg__model=MODEL_FILE, pkg__helper=helper
    )
    assert found(script) == [(LATE, "helper.py", 4)]


GUARDS = {
    "get_rank": "if dist.get_rank() == 0:\n    dist.barrier()",
    "named": "rank = dist.get_rank()\nis_main = rank == 0\nif is_main:\n    dist.barrier()",
    "environment": "if int(os.environ['RANK']) < 1:\n    dist.barrier()",
    "getenv": "if os.getenv('LOCAL_RANK', '0') == '0':\n    dist.barrier()",
    "not": "if not dist.get_rank():\n    dist.barrier()",
    "mesh": (
        "mesh = init_device_mesh('cpu', (4,))\nif mesh.get_local_rank() == 0:\n    dist.barrier()"
    ),
    "early return": (
        "def f():\n    if dist.get_rank() > 0:\n        return\n    dist.barrier()\nf()"
    ),
    "early exit": "import sys\nif dist.get_rank() > 0:\n    sys.exit(0)\ndist.barrier()",
    "continue": "for i in range(3):\n    if dist.get_rank():\n        continue\n    dist.barrier()",
    "argument": "def f(rank):\n    if rank == 0:\n        dist.barrier()\nf(dist.get_rank())",
    "attribute": (
        "class A:\n    def __init__(self):\n        self.rank = dist.get_rank()\n    def f(self):\n"
        "        if self.rank == 0:\n            dist.barrier()\nA().f()"
    ),
    "accelerator": (
        "import accelerate\na = accelerate.Accelerator()\nif a.is_main_process:\n    dist.barrier()"
    ),
    "ternary": "x = dist.barrier() if dist.get_rank() == 0 else None",
    "match": "match dist.get_rank():\n    case 0:\n        dist.barrier()",
}
OPEN = {
    "world": "if dist.get_world_size() > 1:\n    dist.barrier()",
    "initialized": "if dist.is_available() and dist.is_initialized():\n    dist.barrier()",
    "world and rank": "if dist.get_world_size() == 1 and dist.get_rank() == 0:\n    dist.barrier()",
    "group": (
        "group = dist.new_group([0, 1])\nif dist.get_rank() < 2:\n    dist.barrier(group=group)"
    ),
    "part of a mesh": (
        "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('pp', 'dp'))\nif"
        " mesh['pp'].get_local_rank() == 0:\n    dist.barrier()"
    ),
    "both branches": (
        "if dist.get_rank() == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)"
    ),
    "after": "if dist.get_rank() == 0:\n    print(1)\ndist.barrier()",
    "after a loop": (
        "for i in range(3):\n    if dist.get_rank():\n        continue\n   "
        " print(i)\ndist.barrier()"
    ),
    "after a call": (
        "def f():\n    if dist.get_rank():\n        return\n    print(1)\nf()\ndist.barrier()"
    ),
    "argument of the script": (
        "import argparse\nargs = argparse.ArgumentParser().parse_args()\nif args.sync:\n   "
        " dist.barrier()"
    ),
    "point to point": "if dist.get_rank() == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)",
}


@pytest.mark.parametrize("how", GUARDS)
def test_rank_guards(tmp_path: Path, how: str) -> None:
    script = write(tmp_path, train=PRELUDE + "x = y = torch.zeros(1)\n" + GUARDS[how] + "\n")
    assert [rule for rule, _, _ in found(script)] == ["rank-conditional-collective"]


@pytest.mark.parametrize("how", OPEN)
def test_what_is_no_rank_guard(tmp_path: Path, how: str) -> None:
    assert (
        found(write(tmp_path, train=PRELUDE + "x = y = torch.zeros(1)\n" + OPEN[how] + "\n")) == []
    )


NOT_CALLED = {  # functions that nothing calls, and whether each one's trace is distributed
    "a constant decides": (
        (
            "def maybe(flag):\n    if flag:\n        dist.barrier()\ndef off():\n   "
            " maybe(False)\ndef on():\n    maybe(True)\n"
        ),
        [True, False, True],
    ),
    "a callback": (
        (
            "def each(f):\n    f()\ndef quiet():\n    print()\ndef loud():\n    dist.barrier()\n"
            "def one():\n    each(quiet)\ndef two():\n    each(loud)\n"
        ),
        [False, False, True, False, True],
    ),
    "a method of what a call made": (
        (
            "class Loop:\n    def __init__(self, end):\n        self.end = end\n"
            "def loud():\n    dist.barrier()\ndef make():\n    return Loop(loud)\n"
            "def one():\n    make()\ndef two():\n    make().end()\n"
        ),
        [True, False, False, True],
    ),
    "what a call leaves in its argument": (
        (
            "class Loop:\n    pass\ndef loud():\n    dist.barrier()\ndef fill(loop):\n    loop.end"
            " = loud\ndef one():\n    fill(Loop())\ndef two():\n    loop = Loop()\n    fill(loop)\n"
            "    loop.end()\n"
        ),
        [True, False, False, True],
    ),
    "two that call each other": (
        (
            "def first():\n    second()\n    dist.barrier()\ndef second():\n    first()\ndef"
            " third():\n    second()\n"
        ),
        [True, True],
    ),
}


@pytest.mark.parametrize("how", NOT_CALLED)
def test_functions_that_nothing_calls(tmp_path: Path, how: str) -> None:
    source, distributed = NOT_CALLED[how]
    script = write(tmp_path, train="import torch.distributed as dist\n" + source)
    for kind in (None, Follower):
        assert [flow.distributed for flow in follow(Project(script), kind)] == [False, *distributed]


def test_each_kind_of_arguments_is_followed_once(tmp_path: Path) -> None:
    part = "def f{0}(x):\n    return [f{1}(x), f{1}(x), f{1}(x), f{1}(x)]\n"
    script = write(
        tmp_path,
        train="".join(part.format(n, n + 1) for n in range(12)) + "def f12(x):\n    return x\n",
    )
    assert not any(flow.partial for flow in follow(Project(script)))
    assert follow(Project(script), Follower)[1].partial


class TestLimits:
    def test_five_thousand_lines(self, tmp_path: Path) -> None:
        part = (
            "def step_{0}(model, x):\n    y = model(x)\n    if y.sum() > {0}:\n        y = y *"
            " {0}\n    return step_{1}(model, y)\n"
        )
        source = (
            HEAD + "".join(part.format(n, n + 1) for n in range(1000)) + "step_0(shard(Net()), 1)\n"
        )
        script = write(tmp_path, train=PRELUDE + source)
        assert len(script.read_text().splitlines()) > 5000
        started = time.process_time()
        look([script])
        assert time.process_time() - started < 20

    def test_calls_that_fan_out(self, tmp_path: Path) -> None:
        part = "def f{0}(x):\n    return [f{1}(x), f{1}(x), f{1}(x), f{1}(x)]\n"
        source = (
            "".join(part.format(n, n + 1) for n in range(40)) + "def f40(x):\n    return x\nf0(1)\n"
        )
        started = time.process_time()
        assert follow(Project(write(tmp_path, train=source)))[0].partial
        assert time.process_time() - started < 20

    @cases(
        "source",
        "x = " + "(" * 80 + "1" + ")" * 80,
        "x = " + "-" * 150 + "1",
        "x = " + " + ".join(["y"] * 900),
        "x = " + "f(" * 80 + "1" + ")" * 80,
        "\n".join("    " * n + "if x:" for n in range(90)) + "\n" + "    " * 90 + "pass",
        "x = a" + ".b" * 300,
        "def f():\n    return f()\nf()",
        "def f():\n    return g()\ndef g():\n    return f()\nf()",
        "class A(A):\n    pass\nA()",
        "class A:\n    def __init__(self):\n        self.a = self\n        self.a.a.a ="
        " A()\nA().a.a",
        "import train\nfrom train import *\nimport train.train",
        "x = [x for x in x for x in x]\nx += x\nx[x] = x\ndel x",
        "match x:\n    case [1, *rest] if rest:\n        y = rest\n    case {'a': b}:\n        y ="
        " b\n    case _:\n        y = 0",
        "try:\n    x = 1\nexcept* ValueError as e:\n    x = e\nfinally:\n    x = 2",
        "async def f():\n    async with a as b, c:\n        async for d in b:\n            yield"
        " d\n    await f()",
        "def f(a, /, b=1, *c, d, e=2, **g):\n    return a, b, c, d, e, g\nf(1, *x, d=3, **y)",
        "global x\nnonlocal_ = 1\nx: int\nx: int = 1\n(y := 2)\nlambda *a, **k: (yield)",
        "f'{x!r:>{width}} {x=}'\nx @= y\nx[1:2, ::3]\nprint(*x, sep='')",
        "'a' * 10 ** 9\n10 ** 10 ** 9\n1 << 10 ** 9\n1 / 0\n1 % 0\n'%s' % 1",
    )
    def test_odd_code_is_followed(self, tmp_path: Path, source: str) -> None:
        assert found(write(tmp_path, train=source + "\n")) == []

    def test_nested_too_deeply_for_python(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"train\.py:1:\d+"):
            parse(write(tmp_path, train="x = " + "(" * 500 + ")" * 500))
