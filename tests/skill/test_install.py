"""`fsdp2 install`: where it writes, upgrades, what it leaves alone, what it refuses, and that it is
all or nothing.
"""

import ast
import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from records import Patch, cases
from scripts import FAULTS, Command, python
from trees import build_file_tree, file_tree
from trees import text_tree as tree
from verified_fsdp2 import __version__
from verified_fsdp2.skill import atomic_write, installer
from verified_fsdp2.skill.copies import LONGEST, contents, joined, manifest
from verified_fsdp2.verifier.rules import RULES

ROOT = Path(__file__).parents[2]
NAME = "verified-fsdp2"
SMALL = {"SKILL.md": b"skill\n", "skill/cli.py": b"a = 1\n", "verifier/flow.py": b"b = 1\n"}
Run = Callable[..., tuple[int, Any]]
installed = contents._is_installed
# What a copy in a project's repository may weigh. Agents read SKILL.md and few references of it, so
# the budget is about clones and reviews: 5 % above the code as it was when its lines were wrapped
# at 100 columns (3.24 MB).
PLACE = Path(f".claude/skills/{NAME}")  # for Claude Code, in the current project


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("home", "project"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(contents, "_is_installed", lambda: False)


@pytest.fixture
def small(monkeypatch: Patch) -> dict[str, bytes]:
    """A pack of three files, which a test may change."""
    files = dict(SMALL)
    monkeypatch.setattr(contents, "pack_files", lambda: dict(files))
    return files


@pytest.fixture
def run(command: Command) -> Run:
    """run(*words) -> (exit code of `install`, its JSON; for a usage error the line)."""

    def install(*words: str) -> tuple[int, Any]:
        done = command("install", *words, "--json")
        return done.code, done.data if done.out else done.err.rstrip("\n")

    return install


def test_the_real_copy_is_whole_and_small(run: Run) -> None:
    started = time.process_time()
    code, answer = run("--client", "claude")
    assert code == 0 and time.process_time() - started < 1
    found = tree(PLACE)
    assert set(found) == {*contents.pack_files(), manifest.MANIFEST}
    size = sum(len(data) for data in contents.pack_files().values())
    # about 30 kB for each rule, with what it stands on: a new rule has room; the guard; templates
    assert answer["targets"][0]["bytes"] == size <= 30_000 * len(RULES) + 300_000
    assert answer["targets"][0]["digest"] == contents.digest(contents.pack_files())
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "references").iterdir()} <= set(
        found
    )
    assert {
        "SKILL.md",
        "LICENSE",
        "examples/quickstart.yaml",
        "skill/__main__.py",
        "verifier/__main__.py",
    } <= set(found)
    assert not any(
        path.startswith(("tests", "benchmarks")) or "__pycache__" in path for path in found
    )


def test_the_code_of_a_copy_is_that_of_the_repository(run: Run) -> None:
    run("--client", "claude")
    sections = joined.Sections(PLACE).found
    for folder, pattern in (("skill", "*.py"), ("verifier", "*.py"), ("templates", "*.j2")):
        for path in (ROOT / folder).rglob(pattern):
            name = path.relative_to(ROOT)
            there = sections.get(name.as_posix())
            assert path.read_bytes() == ((PLACE / name).read_bytes() if there is None else there), (
                name
            )
    for file in (PLACE / joined.SOURCES).glob("*.py"):
        text = file.read_text(encoding="utf-8")
        ast.parse(text)  # a scanner reads it as Python
        assert len(text) <= LONGEST + 2_000, file.name
    assert "skill/spec/schema.json" in sections and "verifier/report/report.html.j2" in sections


def test_a_traceback_names_the_file_of_the_repository_and_its_line(run: Run) -> None:
    run("--client", "claude")
    code = (
        "import runpy, traceback\n"
        f"found = runpy.run_path('{PLACE}/skill')\n"
        "from verified_fsdp2.verifier.config.reading import words\n"
        "try:\n    words.similar(3, ['a'])\nexcept Exception:\n    traceback.print_exc()\n"
    )
    error = python("-c", code).stderr
    source = (ROOT / "verifier/config/reading/words.py").read_text(encoding="utf-8").splitlines()
    number, line = re.findall(
        rf'{PLACE}/verifier/config/reading/words\.py", line (\d+), in similar\n +(.+)', error
    )[-1]
    assert source[int(number) - 1].strip() == line


