"""The small files beside the code: what git ignores, and what the project needs."""

import importlib.metadata
from pathlib import Path

import pytest
import yaml

from trees import SMALL
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import load

tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
TRAIN = {"steps": 20, "global_batch": 8}
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64}
TRANSFORMERS = {"kind": "transformers", "config": LLAMA, "vocabulary": 256, "sequence_length": 16}
OWN = {
    "kind": "import",
    "import": "mine.model:build",
    "shard": ["B"],
    "vocabulary": 9,
    "sequence_length": 16,
}


def made(tmp_path: Path, *settings: str, **sections: object) -> dict[str, str]:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SMALL, "train": TRAIN, **sections}))
    return scaffold.render(load(tmp_path / "spec.yaml", settings))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, set()),
        ({"model": OWN}, set()),
        (
            {"operation": {"progress": True, "tensorboard": True}},
            {"tensorboard", "tqdm"},
        ),
        ({"model": TRANSFORMERS}, {"transformers"}),
        ({"operation": {"guard": True}}, {"verified-fsdp2"}),
        ({"launch": {"engines": ["ray"]}, "train": {**TRAIN, "global_batch": 16}}, {"ray[train]"}),
    ],
)
def test_requirements_are_what_is_imported(
    tmp_path: Path, sections: dict[str, object], expected: set[str]
) -> None:
    project = tomllib.loads(made(tmp_path, "torch='2.13'", **sections)["pyproject.toml"])["project"]
    torch, *others = project["dependencies"]
    assert torch == "torch==2.13.*"
    assert set(others) >= expected and not {"mine", "data", "json", "torch", "ray", "PIL"} & {
        *others
    }
    assert others == sorted(others) and (sections or others == [])


def test_torch_is_that_of_the_spec_or_the_installed_one(tmp_path: Path) -> None:
    installed = ".".join(importlib.metadata.version("torch").split(".")[:2])
    assert f'"torch=={installed}.*"' in made(tmp_path)["pyproject.toml"]
    assert '"torch==2.9.*"' in made(tmp_path, "torch='2.9'")["pyproject.toml"]


@pytest.mark.parametrize(
    ("torch", "called"), [("2.13", "_set_pg_timeout("), ("2.15", "dist.set_timeout(")]
)
def test_time_outs_are_set_as_this_torch_wants_it(tmp_path: Path, torch: str, called: str) -> None:
    text = made(tmp_path, f"torch='{torch}'")["distributed.py"]
    assert called in text and ("_set_pg_timeout" in text) == (torch == "2.13")


@pytest.mark.parametrize(
    ("directory", "ignored"),
    [
        ("out", "/out/"),
        ("runs/a/", "/runs/a/"),
        ("/scratch/runs", None),
        ("../out", None),
        ("o*t", None),
    ],
)
def test_git_ignores_runs_inside_the_project(
    tmp_path: Path, directory: str, ignored: str | None
) -> None:
    lines = made(tmp_path, f"checkpoint.directory='{directory}'")[".gitignore"].splitlines()
    assert lines == ["__pycache__/", ".pytest_cache/", *([ignored] if ignored else [])]
