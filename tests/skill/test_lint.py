"""`fsdp2 lint`: its output, its exit codes, bad usage, and what it imports."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from verified_fsdp2.skill.cli import main
from verified_fsdp2.verifier.report import json_report
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import SourceRule

TESTS = Path(__file__).parents[1]
SCHEMA = json.loads((Path(json_report.__file__).parent / "report.schema.json").read_text())
LATE = TESTS / "faults" / "optim_before_shard.py"
RIGHT = TESTS / "zoo" / "minimal.py"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["lint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LATE.parent)
    code, out, err = run(capsys, "optim_before_shard.py")
    assert (code, err) == (1, "")
    for part in (
        "FAIL optim-before-shard",
        "at   optim_before_shard.py:67 in main",
        "optimizer = torch.optim.AdamW(",
        "mend Move the construction of the optimizer",
        "page fsdp2 explain optim-before-shard",
        "after the mend, prove it: fsdp2 lint optim_before_shard.py",
    ):
        assert part in out
    assert out.splitlines()[-1].startswith("1 fault in 1 file, ")


def test_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, RIGHT)
    assert code == 0
    assert out.startswith("0 faults in 1 file, ") and out.count("\n") == 1


def test_json_follows_the_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, LATE, RIGHT, "--json")
    report = json.loads(out)
    jsonschema.validate(report, SCHEMA)
    assert (code, report["verdict"], report["runs"]) == (1, "fail", [])
    (finding,) = report["findings"]
    assert (finding["rule"], finding["tier"], finding["location"]["line"]) == ("optim-before-shard", "static", 67)
    code, out, _ = run(capsys, LATE, "--report", f"json={tmp_path / 'new' / 'out.json'}", "--report", "text")
    assert code == 1 and "FAIL optim-before-shard" in out
    jsonschema.validate(json.loads((tmp_path / "new" / "out.json").read_text()), SCHEMA)


def test_the_output_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *sorted((TESTS / "faults").glob("*.py")))
    assert code == 1
    assert len(out) < 10_500 and "(cut; --report json=PATH has all)" in out


def test_a_folder_is_sorted_and_environments_are_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", ".hidden/x.py", "env/lib/x.py", "__pycache__/x.py", "node_modules/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LATE.read_text())
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    code, out, _ = run(capsys, tmp_path, "--json")
    files = [Path(f["location"]["file"]).relative_to(tmp_path).as_posix() for f in json.loads(out)["findings"]]
    assert (code, files) == (1, ["a/z.py", "b.py"])


def test_only_and_skip(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, LATE, "--only", "optim-before-shard")[0] == 1
    assert run(capsys, LATE, "--only", "optimizer")[0] == 1
    assert run(capsys, LATE, "--only", "wrapping")[0] == 0
    assert run(capsys, LATE, "--skip", "optim-before-shard")[0] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "nowhere.py: no such file or folder"),
        (["{empty}"], "no Python file in this folder"),
        (["{text}"], "notes.txt:1:7: this is not Python: invalid syntax"),
        (["{binary}"], "b.py:1:1: this is not Python"),
        (["{right}", "--only", "no-such-rule"], "unknown rule or family 'no-such-rule'"),
        (["{right}", "--only", "matches-ddp"], "'matches-ddp' cannot be seen in sources alone"),
        (["{right}", "--report", "xml"], "unknown format 'xml'"),
        (["{right}", "--report", "json="], "a path is missing after '='"),
        (["{right}", "--json", "--report", "text"], "two reports cannot both go to stdout"),
        (["{right}", "--report", "json={text}/x"], "cannot be written"),
        (["{right}", "--", "--x"], "only `fsdp2 verify` takes arguments after `--`"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("plain old prose\n")
    (tmp_path / "b.py").write_bytes(b"\x00\xff\xfe")
    names = {"empty": tmp_path / "empty", "text": tmp_path / "notes.txt", "binary": tmp_path / "b.py", "right": RIGHT}
    code, out, err = run(capsys, *[word.format(**names) for word in words])
    assert (code, out) == (2, "")
    assert told in err


def test_no_path_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["lint"])
    assert stopped.value.code == 2
    assert "PATH" in capsys.readouterr().err


def test_a_file_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = 1\n")

    def refusing(_: Path) -> bytes:  # permissions do not stop root
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refusing)
    code, _, err = run(capsys, path)
    assert code == 2 and "cannot be read: Permission denied" in err


def test_a_loop_of_links_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "sub.py").mkdir()
    code, _, err = run(capsys, tmp_path / "sub.py")
    assert code == 2 and "no Python file" in err
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    code, _, err = run(capsys, tmp_path)
    assert code == 2 and "loop.py: cannot be read" in err


@pytest.mark.parametrize("script", [RIGHT, LATE], ids=["right", "fault"])
def test_nothing_heavy_is_imported(script: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "verified_fsdp2.skill", "lint", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "verified_fsdp2.verifier.source.lint" in imported
    heavy = {"torch", "numpy", "jsonschema", "yaml", "jinja2", "subprocess", "socket", "tempfile", "shutil"}
    assert imported & heavy == set()


def test_verify_at_the_static_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(LATE), "--tier", "static"]) == 1
    out = capsys.readouterr().out
    assert "FAIL optim-before-shard" in out and "verdict: fail" in out
    assert main(["verify", str(RIGHT), "--tier", "static", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, SCHEMA)
    assert {f["tier"] for f in report["findings"]} == {"static"}
    assert report["target"]["command"].endswith(" --tier static")
    assert "optim-before-shard" in {f["rule"] for f in report["findings"] if f["status"] == "pass"}


def test_what_the_reference_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (TESTS.parent / "references" / "verify.md").read_text(encoding="utf-8")
    section = text.partition("## The static tier")[2].partition("\n## ")[0]
    comment = next(line.partition("#")[2] for line in section.splitlines() if "ignore[root-only-wrap]" in line)
    source = (TESTS / "faults" / "root_only_wrap.py").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(source, encoding="utf-8")
    assert run(capsys, script)[0] == 1
    lines = [f"{line}  #{comment}" if "fully_shard(GPT()" in line else line for line in source.splitlines()]
    script.write_text("\n".join(lines), encoding="utf-8")
    assert run(capsys, script)[0] == 0
    assert main(["verify", str(script), "--tier", "static"]) == 0
    told = section.partition("`suppressed at train.py:12: ")[2].partition("`")[0]
    assert told and f": {told}" in capsys.readouterr().out
    decided = [name for name, rule in RULES.items() if isinstance(rule, SourceRule) and name != "unused-suppression"]
    assert all(f"`{name}`" in section for name in decided)