def test_bytecode_of_a_copy_stays_out_of_the_project(
    run: Run, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run("--client", "claude")
    python(f"{PLACE}/skill", "spec", "check", f"{PLACE}/examples/quickstart.yaml")
    found = {p.name for p in PLACE.rglob("*.pyc")}
    assert {name.partition(".")[0] for name in found} <= {"__main__"}, (
        "what Python itself compiles at its start"
    )
    kept = list((tmp_path / "cache").rglob("*.pyc"))
    assert "verified_fsdp2.skill.spec" in {p.name.rpartition(".cpython")[0] for p in kept}
    before = {p: p.stat().st_mtime_ns for p in kept}
    python(f"{PLACE}/skill", "spec", "check", f"{PLACE}/examples/quickstart.yaml")
    assert {p: p.stat().st_mtime_ns for p in kept} == before
    run("--uninstall")
    assert not list((tmp_path / "cache").rglob("*.pyc"))


def test_the_copy_runs_by_itself(run: Run) -> None:
    assert run("--client", "codex")[0] == 0
    copy = f".agents/skills/{NAME}"
    done = python(f"{copy}/skill", "lint", FAULTS / "optim_before_shard.py", "--json", status=1)
    assert [f["rule"] for f in json.loads(done.stdout)["findings"]] == ["optim-before-shard"]
    python(f"{copy}/skill", "install", "--client", "claude")
    assert file_tree(PLACE) == {
        path: data for path, data in file_tree(Path(copy)).items() if not path.endswith(".pyc")
    }
    python(f"{copy}/skill", "install", "--uninstall")
    assert not file_tree(Path()), "what Python compiled from the copy goes with it"


def test_a_thin_copy_calls_the_installed_package(run: Run) -> None:
    code, answer = run("--client", "claude", "--thin")
    assert (
        code == 0
        and answer["targets"][0]["files"] <= 60
        and answer["targets"][0]["bytes"] <= 1_200_000
    )
    found = set(tree(PLACE))
    assert {
        "SKILL.md",
        "references/verify.md",
        "examples/chat-tokenizer/chat_template.jinja",
    } <= found and not [p for p in found if "verifier/" in p]
    done = python(f"{PLACE}/skill", "lint", FAULTS / "optim_before_shard.py", "--json", status=1)
    assert [f["rule"] for f in json.loads(done.stdout)["findings"]] == ["optim-before-shard"]
    launcher = PLACE / "skill" / "__main__.py"
    launcher.write_text(launcher.read_text().replace(__version__, "0.0.1"))
    assert (
        f"has verified-fsdp2 {__version__}; this skill needs 0.0.1"
        in python(launcher, "doctor", status=2).stderr
    )


def test_what_is_installed_writes_thin_copies_unless_a_full_one_is_there(
    run: Run, monkeypatch: Patch
) -> None:
    def kind() -> str:
        return "full" if (PLACE / "verifier").exists() else "thin"

    monkeypatch.setattr(contents, "_is_installed", installed)
    assert installed(), "the tests run on an installed package"
    for words, expected in (
        ((), "thin"),
        (("--full",), "full"),
        ((), "full"),
        (("--thin",), "thin"),
        ((), "thin"),
    ):
        run("--client", "claude", *words)
        assert kind() == expected and run("--client", "claude", "--check")[0] == 0, words
    assert run("--thin", "--full")[0] == 2
    python(f"{PLACE}/skill", "install", "--client", "codex")  # a launcher of the installed package
    assert not Path(f".agents/skills/{NAME}/verifier").exists()


def test_a_thin_copy_finds_the_environment_of_its_project(run: Run, tmp_path: Path) -> None:
    run("--client", "claude", "--thin")
    launcher = PLACE / "skill" / "__main__.py"
    launcher.write_text(launcher.read_text().replace(__version__, "0.0.1"))
    command = Path(".venv/bin/fsdp2")
    command.parent.mkdir(parents=True)
    command.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo verified-fsdp2 0.0.1 || echo "called with $*"\n'
    )
    command.chmod(0o755)
    other = tmp_path / "other" / "fsdp2"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho verified-fsdp2 0.0.2\n")
    other.chmod(0o755)
    bare = {**os.environ, "PATH": f"{other.parent}:/usr/bin:/bin"}
    assert python(launcher, "doctor", "--json", env=bare).stdout == "called with doctor --json\n"


