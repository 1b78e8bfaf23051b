"""The pack works from its wheel, and as a plain copied folder that nobody installed."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import python
from verified_fsdp2 import __version__
from verified_fsdp2.skill.copies import contents, manifest

ROOT = Path(__file__).parents[1]
STATIC = ("--fsdp2", "train.py", "--fsdp2-tier", "static")
SHIPPED = (
    "__init__.py",
    "SKILL.md",
    "README.md",
    "references",
    "templates",
    "skill",
    "verifier",
    "examples",
)


def fsdp2(*command: object, cwd: Path) -> str:
    return python(*command, cwd=cwd).stdout


def mark(folder: Path) -> None:
    """Give this copy another version than the one that the tests were installed with."""
    file = folder / "__init__.py"
    file.write_text(file.read_text().replace("__version__ = ", "__version__ = 'copy ' + "))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "verified-fsdp2"
    folder.mkdir()
    for source in (ROOT / name for name in SHIPPED):
        if source.is_dir():
            shutil.copytree(
                source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(source, folder)
    mark(folder)
    return folder


def test_a_plain_copy_works_from_anywhere(copied: Path, tmp_path: Path) -> None:
    skill = copied / "skill"
    assert "copy" in fsdp2(skill, "--version", cwd=tmp_path)
    assert "usage: fsdp2" in fsdp2(skill, "--help", cwd=tmp_path)
    assert "targets" in fsdp2(skill, "spec", "schema", "--verify", cwd=tmp_path)
    fsdp2(skill, "new", copied / "examples" / "quickstart.yaml", "project", cwd=tmp_path)
    assert (tmp_path / "project" / "train.py").is_file()


@pytest.mark.full
@pytest.mark.launch
def test_a_plain_copy_verifies(copied: Path, tmp_path: Path) -> None:
    script = ROOT / "tests" / "zoo" / "minimal.py"
    out = fsdp2(copied / "skill", "verify", script, "--only", "run-completes", cwd=tmp_path)
    assert out.rstrip().endswith("verdict: pass")


def test_pytest_takes_its_plugin_from_a_plain_copy(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "verified_fsdp2").symlink_to(copied)
    (tmp_path / "train.py").write_bytes(
        (ROOT / "tests" / "faults" / "optim_before_shard.py").read_bytes()
    )
    words = ("-p", "verified_fsdp2.verifier.integrations.pytest_plugin", *STATIC)
    done = python(
        "-m", "pytest", *words, status=1, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "build"}
    )
    assert "FAILED train.py::optim-before-shard" in done.stdout


def test_the_installed_command(tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "fsdp2", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"verified-fsdp2 {__version__}\n"


def test_pyproject_names_every_package() -> None:
    """`packages.find` cannot do it: it has no prefix, and the folder of the package is the
    repository.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        path.parent.relative_to(ROOT)
        for top in ("skill", "verifier")
        for path in (ROOT / top).rglob("*.py")
    }
    assert settings["packages"] == [
        "verified_fsdp2",
        *sorted(f"verified_fsdp2.{'.'.join(f.parts)}" for f in folders),
    ]


def test_the_wheel_carries_everything(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
    fsdp2(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path / "dist",
        source,
        cwd=tmp_path,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    fsdp2(*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    package = tmp_path / "site" / "verified_fsdp2"
    (entries,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert (
        "[pytest11]\nverified_fsdp2.verifier.integrations.pytest_plugin = " in entries.read_text()
    )
    mark(package)
    assert "copy" in fsdp2(package / "skill", "--version", cwd=tmp_path)
    assert "targets" in fsdp2(package / "skill", "spec", "schema", "--verify", cwd=tmp_path)
    files = [
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    shipped = {path.relative_to(package).as_posix() for path in files}
    for pattern in (
        "templates/*.j2",
        "references/*.md",
        "skill/**/*.py",
        "verifier/**/*.py",
        "verifier/**/*.j2",
    ):
        assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)} <= shipped
    assert contents._of_pack(ROOT).keys() <= shipped
    assert not any(name.startswith(("tests", "benchmarks")) for name in shipped)
    assert len(shipped) < 800
    fsdp2(package / "skill", "new", ROOT / "examples" / "quickstart.yaml", "project", cwd=tmp_path)
    fsdp2(package / "skill", "install", "--client", "claude", "--full", cwd=tmp_path)
    copy = tmp_path / ".claude" / "skills" / "verified-fsdp2"
    installed = {p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()}
    assert installed == {*contents.pack_files(), manifest.MANIFEST}


def test_one_command_changes_the_version_everywhere(tmp_path: Path) -> None:
    places = (
        "pyproject.toml",
        "__init__.py",
        "SKILL.md",
        "CITATION.cff",
        "CHANGELOG.md",
        "references/verify-project.md",
        ".claude-plugin/marketplace.json",
    )
    for name in ("Makefile", *places):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    subprocess.run(["make", "version", "V=9.8.7"], cwd=tmp_path, check=True, capture_output=True)
    for name in places:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "9.8.7" in text and (name == "CHANGELOG.md" or __version__ not in text), name
