"""The skill as agents and scanners get it: valid, within its size, every path there, versions
equal, nothing that scanners refuse.
"""

import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from verified_fsdp2 import __version__
from verified_fsdp2.skill import installer
from verified_fsdp2.skill.copies import contents

ROOT = Path(__file__).parents[1]
SHIPPED = [p for folder in ("skill", "verifier") for p in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "SKILL.md", *sorted((ROOT / "references").glob("*.md"))]
HEAD, KEYS_OF_HEAD, _ = (ROOT / "SKILL.md").read_text(encoding="utf-8").split("---\n", 2)
FRONTMATTER = yaml.safe_load(KEYS_OF_HEAD)
# What the specification of agent skills allows, less allowed-tools, which grants more than it
# restricts.
KEYS = {"name", "description", "license", "compatibility", "metadata"}
SUSPICIOUS = (
    r"\beval\s*\(|\bexec\s*\(|(?<![.\w])compile\(|shell=True|environ\.copy\(|\bpickle\b|https?://"
)
FILES = 80  # that a copy may have; a lean skill has about 100 at most
# Folders that Claude Code takes for parts of a plugin when they stand at its root.
PLUGIN_PARTS = (
    "skills",
    "commands",
    "agents",
    "hooks",
    "bin",
    "monitors",
    "workflows",
    "output-styles",
    "themes",
)


def tokens(text: str) -> int:
    """An upper estimate: a token for every six letters or digits of a word begun, and one for every
    other sign.

    On SKILL.md it is 5 % above the largest of three real tokenizers:
    benchmarks/results/skill_scanner.json has theirs.
    """
    return sum(math.ceil(len(piece) / 6) for piece in re.findall(r"[^\W_]+|[^\w\s]|_", text))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skills") / contents.NAME
    target = installer.Target(folder, ("claude",))
    installer.apply([installer.plan_install(target, contents.pack_files())])
    return folder


def test_the_reference_validator_accepts_the_copy(copy: Path) -> None:
    # the command of the distribution skills-ref
    validator = Path(sys.executable).parent / "agentskills"
    done = subprocess.run(
        [validator, "validate", copy], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_frontmatter() -> None:
    assert HEAD == "" and set(FRONTMATTER) <= KEYS
    assert FRONTMATTER["name"] == contents.NAME and re.fullmatch(
        r"[a-z0-9]+(-[a-z0-9]+)*", contents.NAME
    )
    description, compatibility = FRONTMATTER["description"], FRONTMATTER["compatibility"]
    assert len(description) <= 1024 and not set("<>") & set(description)
    assert len(compatibility) <= 500
    for word in ("fully_shard", "FSDP1", "DDP", "DTensor", "torchrun", "Use when", "Not for"):
        assert word in description
    assert "FSDP2" in description[:100], "clients cut descriptions at their end"
    assert all(isinstance(value, str) for value in FRONTMATTER["metadata"].values())


def test_all_versions_are_one_and_the_marketplace_offers_this_folder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    market = json.loads((ROOT / ".claude-plugin" / "marketplace.json").read_text(encoding="utf-8"))
    assert {"name", "owner", "plugins"} <= set(market) and market["owner"]["name"]
    (plugin,) = market["plugins"]
    assert {project["version"], plugin["version"], FRONTMATTER["metadata"]["version"]} == {
        __version__
    }
    assert (
        yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
        == __version__
    )
    assert project["name"] == plugin["name"] == contents.NAME
    assert plugin["source"] == "./" and plugin["strict"] is False
    # with it, a clone in a skills folder is no plain skill
    assert not (ROOT / ".claude-plugin" / "plugin.json").exists()
    assert [name for name in PLUGIN_PARTS if (ROOT / name).exists()] == []


def test_size(copy: Path) -> None:
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200 and tokens(text) <= 3000
    assert sum(path.is_file() for path in copy.rglob("*")) <= FILES


def test_what_the_scanner_found_and_counted() -> None:
    results = json.loads(
        (ROOT / "benchmarks" / "results" / "skill_scanner.json").read_text(encoding="utf-8")
    )
    counted = results["tokens_of_skill_md"]
    assert len(counted) == 3 and max(counted.values()) <= 3000
    estimate = tokens((ROOT / "SKILL.md").read_text(encoding="utf-8"))
    assert 0.8 < estimate / max(counted.values()) < 1.5, "run `make scan`"
    for policy, result in results["policies"].items():
        assert "behavioral_analyzer" in result["analyzers"]
        assert not {"HIGH", "CRITICAL"} & set(result["severities"]), policy


def test_every_link_leads_to_a_file(copy: Path) -> None:
    for document in [*PAGES, ROOT / "README.md"]:
        text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if not link.startswith("https://"):
                assert (document.parent / link).is_file(), f"{document.name}: {link}"
                if document in PAGES:
                    there = (document.parent / link).resolve().relative_to(ROOT)
                    assert (copy / there).is_file(), (
                        f"{document.name}: {link} is not in an installed copy"
                    )


def test_every_anchor_is_a_heading() -> None:
    for document in [*PAGES, ROOT / "README.md"]:
        for link, anchor in re.findall(
            r"\]\(([^)#\s]*)#([^)]+)\)", document.read_text(encoding="utf-8")
        ):
            text = ((document.parent / link) if link else document).read_text(encoding="utf-8")
            titles = [line.lstrip("# ") for line in re.findall(r"^#+ .*$", text, re.M)]
            headings = [re.sub(r"[^\w\- ]", "", title).strip().lower() for title in titles]
            assert anchor in {heading.replace(" ", "-") for heading in headings}, (
                f"{document.name}: {link}#{anchor}"
            )


def test_every_path_that_the_skill_names_is_shipped(copy: Path) -> None:
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    named = re.findall(r"\b(?:references|templates|examples|skill|verifier)/[\w./-]*", text)
    assert named
    for path in named:
        assert (copy / path.rstrip(".")).exists(), path


def test_the_text_hides_nothing() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "<!--" not in text
        assert [sign for sign in text if not (sign == "\n" or sign.isprintable())] == [], page.name
        assert not re.search(r"curl[^\n]*\|\s*(?:ba)?sh|pip install git\+", text)


def may_flag() -> list[tuple[str, str]]:
    """(path, text) of the table in SECURITY.md: what a scanner may flag, each with its reason."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+\.py)` \| `([^`]+)` \| .{20,} \|$", text, re.M)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_scanner_clean(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    named = [flagged for file, flagged in may_flag() if file == path.relative_to(ROOT).as_posix()]
    assert set(re.findall(SUSPICIOUS, text)) == set(named), "SECURITY.md names what is flagged"
    for call in re.findall(r"subprocess\.\w+\([^)]*\)", text, re.S):
        assert 'f"' not in call