def test_check_finds_what_is_missing_and_what_was_edited(run: Run) -> None:
    assert run("--client", "claude", "--check")[0] == 1 and not PLACE.exists()
    for words in ((), ("--thin",)):
        run("--client", "claude", *words)
        assert run("--client", "claude", "--check")[0] == 0
        text = (PLACE / "SKILL.md").read_text()
        (PLACE / "SKILL.md").write_text("mine")
        assert (
            run("--client", "claude", "--check")[0] == 1
            and (PLACE / "SKILL.md").read_text() == "mine"
        )
        (PLACE / "SKILL.md").write_text(text)


@cases("words", [], ["--thin"])
def test_the_tools_of_the_host_see_nothing_of_it(words: list[str], run: Run) -> None:
    Path("ours.py").write_text("def f(x: int) -> int:\n    return x\n")
    Path("pyproject.toml").write_text(
        '[tool.ruff.lint]\nselect = ["ANN", "B", "E", "F", "I", "S"]\n[tool.mypy]\nstrict = true\n'
    )
    tools = (
        ["ruff", "check", "--no-cache", "."],
        ["ruff", "format", "--check", "--no-cache", "."],
        ["mypy", "--cache-dir", "none", "."],
    )
    before = [
        subprocess.run([sys.executable, "-m", *tool], capture_output=True, check=True).stdout
        for tool in tools
    ]
    run(*words)
    assert [
        subprocess.run([sys.executable, "-m", *tool], capture_output=True, check=True).stdout
        for tool in tools
    ] == before


@cases(
    "client, user, folders",
    ("claude", False, [".claude/skills"]),
    ("claude", True, [".claude/skills"]),
    ("codex", True, [".agents/skills"]),
    ("cursor", False, [".cursor/skills"]),
    ("gemini", True, [".gemini/skills"]),
    ("opencode", False, [".opencode/skills"]),
    ("opencode", True, [".config/opencode/skills"]),
    ("copilot", False, [".github/skills"]),
    ("copilot", True, [".copilot/skills"]),
    ("all", False, [".claude/skills", ".agents/skills"]),
    ("all", True, [".claude/skills", ".agents/skills"]),
)
def test_places(
    run: Run, small: object, tmp_path: Path, client: str, user: bool, folders: list[str]
) -> None:
    code, answer = run("--client", client, "--user" if user else "--project")
    base = tmp_path / ("home" if user else "project")
    assert code == 0 and answer["ok"]
    assert [one["folder"] for one in answer["targets"]] == [
        str(base / folder / NAME) for folder in folders
    ]
    served = {name for one in answer["targets"] for name in one["clients"]}
    assert served == (set(installer.PLACES) if client == "all" else {client})
    assert {p.parent for p in base.rglob("SKILL.md")} == {
        base / folder / NAME for folder in folders
    }
    assert not tree(tmp_path / ("project" if user else "home"))


def test_without_a_client_it_is_all_in_the_project(run: Run, small: object) -> None:
    assert run()[0] == 0
    names = [*SMALL, manifest.MANIFEST]
    assert set(tree(Path())) == {
        f"{folder}/{NAME}/{path}" for folder in installer.SHARED for path in names
    }


def test_clients_of_one_folder_share_one_copy(run: Run, small: object) -> None:
    Path(".agents").mkdir()
    Path(".claude").symlink_to(".agents")
    code, answer = run("--client", "codex", "--client", "claude")
    found = [(Path(one["folder"]).parts[-3], one["clients"]) for one in answer["targets"]]
    assert (code, found) == (0, [(".agents", ["codex", "claude"])])


