"""No hit on right code: other people's styles, the zoo, the hosts, and what the scaffold writes."""

import json
from pathlib import Path

import pytest
import yaml

from corpus import right
from scripts import written
from verified_fsdp2.skill.cli import main
from verified_fsdp2.verifier.source.lint import look

ROOT = Path(__file__).parents[3]
STYLES = yaml.safe_load(Path(__file__).with_name("styles.yaml").read_text(encoding="utf-8"))


EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
IN_EVERY_TEST_RUN = (
    "hsdp-tp",
    "long-run",
    "lora",
    "transformers-tp",
)  # together they have most of what a spec can ask for
SPECS = [path if path.stem in IN_EVERY_TEST_RUN else pytest.param(path, marks=pytest.mark.full) for path in EXAMPLES]


def reported(*scripts: Path) -> list[tuple[str, str, int]]:
    return [(h.rule, Path(h.location.file).name, h.location.line) for h in look(scripts).hits]


@pytest.mark.parametrize("style", STYLES)
def test_styles(tmp_path: Path, style: str) -> None:
    script = written(tmp_path, STYLES[style])
    assert reported(script) == []


@pytest.mark.parametrize("case", right(), ids=lambda case: case.name)
def test_right_scripts(case) -> None:
    assert reported(*case.files()) == []


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_generated_projects(tmp_path: Path, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(spec), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["lint", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "no_findings"
