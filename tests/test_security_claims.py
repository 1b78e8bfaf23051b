"""Each sentence of SECURITY.md and of the README on what a verification does to a machine is held by a test."""

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


def test_no_bullet_of_what_runs_is_without_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("## What runs")[2].partition("\n## ")[0]
    bullets = [" ".join(part.split()) for part in re.split(r"\n- ", section)[1:]]
    assert len(bullets) >= 5
    for bullet in bullets:
        assert any(claim in bullet for claim in CLAIMS["SECURITY.md"]), bullet