def test_a_dry_run_writes_nothing(run: Run, small: dict[str, bytes], tmp_path: Path) -> None:
    code, answer = run("--dry-run")
    assert code == 0 and [one["action"] for one in answer["targets"]] == ["install", "install"]
    assert not list((tmp_path / "project").iterdir()) and not list((tmp_path / "home").iterdir())
    run()
    before = tree(tmp_path)
    small["SKILL.md"] = b"new\n"
    assert run("--dry-run")[1]["targets"][0]["replaced"] == 1
    assert run("--dry-run", "--uninstall")[1]["targets"][0]["removed"] == 3
    assert tree(tmp_path) == before


def test_an_upgrade_in_place(run: Run, small: dict[str, bytes], monkeypatch: Patch) -> None:
    monkeypatch.setattr(manifest, "__version__", "0.0.9")
    run("--client", "claude")
    monkeypatch.setattr(manifest, "__version__", __version__)
    (PLACE / "notes.txt").write_text("mine")
    small["skill/cli.py"] = b"a = 2\n"
    small["skill/more.py"] = b"c = 3\n"
    del small["verifier/flow.py"]
    code, answer = run("--client", "claude", "--full")
    one = answer["targets"][0]
    assert (code, one["action"], one["previous"]) == (0, "upgrade", "0.0.9")
    assert (one["new"], one["replaced"], one["removed"], one["kept"]) == (1, 1, 1, [])
    found = tree(PLACE)
    assert json.loads(found.pop(manifest.MANIFEST))["version"] == __version__
    assert found == {**{path: data.decode() for path, data in small.items()}, "notes.txt": "mine"}
    assert not (PLACE / "verifier").exists()
    assert run("--client", "claude", "--full")[1]["targets"][0]["action"] == "none"


def test_an_upgrade_says_what_changed(run: Run, small: dict[str, bytes]) -> None:
    small["references/contract.md"] = b"- **old-rule**: a\n- **kept-rule**: a\n"
    run("--client", "claude")
    small |= {
        "references/contract.md": b"- **new-rule**: a\n- **kept-rule**: a\n",
        "SKILL.md": b"other\n",
    }
    texts = ["SKILL.md", "references/contract.md"]
    found = run("--client", "claude")[1]["targets"][0]["changed"]
    assert found == {"texts": texts, "rules_new": ["new-rule"], "rules_gone": ["old-rule"]}


