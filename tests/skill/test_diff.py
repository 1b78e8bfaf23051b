"""`fsdp2 diff`: whose lines differ, and that nothing is written."""

import re
from pathlib import Path

import pytest

from records import cases
from trees import Workshop, file_tree

TEXT = "one\ntwo\nthree\n{steps}\nfive\nsix\n"
WRITTEN = TEXT.replace("{steps}", "20")
DIFF = """\
--- a.py\tas fsdp2 wrote it
+++ a.py\tas you edited it
@@ -1,4 +1,4 @@
-one
+my one
 two
 three
 20
--- a.py\tas fsdp2 wrote it
+++ a.py\tas its spec renders it now
@@ -1,6 +1,6 @@
 one
 two
 three
-20
+30
 five
 six
--- b.py\tas fsdp2 wrote it
+++ b.py\tas you edited it
@@ -1 +1,2 @@
 b
+mine
\\ No newline at end of file
--- spec.yaml\tas it is
+++ spec.yaml\tas an update writes it
"""


def test_no_difference(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT})
    for arguments in ([], ["--stat"]):
        said = workshop.diff(*arguments)
        assert said.out == "" and said.err == f"{workshop.out}: no difference\n"
    assert workshop.diff("--json").data["files"] == []


def test_edits_and_changes_are_distinguished(workshop: Workshop) -> None:
    workshop.make(
        {"a.py": TEXT, "b.py": "b\n"}, {"a.py": WRITTEN.replace("one", "my one"), "b.py": "b\nmine"}
    )
    before = file_tree(workshop.out.parent)
    said = workshop.diff("--set", "train.steps=30", code=1)
    cut = said.out.index("@@", said.out.index("--- spec.yaml"))
    assert said.out[:cut] == DIFF
    assert [line for line in said.out[cut:].splitlines() if line[0] in "+-"] == [
        "-  steps: 20",
        "+  steps: 30",
    ]
    update = f"fsdp2 update {workshop.out} --set train.steps=30"
    assert re.findall(r"\d+ files?", said.err) == ["2 files"] * 2 and said.err.endswith(
        f": {update}\n"
    )
    assert file_tree(workshop.out.parent) == before


STATES = {
    "edited": (TEXT, "mine\n", TEXT, "yours +1 -6"),
    "changed": (TEXT, WRITTEN, "new\n", "the spec's +1 -6"),
    "both": (TEXT, "mine\n", "new\n", "yours +1 -6, the spec's +1 -6"),
    "added": (None, None, "new\n", "the spec's +1 -0"),
    "removed": (TEXT, WRITTEN, None, "the spec's +0 -6"),
    "deleted": (TEXT, None, TEXT, "yours +0 -6"),
}


@pytest.mark.parametrize("state", STATES)
def test_states(workshop: Workshop, state: str) -> None:
    base, ours, theirs, counts = STATES[state]
    workshop.make({"a.py": base}, {"a.py": ours}, {"a.py": theirs})
    assert workshop.diff("--stat", code=1).out == f"{state:<8} {'a.py':<22} {counts}\n"
    report = workshop.diff("--json", code=1).data
    (file,) = report["files"]
    expected = [part for part, word in (("edits", "yours"), ("changes", "spec")) if word in counts]
    assert (file["path"], file["state"], file["note"]) == ("a.py", state, "")
    assert [part for part in ("edits", "changes") if file[part]] == expected
    text = workshop.diff(code=1).out
    assert text == "".join(file[part]["diff"] for part in expected)
    assert ("/dev/null" in text) == (state in ("added", "removed", "deleted"))


@cases(
    "ours, theirs",
    ("new\n", "new\n"),  # both changed it alike
    (WRITTEN.replace("\n", "\r\n"), TEXT),  # line ends
)
def test_what_is_no_difference(workshop: Workshop, ours: str, theirs: str) -> None:
    workshop.make({"a.py": TEXT}, {"a.py": ours}, {"a.py": theirs})
    workshop.diff()


def test_an_edit_of_the_spec(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT})
    workshop.edit("spec.yaml", "  steps: 20\n", "  steps: 30  # more\n")
    shown = [line.split()[:2] for line in workshop.diff("--stat", code=1).out.splitlines()]
    assert shown == [["changed", "a.py"], ["edited", "spec.yaml"]]


def test_an_update_leaves_only_the_edits(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT}, {"a.py": WRITTEN + "mine\n"})
    workshop.update("--set", "train.steps=30")
    said = workshop.diff("--stat", code=1)
    assert said.out == f"edited   {'a.py':<22} yours +1 -0\n"
    assert re.findall(r"\d+ files?", said.err) == ["1 file", "0 files"]


def test_a_link_is_reported(workshop: Workshop) -> None:
    workshop.make({"a.py": TEXT}, {"a.py": Path("nowhere")})
    for arguments, expected in (([], ""), (["--stat"], f"edited   {'a.py':<22} ")):
        assert (
            workshop.diff(*arguments, code=1).out
            == f"{expected}{workshop.out}/a.py is a symbolic link\n"
        )
