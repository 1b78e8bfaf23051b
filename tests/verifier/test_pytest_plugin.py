"""The pytest plugin: an item for each rule, one verification for all of them, and nothing at all
without `--fsdp2`.
"""

import datetime
import tempfile
from pathlib import Path

import pytest

from records import cases

pytest_plugins = ("pytester",)

TESTS = Path(__file__).parents[1]
LATE = (TESTS / "faults" / "optim_before_shard.py").read_text(encoding="utf-8")
RIGHT = (TESTS / "zoo" / "minimal.py").read_text(encoding="utf-8")
PLUGIN = ("-p", "verified_fsdp2.verifier.integrations.pytest_plugin")
STATIC = ("--fsdp2", "train.py", "--fsdp2-tier", "static")


@pytest.fixture
def project(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A folder with a training script that has a fault, and a test; temporary folders are made
    where they can be counted.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pytester.makepyfile(train=LATE, test_ours="def test_ours(): pass\n")
    return pytester


def outcomes(done: pytest.RunResult) -> dict[str, int]:
    """Without the warning that an installed plugin, which these tests have loaded, cannot be
    rewritten.
    """
    return {
        name: number
        for name, number in done.parseoutcomes().items()
        if name not in ("warning", "warnings")
    }


def names(done: pytest.RunResult) -> list[str]:
    return [line for line in done.outlines if "::" in line]


def test_each_rule_is_an_item(project: pytest.Pytester) -> None:
    found = names(project.runpytest_inprocess(*PLUGIN, *STATIC, "--collect-only", "-q"))
    assert "train.py::optim-before-shard" in found and len(found) == len(set(found)) > 40
    assert all(name.startswith("train.py::") for name in found), (
        "the target alone, if nothing else is named"
    )
    both = names(project.runpytest_inprocess(*PLUGIN, *STATIC, "--collect-only", "-q", "."))
    assert both == [*found, "test_ours.py::test_ours"] or sorted(both) == sorted(
        [*found, "test_ours.py::test_ours"]
    )


def test_a_failure_is_the_finding_and_can_be_chosen_again(project: pytest.Pytester) -> None:
    done = project.runpytest_inprocess(*PLUGIN, *STATIC)
    counts = done.parseoutcomes()
    assert counts["failed"] == 1 and counts["skipped"] > 40 and "passed" not in counts, (
        "the sources alone never pass"
    )
    done.stdout.fnmatch_lines(["FAIL optim-before-shard*", "* at   train.py:67 in main", "* fix *"])
    assert "pytest_plugin.py" not in done.stdout.str(), "no frames of ours"
    assert project.runpytest_inprocess(*PLUGIN, *STATIC, "--lf").parseoutcomes()["failed"] == 1
    assert outcomes(
        project.runpytest_inprocess(*PLUGIN, *STATIC, "train.py::root-not-wrapped")
    ) == {"skipped": 1}
    project.makepyfile(train=RIGHT)
    assert "failed" not in project.runpytest_inprocess(*PLUGIN, *STATIC).parseoutcomes()
    project.makepyfile(train="print('hi')")
    assert (
        outcomes(project.runpytest_inprocess(*PLUGIN, *STATIC, "-k", "root-not-wrapped"))["failed"]
        == 1
    )


def test_a_folder_is_its_verify_yaml_and_what_that_skips_is_skipped(
    project: pytest.Pytester,
) -> None:
    project.mkdir("run")
    (project.path / "run" / "train.py").write_text(LATE)
    config, words = (
        project.path / "run" / "verify.yaml",
        (*PLUGIN, "--fsdp2", "run", "--fsdp2-tier", "static"),
    )
    config.write_text("nproc: 2\n")
    done = project.runpytest_inprocess(*words, "-rf")
    done.stdout.fnmatch_lines(["FAILED run/verify.yaml::optim-before-shard*"])
    assert done.parseoutcomes()["failed"] == 1
    until = datetime.date.today() + datetime.timedelta(30)
    config.write_text(
        f"nproc: 2\nskip: [{{rule: optim-before-shard, reason: known, until: {until}}}]\n"
    )
    done = project.runpytest_inprocess(*words, "-rs")
    assert "failed" not in done.parseoutcomes()
    done.stdout.fnmatch_lines([f"SKIPPED*skipped: known (until {until})"])


@cases(
    "words, message",
    (("--fsdp2", "none.py"), "none.py: no such file or folder"),
    (("--fsdp2", "train.py", "--fsdp2-nproc", "x"), "nproc: expected a whole number"),
)
def test_wrong_usage(project: pytest.Pytester, words: tuple[str, ...], message: str) -> None:
    done = project.runpytest_inprocess(*PLUGIN, *words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr.str()


COUNTING = """
import pathlib, uuid
pathlib.Path({folder!r}, uuid.uuid4().hex).write_text("")
"""


@pytest.fixture
def runs(project: pytest.Pytester) -> Path:
    """Where each rank of a run of train.py leaves a file; it is outside the project, where the
    verifier clears nothing away.
    """
    folder = project.path.with_name(f"{project.path.name}-runs")
    folder.mkdir()
    project.makepyfile(train=COUNTING.format(folder=str(folder)) + LATE)
    return folder


def marked(folder: Path) -> tuple[str, str]:
    return "--fsdp2-allow-writes", str(folder)


@pytest.mark.launch
def test_only_what_is_selected_is_run_and_once(
    project: pytest.Pytester, tmp_path: Path, runs: Path
) -> None:
    rules = "optim-before-shard or root-not-wrapped or load-without-set"
    words = (
        "--fsdp2",
        "train.py",
        "--fsdp2-steps",
        "5",
        "-k",
        rules,
        "--junitxml",
        "j.xml",
        "-rs",
        *marked(runs),
    )
    done = project.runpytest_inprocess(*PLUGIN, *words)
    counts = done.parseoutcomes()
    assert (counts["failed"], counts["passed"], counts["skipped"]) == (1, 1, 1)
    done.stdout.fnmatch_lines(["SKIPPED*not applicable: *"])
    assert "27 of 27 parameters" in (project.path / "j.xml").read_text(), (
        "the finding of the runs, not of the sources"
    )
    assert len(list(runs.iterdir())) == 2, "one run of two ranks"
    left = [
        path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")
    ]  # torch's own cache
    assert left == []


@pytest.mark.full
@pytest.mark.launch
def test_the_workers_of_xdist_share_one_verification(
    project: pytest.Pytester, tmp_path: Path, runs: Path
) -> None:
    rules = "optim-before-shard or root-not-wrapped or same-data-on-every-rank or root-only-wrap"
    done = project.runpytest_subprocess(
        *PLUGIN, "--fsdp2", "train.py", "-k", rules, "-n", "2", *marked(runs)
    )
    assert outcomes(done) == {"failed": 1, "passed": 3}
    assert len(list(runs.iterdir())) == 2, "one run of two ranks"
    assert [path for path in tmp_path.iterdir() if path.name.startswith("fsdp2-")] == []


def test_what_could_not_be_checked_fails_unless_an_option_skips_it(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(train="pass\n")
    words = (*STATIC, "-k", "root-not-wrapped")
    done = project.runpytest_inprocess(*PLUGIN, *words)
    assert done.parseoutcomes()["failed"] == 1
    done.stdout.fnmatch_lines(["not checked: *"])
    done = project.runpytest_inprocess(*PLUGIN, *words, "--fsdp2-inconclusive", "skip", "-rs")
    assert done.parseoutcomes()["skipped"] == 1
    done.stdout.fnmatch_lines(["SKIPPED*not checked: *"])


@pytest.mark.launch
def test_a_part_that_a_run_must_do_is_an_item(project: pytest.Pytester) -> None:
    project.mkdir("run")
    (project.path / "run" / "train.py").write_text(RIGHT)
    (project.path / "run" / "verify.yaml").write_text("require: [accumulation, gpu]\nsteps: 2\n")
    done = project.runpytest_inprocess(
        *PLUGIN, "--fsdp2", "run", "-k", "require-accumulation or optim-before-shard"
    )
    assert outcomes(done) == {
        "failed": 1,
        "passed": 1,
        "deselected": done.parseoutcomes()["deselected"],
    }
    done.stdout.fnmatch_lines(["not checked: accumulation is required, and *"])


@pytest.mark.full
@pytest.mark.launch
def test_the_fixture_on_ranks(project: pytest.Pytester) -> None:
    page = (TESTS.parent / "references" / "verify-project.md").read_text(encoding="utf-8")
    block = page.partition("## pytest")[2].partition("```python\n")[2].partition("```")[0]
    assert block.startswith("def test_training_is_right(fsdp2_verify):")
    block += '    assert report.data["target"]["args"] == "--small"\n'
    project.makepyfile(train=RIGHT, test_ours=block)
    assert outcomes(project.runpytest_inprocess(*PLUGIN, "test_ours.py")) == {"passed": 1}


FIXTURE = """
import pytest

def test_fault(fsdp2_verify):
    report = fsdp2_verify("train.py", tier="static", save_args=["--x", "1 2"])
    assert report.verdict == "fail" and report.data["target"]["save_args"] == "--x '1 2'"
    assert "optim-before-shard" in [finding["rule"] for finding in report.findings]
    with pytest.raises(TypeError, match="no option nprocs"):
        fsdp2_verify("train.py", nprocs=2)
"""
IDLE = """
import sys

def test_idle(request):
    ours = {name for name in sys.modules if name.startswith("verified_fsdp2.verifier.")}
    names = {name.rpartition(".")[2] for name in ours}
    assert names == {"config", "flags", "integrations", "pytest_plugin"}
    assert "torch" not in sys.modules
    assert not request.config.pluginmanager.has_plugin("fsdp2-targets")
"""


def test_the_fixture_and_that_it_costs_nothing_unless_it_is_asked(project: pytest.Pytester) -> None:
    project.makepyfile(test_ours=FIXTURE, test_idle=IDLE)
    assert outcomes(project.runpytest_inprocess(*PLUGIN, "test_ours.py")) == {"passed": 1}
    assert outcomes(project.runpytest_subprocess(*PLUGIN, "test_idle.py")) == {"passed": 1}