def test_an_upgrade_from_files_of_their_own_leaves_none(run: Run, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(contents, "pack_files", lambda: contents._of_pack(contents.PACK))
        run("--client", "claude")
    build_file_tree(PLACE, {"verifier/probe/__pycache__/frames.cpython-311.pyc": ""})
    assert run("--client", "claude")[0] == 0
    assert set(tree(PLACE)) == {*contents.pack_files(), manifest.MANIFEST}


def test_a_missing_file_is_written_again(run: Run, small: object) -> None:
    run("--client", "claude")
    (PLACE / "SKILL.md").unlink()
    assert run("--client", "claude")[1]["targets"][0]["new"] == 1
    assert (PLACE / "SKILL.md").read_bytes() == SMALL["SKILL.md"]


@pytest.mark.parametrize(
    "gone", [False, True], ids=["the pack has it anew", "the pack has it no more"]
)
def test_an_edited_file_is_kept_and_named(run: Run, small: dict[str, bytes], gone: bool) -> None:
    run("--client", "claude")
    edited = PLACE / "skill/cli.py"
    edited.write_text("mine\n")
    small["SKILL.md"] = b"new\n"
    if gone:
        del small["skill/cli.py"]
    else:
        small["skill/cli.py"] = b"a = 2\n"
    for _ in range(2):
        code, answer = run("--client", "claude")
        assert (code, answer["ok"], answer["targets"][0]["kept"]) == (1, False, ["skill/cli.py"])
        assert edited.read_text() == "mine\n"
        assert (edited.parents[1] / "SKILL.md").read_bytes() == b"new\n"
        if gone:
            return
    assert run("--client", "claude", "--force")[0] == 0
    assert edited.read_bytes() == b"a = 2\n"


def test_a_file_that_became_a_link_is_an_edit(run: Run, small: object, tmp_path: Path) -> None:
    run("--client", "claude")
    linked = PLACE / "SKILL.md"
    (tmp_path / "mine.md").write_bytes(SMALL["SKILL.md"])
    linked.unlink()
    linked.symlink_to(tmp_path / "mine.md")
    assert run("--client", "claude")[1]["targets"][0]["kept"] == ["SKILL.md"]
    assert run("--client", "claude", "--force")[0] == 0
    assert not linked.is_symlink() and (tmp_path / "mine.md").read_bytes() == SMALL["SKILL.md"]


def test_uninstall_removes_what_was_installed(run: Run, small: object) -> None:
    run("--client", "all", "--client", "cursor")
    other, cache = ".claude/skills/another/SKILL.md", f"{PLACE}/skill/__pycache__"
    compiled = {f"{cache}/{name}.cpython-311.pyc": "" for name in ("cli", "mine")}
    build_file_tree(Path(), {other: "another\n", **compiled})
    code, answer = run("--uninstall")
    assert code == 0
    assert sorted(Path(one["folder"]).parts[-3] for one in answer["targets"]) == [
        ".agents",
        ".claude",
        ".cursor",
    ]
    assert set(tree(Path())) == {f"{cache}/mine.cpython-311.pyc", other}
    assert not Path(f".agents/skills/{NAME}").exists()
    code, answer = run("--uninstall", "--client", "codex")
    assert (code, answer["targets"]) == (0, [])


def test_uninstall_keeps_an_edit_until_force(run: Run, small: object) -> None:
    run("--client", "claude")
    edited = PLACE / "SKILL.md"
    edited.write_text("mine\n")
    code, answer = run("--uninstall")
    assert code == 1 and answer["targets"][0]["kept"] == ["SKILL.md"]
    assert set(tree(edited.parent)) == {"SKILL.md", manifest.MANIFEST}
    assert run("--uninstall", "--force")[0] == 0
    assert not edited.parent.exists()


def test_uninstall_leaves_alone_what_it_did_not_write(run: Run, small: object) -> None:
    build_file_tree(PLACE, {"SKILL.md": "mine\n"})
    code, answer = run("--uninstall", "--force")
    assert code == 1 and answer["targets"][0]["action"] == "foreign"
    assert tree(PLACE) == {"SKILL.md": "mine\n"}


def test_uninstall_goes_on_past_a_link_that_is_not_ours(run: Run, small: object) -> None:
    run("--client", "codex")
    PLACE.parent.mkdir(parents=True)
    PLACE.symlink_to(Path(".agents/skills").absolute() / NAME)
    (Path(".gemini/skills") / NAME).mkdir(parents=True)
    code, answer = run("--uninstall")
    assert code == 1
    actions = {Path(one["folder"]).parts[-3]: one["action"] for one in answer["targets"]}
    assert actions == {".agents": "uninstall", ".claude": "foreign"}
    assert PLACE.is_symlink() and not tree(Path(".agents"))


EMPTY = '{"manifest": 1, "version": "0", "files": {}}'
SKILLS, COPY = ".claude/skills", f".claude/skills/{NAME}"
UP = Path("../../../home")  # from a folder of the project, two below it


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--force"]], ids=["", "dry run", "force"])
@cases(
    "there, message",
    ({COPY: "mine"}, "must be a folder"),
    ({".claude": "mine"}, "must be a folder"),
    ({"../home/elsewhere/a": "", COPY: UP / "elsewhere"}, "is a symbolic link to"),
    ({SKILLS: Path("../../home")}, "leads out of"),
    (
        {f"{COPY}/skill": "../" / UP, f"{COPY}/{manifest.MANIFEST}": EMPTY},
        "is in the way: it must be a folder",
    ),
    (
        {f"{COPY}/SKILL.md/x/y": "", f"{COPY}/{manifest.MANIFEST}": EMPTY},
        "is in the way: it must be a file",
    ),
    ({f"{COPY}/.git/x": ""}, "is a git clone"),
    ({f"{COPY}/SKILL.md": "mine"}, "was not written by `fsdp2 install`"),
    *(
        ({f"{COPY}/{manifest.MANIFEST}": text}, "is not what `fsdp2 install` wrote")
        for text in (
            "{",
            "[]",
            EMPTY.replace("{}", '{"../x": ""}'),
            EMPTY.replace("{}", '{"/x": ""}'),
        )
    ),
    (
        {f"{COPY}/{manifest.MANIFEST}": EMPTY.replace("1", "9")},
        "is not what `fsdp2 install` wrote",
    ),
)
def test_odd_targets_are_refused_in_one_line(
    run: Run,
    small: object,
    tmp_path: Path,
    there: dict[str, str | Path],
    message: str,
    words: list[str],
) -> None:
    build_file_tree(Path(), there)
    before = tree(tmp_path)
    if "not written by" in message and "--force" in words:
        assert run(*words)[0] == 0
        return
    code, error = run(*words)
    assert (code, error.count("\n")) == (2, 0) and message in error
    assert tree(tmp_path) == before and not Path(".agents").exists()


def test_a_folder_that_cannot_be_written(run: Run, small: object, monkeypatch: Patch) -> None:
    Path(".claude").mkdir()
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != ".claude"
    )  # permissions do not stop root
    code, error = run()
    assert code == 2 and "cannot be written" in error and not Path(".agents").exists()


