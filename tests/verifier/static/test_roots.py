"""A script whose loop lies in another folder of its repository is followed there; nothing outside of it is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from verified_fsdp2.verifier.source.lint import look
from verified_fsdp2.verifier.source.project import Project
from verified_fsdp2.verifier.source.roots import package_root, repositories, roots
from verified_fsdp2.verifier.source.sources import project_files

LOOP = """
import torch
from torch.distributed.fsdp import fully_shard

def main():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
CALL = "from mypkg.train import main\nmain()\n"
ABOVE = "os.path.dirname(os.path.dirname(os.path.abspath(__file__)))"

LAYOUTS = {
    "root of a checkout": {".git/HEAD": "", "mypkg/__init__.py": "", "mypkg/train.py": LOOP, "scripts/run.py": CALL},
    "no __init__": {"pyproject.toml": "", "mypkg/train.py": LOOP, "scripts/deep/run.py": CALL},
    "src": {"setup.py": "", "src/mypkg/__init__.py": "", "src/mypkg/train.py": LOOP, "scripts/run.py": CALL},
    "a project in a checkout": {
        ".git/HEAD": "",
        "a/pyproject.toml": "",
        "a/src/mypkg/train.py": LOOP,
        "a/b/run.py": CALL,
    },
    "the checkout around a project": {
        ".git/HEAD": "",
        "mypkg/train.py": LOOP,
        "a/pyproject.toml": "",
        "a/b/run.py": CALL,
    },
    "a module of a package": {
        "mypkg/__init__.py": "",
        "mypkg/train.py": LOOP,
        "mypkg/tools/__init__.py": "",
        "mypkg/tools/run.py": CALL,
    },
    "relative": {
        "mypkg/__init__.py": "",
        "mypkg/train.py": LOOP,
        "mypkg/tools/__init__.py": "",
        "mypkg/tools/run.py": "from ..train import main\nmain()\n",
    },
    "through a package": {
        "pyproject.toml": "",
        "mypkg/__init__.py": "from mypkg.train import main",
        "mypkg/train.py": LOOP,
        "scripts/run.py": "import mypkg\nmypkg.main()\n",
    },
    "a dotted import": {
        "pyproject.toml": "",
        "mypkg/sub/train.py": LOOP,
        "scripts/run.py": "import mypkg.sub.train\nmypkg.sub.train.main()\n",
    },
    "import_module": {
        "pyproject.toml": "",
        "mypkg/train.py": LOOP,
        "scripts/run.py": "import importlib\nimportlib.import_module('mypkg.train').main()\n",
    },
    "insert": {"mypkg/train.py": LOOP, "scripts/run.py": f"import os, sys\nsys.path.insert(0, {ABOVE})\n{CALL}"},
    "append": {
        "code/mypkg/train.py": LOOP,
        "scripts/run.py": "import sys\nfrom pathlib import Path\nROOT = Path(__file__).resolve().parents[1]\n"
        f"sys.path.append(str(ROOT / 'code'))\n{CALL}",
    },
    "join": {
        "code/mypkg/train.py": LOOP,
        "scripts/run.py": f"import os.path as osp, sys\nsys.path += [osp.join(osp.dirname(__file__), '..', 'code')]\n{CALL}",
    },
    "f-string": {
        "code/mypkg/train.py": LOOP,
        "scripts/run.py": "import sys, pathlib\nHERE = pathlib.Path(__file__).parent\n"
        f"sys.path[:0] = [f'{{HERE.parent}}/code']\n{CALL}",
    },
    "beside the script": {"code/mypkg/train.py": LOOP, "run.py": f"import sys\nsys.path.extend(['code'])\n{CALL}"},
    "in what is imported": {
        "code/mypkg/train.py": LOOP,
        "scripts/paths.py": "import sys\nfrom pathlib import Path\nsys.path.append(Path(__file__).parent.parent.joinpath('code'))",
        "scripts/run.py": f"import paths\n{CALL}",
    },
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_followed(tmp_path: Path, layout: str) -> None:
    files = LAYOUTS[layout]
    write(tmp_path, files)
    (script,) = (name for name in files if name.endswith("run.py"))
    (loop,) = (name for name, source in files.items() if source == LOOP)
    (hit,) = look([tmp_path / script]).hits
    assert (hit.rule, hit.location.file, hit.location.line) == ("optim-before-shard", str(tmp_path / loop), 7)


NOT_FOLLOWED = {
    "a library's name": {
        ".git/HEAD": "",
        "torch/train.py": LOOP,
        "scripts/run.py": "from torch.train import main\nmain()\n",
    },
    "Python's own name": {
        ".git/HEAD": "",
        "json/train.py": LOOP,
        "scripts/run.py": "from json.train import main\nmain()\n",
    },
    "no repository": {"mypkg/train.py": LOOP, "scripts/run.py": CALL},
    "above the checkout": {"mypkg/train.py": LOOP, "a/.git/HEAD": "", "a/scripts/run.py": CALL},
    "a folder that is computed": {
        "code/mypkg/train.py": LOOP,
        "scripts/run.py": f"import os, sys\nsys.path.append(os.environ['CODE'])\n{CALL}",
    },
}


@pytest.mark.parametrize("layout", NOT_FOLLOWED)
def test_not_followed(tmp_path: Path, layout: str) -> None:
    files = NOT_FOLLOWED[layout]
    write(tmp_path, files)
    (script,) = (name for name in files if name.endswith("run.py"))
    assert look([tmp_path / script]).hits == ()


def test_the_nearest_comes_first(tmp_path: Path) -> None:
    write(
        tmp_path, {".git/HEAD": "", "src/x.py": "", "a/setup.cfg": "", "a/p/__init__.py": "", "a/p/q/__init__.py": ""}
    )
    script = tmp_path / "a" / "p" / "q" / "run.py"
    assert package_root(script) == tmp_path / "a"
    assert list(repositories(script)) == [tmp_path / "a", tmp_path]
    assert roots(script) == [script.parent, tmp_path / "a", tmp_path, tmp_path / "src"]


def test_a_module_is_found_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        {".git/HEAD": "", "mypkg/train.py": LOOP, "mypkg/run.py": "from mypkg.train import main\nimport train"},
    )
    project = Project(tmp_path / "mypkg" / "run.py")
    assert project.find("train", project.folder / "run.py") is project.find("mypkg.train", project.folder / "run.py")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "import_module"])
def test_the_files_of_a_run_are_the_same(tmp_path: Path, layout: str) -> None:
    files = LAYOUTS[layout]
    write(tmp_path, files)
    (script,) = (name for name in files if name.endswith("run.py"))
    (loop,) = (name for name, source in files.items() if source == LOOP)
    assert tmp_path / loop in project_files(tmp_path / script)
