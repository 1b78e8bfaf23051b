"""Each sentence of SECURITY.md and of the README on what a verification does to a machine is held
by a test.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAYS = "verifier/test_isolation.py::test_nothing_of_the_users_changes"
STOPPED = "verifier/test_isolation.py::test_a_write_is_stopped_before_it_happens"
CHECKPOINT = "verifier/test_isolation.py::test_a_checkpoint_comes_back_by_each_mechanism"
OUTLIVE = "test_interrupted.py::test_no_rank_outlives_a_killed_command"
LEFT = "verifier/test_isolation.py::test_temporary_folders_of_ended_processes_are_removed"
# The beginning of a sentence, and the test that fails where it is not true.
CLAIMS = {
    "README.md": {
        "The verifier runs your own script locally": OUTLIVE,
        "It uses no network, and writes only": LEFT,
        "What the script writes reaches no file of yours": WAYS,
    },
    "SECURITY.md": {
        "`fsdp2 verify TARGET` and `fsdp2 plan TARGET` run": OUTLIVE,
        "Every launch is bounded in time": "verifier/test_hangs.py",
        "No run changes a file of yours": WAYS,
        "that neither holds is stopped": STOPPED,
        "A run that is killed at whatever moment": LEFT,
        "What looks like a password": "verifier/test_secrets_in_reports.py",
        "No command uses the network": LEFT,
        "Traces of the ranks stay in a temporary folder": LEFT,
        "`fsdp2 verify --launcher` starts the command": "verifier/test_cluster.py",
    },
}


def test_each_claim_is_in_the_text_and_has_its_test() -> None:
    for name, claims in CLAIMS.items():
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for claim, test in claims.items():
            assert claim in text, (name, claim)
            file, _, function = test.partition("::")
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in source, test


def test_the_figures_of_isolation_are_those_that_were_measured() -> None:
    found = json.loads((ROOT / "benchmarks/results/isolation.json").read_text(encoding="utf-8"))
    page = (ROOT / "references/reliability.md").read_text(encoding="utf-8")
    section = " ".join(page.partition("## Isolation\n")[2].partition("\n## ")[0].split())
    ways, held, rows = found["ways"], found["held"], found["by_way"]
    assert f"in {ways} ways" in section and f"{held['before']} of {ways}; 35 more" in section
    assert sum(row["before"] == "time of a folder" for row in rows) == 35
    for name in ("overlay", "copy", "guard"):
        assert f"| {name} | {held[name]} of {ways}" in section
    for name in ("copy", "guard"):
        stopped = sum(row[name] == "stopped" for row in rows)
        assert f"| {name} | {held[name]} of {ways}, {stopped} of them by stopping" in section
    none = sum(row["user"] == "not available" for row in rows)
    assert f"{held['user']} of {ways - none} (two ways need root)" in section and none == 2
    failed = sum(row["user"] == "stopped" and row["overlay"] == "held" for row in rows)
    assert "in two of these the run failed at the rename of a folder" in section and failed == 2
    right = {
        sum(int(text.split()[0]) for text in rows.values()) for rows in found["kills"].values()
    }
    assert right == {160} and "160 of 160 each" in section
    jobs = found["beside"]["overlay"]["job"]
    assert len(jobs) == 4 and not any(job["lines_lost"] for job in jobs)
    assert not any(row["rules_that_differ"] for row in found["beside"]["overlay"]["together"])
    cost = max(
        row["seconds_of_the_verifier"]
        for kind in ("copy", "overlay")
        for row in found["beside"][kind]["files"]
    )
    assert f"{cost:.1f} s at most" in section


def test_no_bullet_of_what_runs_is_without_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("## What runs")[2].partition("\n## ")[0]
    bullets = [" ".join(part.split()) for part in re.split(r"\n- ", section)[1:]]
    assert len(bullets) >= 5
    for bullet in bullets:
        assert any(claim in bullet for claim in CLAIMS["SECURITY.md"]), bullet