def test_a_folder_that_refuses_after_all(run: Run, small: object, monkeypatch: Patch) -> None:
    mkdir = Path.mkdir

    def refusing(path: Path, *args: int, **options: bool) -> None:
        if ".agents" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refusing)
    code, error = run()
    assert code == 2 and "cannot write" in error and "Permission denied" in error
    assert not Path(".agents").exists() and not list(Path(".claude").rglob("*.md"))


@pytest.mark.parametrize("home", ["", "relative"])
def test_no_home(run: Run, monkeypatch: Patch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    assert run("--user")[0] == 2


def test_bad_words(command: Command) -> None:
    command("install", "--user", "--project", code=2)
    assert "emacs" in command("install", "--client", "emacs", code=2).err


@pytest.mark.parametrize("upgrade", [False, True])
def test_a_failure_in_the_second_folder_undoes_the_first(
    run: Run, small: dict[str, bytes], monkeypatch: Patch, tmp_path: Path, upgrade: bool
) -> None:
    if upgrade:
        run()
        small.update({"SKILL.md": b"new\n", "skill/more.py": b"c\n"})
    before = tree(tmp_path)
    real = atomic_write.write_files

    def failing(contents: atomic_write.Contents, out: Path) -> None:
        if ".agents" in str(out):
            raise installer.UserError(f"cannot write {out}: No space left on device")
        real(contents, out)

    monkeypatch.setattr(installer, "write_files", failing)
    code, error = run()
    assert code == 2 and "No space left" in error
    assert tree(tmp_path) == before


def test_a_pack_that_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "skill").mkdir()
    (tmp_path / "SKILL.md").write_text("")
    with pytest.raises(
        installer.UserError, match=r"verified-fsdp2: LICENSE, __init__\.py is missing"
    ):
        contents.pack_files(tmp_path)


def test_the_text(command: Command, small: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "project" / ".claude" / "skills" / NAME

    def printed(*words: str) -> list[str]:
        return command("install", "--client", "claude", *words).out.splitlines()

    assert printed("--dry-run") == [f"would be installed: {folder} (3 files, 0.0 MB), for claude"]
    assert printed() == [
        f"installed: {folder} (3 files, 0.0 MB), for claude",
        f"try it: python {folder}/skill doctor",
    ]
    digest = contents.digest(small)
    same = f"up to date: {folder} ({__version__}, digest {digest}), for claude"
    assert printed() == [same, f"try it: python {folder}/skill doctor"]
    (folder / "SKILL.md").write_text("mine")
    assert printed("--uninstall") == [
        f"removed: {folder} (2 files), for claude",
        "  kept, since you edited it: SKILL.md",
        "--force replaces or removes the files that were kept",
    ]
    assert printed("--uninstall", "--force")[0].startswith("removed: ")
    assert printed("--uninstall") == ["nothing is installed here"]
