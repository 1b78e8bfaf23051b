"""A script whose loop lies in another folder of its repository is followed there; nothing outside
of it is looked at.
"""

from pathlib import Path

import pytest

from trees import build_file_tree
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
CODE = "code/mypkg/train.py"


def layout(paths: str, /, **more: str) -> dict[str, str]:
    """Files by path: train.py has the loop, run.py calls it, all others are empty, but for `more`,
    by name.
    """
    known = {"train": LOOP, "run": CALL, **more}
    return {path: known.get(Path(path).stem, "") for path in paths.split()}


LAYOUTS = {
    "root of a checkout": layout(".git/HEAD mypkg/__init__.py mypkg/train.py scripts/run.py"),
    "no __init__": layout("pyproject.toml mypkg/train.py scripts/deep/run.py"),
    "src": layout("setup.py src/mypkg/__init__.py src/mypkg/train.py scripts/run.py"),
    "a project in a checkout": layout(".git/HEAD a/pyproject.toml a/src/mypkg/train.py a/b/run.py"),
    "the checkout around a project": layout(".git/HEAD mypkg/train.py a/pyproject.toml a/b/run.py"),
    "a module of a package": layout(
        "mypkg/__init__.py mypkg/train.py mypkg/tools/__init__.py mypkg/tools/run.py"
    ),
    "relative": layout(
        "mypkg/__init__.py mypkg/train.py mypkg/tools/__init__.py mypkg/tools/run.py",
        run="from ..train import main\nmain()\n",
    ),
    "through a package": layout(
        "pyproject.toml mypkg/__init__.py mypkg/train.py scripts/run.py",
        __init__="from mypkg.train import main",
        run="import mypkg\nmypkg.main()\n",
    ),
    "a dotted import": layout(
        "pyproject.toml mypkg/sub/train.py scripts/run.py",
        run="import mypkg.sub.train\nmypkg.sub.train.main()\n",
    ),
    "import_module": layout(
        "pyproject.toml mypkg/train.py scripts/run.py",
        run="import importlib\nimportlib.import_module('mypkg.train').main()\n",
    ),
    "insert": layout(
        "mypkg/train.py scripts/run.py", run=f"import os, sys\nsys.path.insert(0, {ABOVE})\n{CALL}"
    ),
    "append": layout(
        f"{CODE} scripts/run.py",
        run=(
            "import sys\nfrom pathlib import Path\nROOT = Path(__file__).resolve().parents[1]\n"
            f"sys.path.append(str(ROOT / 'code'))\n{CALL}"
        ),
    ),
    "join": layout(
        f"{CODE} scripts/run.py",
        run=(
            "import os.path as osp, sys\nsys.path += [osp.join(osp.dirname(__file__), '..',"
            f" 'code')]\n{CALL}"
        ),
    ),
    "f-string": layout(
        f"{CODE} scripts/run.py",
        run=(
            "import sys, pathlib\nHERE = pathlib.Path(__file__).parent\n"
            f"sys.path[:0] = [f'{{HERE.parent}}/code']\n{CALL}"
        ),
    ),
    "beside the script": layout(
        f"{CODE} run.py", run=f"import sys\nsys.path.extend(['code'])\n{CALL}"
    ),
    "in what is imported": layout(
        f"{CODE} scripts/paths.py scripts/run.py",
        paths=(
            "import sys\nfrom pathlib import"
            " Path\nsys.path.append(Path(__file__).parent.parent.joinpath('code'))"
        ),
        run=f"import paths\n{CALL}",
    ),
}


def write(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    build_file_tree(folder, files)
    (script,) = (name for name in files if name.endswith("run.py"))
    (loop,) = (name for name, source in files.items() if source == LOOP)
    return folder / script, folder / loop


@pytest.mark.parametrize("name", LAYOUTS)
def test_followed(tmp_path: Path, name: str) -> None:
    script, loop = write(tmp_path, LAYOUTS[name])
    (hit,) = look([script]).hits
    assert (hit.rule, hit.location.file, hit.location.line) == ("optim-before-shard", str(loop), 7)
    assert name == "import_module" or loop in project_files(script), (
        "the files of a run are the same"
    )


NOT_FOLLOWED = {
    "a library's name": layout(
        ".git/HEAD torch/train.py scripts/run.py", run="from torch.train import main\nmain()\n"
    ),
    "Python's own name": layout(
        ".git/HEAD json/train.py scripts/run.py", run="from json.train import main\nmain()\n"
    ),
    "no repository": layout("mypkg/train.py scripts/run.py"),
    "above the checkout": layout("mypkg/train.py a/.git/HEAD a/scripts/run.py"),
    "a folder that is computed": layout(
        f"{CODE} scripts/run.py", run=f"import os, sys\nsys.path.append(os.environ['CODE'])\n{CALL}"
    ),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_not_followed(tmp_path: Path, name: str) -> None:
    assert look([write(tmp_path, NOT_FOLLOWED[name])[0]]).hits == ()


def test_the_nearest_comes_first(tmp_path: Path) -> None:
    build_file_tree(
        tmp_path, layout(".git/HEAD src/x.py a/setup.cfg a/p/__init__.py a/p/q/__init__.py")
    )
    script = tmp_path / "a" / "p" / "q" / "run.py"
    assert package_root(script) == tmp_path / "a"
    assert list(repositories(script)) == [tmp_path / "a", tmp_path]
    assert roots(script) == [script.parent, tmp_path / "a", tmp_path, tmp_path / "src"]


def test_a_module_is_found_once(tmp_path: Path) -> None:
    twice = "from mypkg.train import main\nimport train"
    project = Project(
        write(tmp_path, layout(".git/HEAD mypkg/train.py mypkg/run.py", run=twice))[0]
    )
    assert project.find("train", project.folder / "run.py") is project.find(
        "mypkg.train", project.folder / "run.py"
    )
