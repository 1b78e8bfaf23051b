"""The report of the guard: journals of several ranks and starts, as text and as a page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_html import HOSTILE, sound

from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.guard.report import LINES, read_run, text
from verified_fsdp2.verifier.guard.report_html import MOST, page

Line = dict[str, Any]


def line(kind: str, time: float = 0.0, rank: int = 0, **fields: Any) -> Line:
    return {"kind": kind, "time": time, "rank": rank, **fields}


def start(time: float = 0.0, step: int = 0, world: int = 4, **more: Any) -> Line:
    fields = {"schema": 1, "torch": "2.9.0", "argv": ["train.py"], "settings": "on", "host": "n"}
    return line("start", time, **{**fields, "step": step, "world": world, **more})


def check(time: float, step: int, **more: Any) -> Line:
    return line("check", time, step=step, late=[], sent=10, loss=2.0, norm=1.0, **more)


def breach(time: float = 1.0, rank: int = 0, **more: Any) -> Line:
    fields: Line = {"law": "loss-and-norm", "step": 20, "message": "norms differ", "since": None}
    fields |= {"ranks": [], "names": [], "more_names": 0, "place": "", "edit": "", "command": ""}
    return line("breach", time, rank, **{**fields, **more})


Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(*lines: Line | str, name: str = "guard.jsonl") -> Path:
        path = tmp_path / name
        texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return path

    return write


def test_the_verdict_says_what_was_held(written: Written) -> None:
    lines = [start(), check(1, 1), check(2, 800), start(3, 700, 2), check(4, 701)]
    lines += [check(5, 1200), line("end", 6, step=1200, breaches=0)]
    first, *rest = text(read_run(written(*lines))).splitlines()
    held = "guard.jsonl: 1,200 steps in 2 starts (4, 2 ranks), 4 checks"
    assert first.endswith(f"{held}: no law was broken in what was held")
    assert rest == [
        "not held:",
        "  no end was written, the process was killed: start 1 (compared up to 800)",
    ]
    ended = written(start(), check(1, 1), line("end", 2, step=1, breaches=0))
    assert text(read_run(ended)).endswith("1 step in 1 start (4 ranks), 1 check: no law was broken")
    nothing = text(read_run(written(start(world=1)))).splitlines()
    assert nothing[0].endswith("0 steps in 1 start (1 rank), 0 checks: nothing was compared")
    assert nothing[-1].endswith("; the last may still run")
    two = read_run(written(start(), breach(), breach(message="other"), breach(law="hang", step=30)))
    assert two.result() == "3 breaches (loss-and-norm, hang)"
    assert two.as_json()["verdict"].endswith(two.result())


def test_a_breach_has_its_place_edit_and_command(written: Written) -> None:
    names = [f"layers.{n}.weight" for n in range(12)]
    late = breach(names=names, more_names=4, since=10, ranks=[3], place="train.py:8", edit="do so")
    late |= {"law": "replicas-agree", "command": "fsdp2 verify train.py", "message": "other bits"}
    path = written(start(), breach(time=2.0), late, breach(law="hang", step=5), check(3, 20))
    assert text(read_run(path)).splitlines()[1:-2] == [
        "hang: 1",
        "  step 5: norms differ",
        "replicas-agree: 1",
        "  step 20 (held at step 10), rank 3: other bits; at train.py:8",
        "    parameters: layers.0.weight, layers.1.weight, layers.2.weight and 13 more",
        "    edit: do so",
        "    command: fsdp2 verify train.py",
        "loss-and-norm: 1",
        "  step 20: norms differ",
    ]


def test_breaches_of_one_step_are_said_to_be(written: Written) -> None:
    earlier = breach(law="hang", time=9.0, since=0)
    lines = text(read_run(written(start(), breach(), breach(law="hang", since=10), earlier)))
    assert lines.splitlines()[1:4] == [
        "2 are of step 20: the first may cause the others",
        "hang: 1",
        "  step 20 (held at step 0): norms differ",
    ]


def test_the_journals_of_all_ranks_are_one(written: Written) -> None:
    path = written(start(), check(1, 20), start(10, 20), check(11, 40), line("end", 12, step=40))
    written(breach(2, 3, ranks=[3]), line("note", 2, 3, text="odd"), name="guard.rank3.jsonl")
    again = breach(11.5, 12, ranks=[12], step=40)
    written(breach(2, 12, ranks=[12]), again, name="guard.rank12.jsonl")
    written(breach(2, 5, message="of another run"), name="guard.rank5.old.jsonl")
    run = read_run(path)
    assert [(one.step, one.ranks, one.again) for one in run.breaches] == [(20, [3, 12], [40])]
    assert run.breaches[0].where() == "step 20, again at 40, ranks 3, 12"
    assert "  odd" in text(run).splitlines()
    assert [len(lines) for lines in run.starts] == [5, 4]


def test_what_was_not_held_is_said(written: Written) -> None:
    lines = [start(schema=7), {**check(1, 1), "late": [2]}, {**check(2, 20), "late": [2, 3]}]
    lines += [
        line("error", 3, text="Hardware: it broke"),
        line("error", 3, text="Hardware: it broke"),
    ]
    lines += [line("stall", 4, 1, step=24, seconds=300.0, line="train.py:9", call="all_reduce")]
    path = written(*lines, line("end", 5, step=25, breaches=0), '{"kind": "bre', "", "[1]")
    assert text(read_run(path)).splitlines()[1:] == [
        "not held:",
        "  no check followed steps 21 to 25 (start 1)",
        "  2 of 2 checks lack ranks that were late: rank 2 (2 x), rank 3 (1 x)",
        "  1 x a rank made no step for long, first rank 1 at train.py:9 all_reduce",
        "  schema 7 is not known here: what is known was read",
        "  2 lines could not be read: cut, or not of the guard",
        "  fault of the guard itself: Hardware: it broke (2 x)",
    ]


@pytest.mark.parametrize(
    "content", ["", "loss 2.0\n", '[1]\n{"step": 3}\n', "\0\xff{" * 9, "[" * 9999]
)
def test_another_file_is_no_journal(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="no journal of the guard") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        read_run(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="directory"):
        read_run(tmp_path)


ODD: list[Any] = [None, True, -1, 1 << 70, 1e400, float("nan"), "text", ["x"], {"a": []}, [[1], {}]]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_values_of_any_type_are_read(written: Written, odd: Any) -> None:
    kinds = (
        start(),
        check(1, 1),
        breach(),
        *(line(k, step=3) for k in ("save", "stall", "note", "end")),
    )
    lines = [{**one, name: odd} for one in kinds for name in one if name != "kind"]
    run = read_run(written(start(), *lines, check(9, 9)))
    assert len(text(run).splitlines()) <= LINES
    sound(page([run, run]))
    json.dumps(run.as_json(), allow_nan=False)


def test_a_text_is_never_long(written: Written) -> None:
    """Of each law the first breach is there, and what was not held."""
    many = [
        breach(
            law=f"law-{n % 7}",
            step=n + 5,
            message=f"{n} " * 900,
            edit="e",
            command="c",
            names=["w"],
        )
        for n in range(400)
    ]
    notes = [line("note", text=f"note {n}") for n in range(90)]
    lines = text(read_run(written(start(), *many, *notes))).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) < 600
    assert all(f"law-{n}: {57 + (n == 0)}" in lines for n in range(7))
    assert sum("more" in one for one in lines) == 3  # laws, breaches, notes
    assert "not held:" in lines
    laws = [breach(law=f"law-{n}", message=f"{n}") for n in range(400)]
    assert len(text(read_run(written(start(), *laws))).splitlines()) <= LINES


def test_nothing_is_a_credential_or_a_command(written: Written) -> None:
    key = "hf_" + "a1B2c3D4e5" * 4
    argv = ["train.py", "--hub-token", "swordfish77", f"--note={key}"]
    said = breach(message="load swordfish77\n::error::x", place="\x1b[31m", edit=f"use {key}")
    run = read_run(written(start(argv=argv), said, line("note", text="::warning::\u202e##[x]")))
    for made in (text(run), page([run]), json.dumps(run.as_json())):
        assert "swordfish77" not in made and key not in made and "\x1b" not in made
    assert "\u202e" not in text(run) + page([run]) and "##[" not in text(run) + page([run])
    assert not any(one.lstrip().startswith("::") for one in text(run).splitlines())


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_journal_says_is_text(written: Written, hostile: str) -> None:
    fields = dict.fromkeys(("law", "message", "place", "edit", "command"), hostile)
    lines = [start(host=hostile, argv=[hostile]), check(1, 1), breach(**fields, names=[hostile])]
    run = read_run(written(*lines, line("note", text=hostile)))
    run.name = hostile[:1000]
    for runs in ([run], [run, run]):
        assert not any(not c.isprintable() and c != "\n" for c in page(runs))
        sound(page(runs))
    assert len(page([run]).encode()) < 100_000


def test_the_page_has_curves_of_all_runs(written: Written) -> None:
    checks = [check(n, n * 10, step_seconds=0.5) for n in range(1, 30)]
    checks[3]["norm"], checks[4]["loss"] = 1e9, float("nan")
    lines = [start(), *checks, line("save", 30, step=200, path="p"), start(31, 200), check(32, 201)]
    one = read_run(written(*lines, breach(33, step=205)))
    other = read_run(written(start(), *checks, line("end", 40, step=300), name="b.jsonl"))
    found = sound(page([one]))
    assert len(found.all("svg")) == 3 and len(found.all("article")) == 1
    said = " ".join("".join(found.text).split())
    assert "1 breach (loss-and-norm)" in said
    assert "1 value beyond 10, drawn there." in said
    assert "Not finite at 1 check, from step 50." in said
    marks = [a for a in found.all("path") if a.get("class") in ("save", "start", "breach")]
    assert len(marks) == 9 and all(a["d"].count("M") == 1 for a in marks)
    assert len([a for a in found.all("path") if a.get("stroke") == "var(--line-0)"]) == 5
    both = sound(page([one, other]))
    assert len(both.all("table")) == 1 and len([a for a in both.all("span") if "style" in a]) == 6
    assert "1 of 2 runs broke a law" in "".join(both.text)
    assert {"var(--line-0)", "var(--line-1)"} <= {a.get("stroke") for a in both.all("path")}


def test_a_page_of_much_stays_small(written: Written) -> None:
    lines = [start(), *(check(n, n, step_seconds=0.1 + n % 7) for n in range(1, 2_000))]
    lines += [breach(step=n + 1, message=f"{n} {'<' * 900}") for n in range(MOST + 30)]
    run = read_run(written(*lines))
    made = page([run] * 20)
    assert len(made.encode()) < 1_000_000
    said = "".join(sound(made).text)
    assert f"{20 * (MOST + 30) - MOST} more are left out" in said and "4 more runs" in said


def test_nothing_held_is_no_pass(written: Written) -> None:
    found = sound(page([read_run(written(start()))]))
    assert not found.all("svg") and "? nothing was compared" in "".join(found.text)
    assert [a["class"] for a in found.all("span") if "verdict" in a.get("class", "")] == [
        "verdict inconclusive"
    ]
