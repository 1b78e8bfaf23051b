"""Errors that end the training and that the script catches: what is recorded, and the finding."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from records import cases, end, judge, row, run, sources, step, stepped
from records import judged_as as judged
from verified_fsdp2.verifier.analysis.error_handlers import handler_of
from verified_fsdp2.verifier.analysis.survived_errors import survived
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judging.all_findings import with_consequences
from verified_fsdp2.verifier.probe.loop_progress import loops_at
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import Place

SCRIPT = """def forward(batch):
    raise RuntimeError("no memory")
class Stop(Exception):
    pass
def train(loader):
    for batch in loader:
        try:
            check(batch)
        except ValueError:
            continue
        forward(batch)
        if low(batch):
            raise Stop
        optimizer.step()
try:
    train(loader)
except Exception as error:
    print(error)
try:
    train(loader)
except Stop:
    print("done")
except RuntimeError:
    exit(1)
"""
FILE = "train.py"
CLASSES = {
    "RuntimeError": ["RuntimeError", "Exception"],
    "ValueError": ["ValueError", "Exception"],
    "Stop": ["Stop", "Exception"],
    "KeyError": ["KeyError", "LookupError", "Exception"],
    "KeyboardInterrupt": ["KeyboardInterrupt", "BaseException"],
}


def place(line: int, function: str = "train") -> dict[str, Any]:
    return {"file": FILE, "line": line, "function": function, "code": ""}


def reached(steps: int, **more: Any) -> dict[str, Any]:
    return {"kind": "reached", "steps": steps, "backwards": 1, **more}


def passing(
    *lines: int,
    error: str = "RuntimeError",
    done: int | None = 2,
    total: int | None = 20,
    **more: Any,
) -> dict[str, Any]:
    """An error that passed these lines, innermost first, in iteration `done` of the loop."""
    return {
        "kind": "passing",
        "number": 1,
        "error": error,
        "message": "no memory",
        "classes": CLASSES[error],
        "origin": "user" if error == "Stop" else "python",
        "frames": [place(line) for line in lines],
        "loops": [{"file": FILE, "line": 6, "last": 14, "total": total, "done": done, **more}],
        "callers": [],
        "before_step": True,
        "steps": 2,
        "backwards": 2,
        "since_step": 0,
        "training": True,
        "sharded": True,
    }


def rank(*records: dict[str, Any], steps: int = 2) -> list[dict[str, Any]]:
    """What a rank of the survey run records: two steps, and what comes then."""
    begun = [reached(0, stack=[place(14), place(16, "<module>")], sharded=True)]
    made = [reached(k + 1) for k in range(steps)]
    return [
        *begun,
        *made,
        *records,
        reached(steps, ended=True, backwards=0),
        {"kind": "end", "how": "return"},
    ]


def survey(*ranks: list[dict[str, Any]], text: str = SCRIPT, **more: Any) -> dict[str, Any]:
    """Evidence of a survey run."""
    return {"survey": run(*ranks, role="survey", **more), **sources(text)}


TRAIN = [step(), stepped()]
DIED = passing(2, 11, 16)
SKIPPED = passing(8, error="ValueError")
SKIPPED_LAST = {**passing(8, error="ValueError", done=19), "before_step": False}
IN_STEP = {**SKIPPED, "loops": [], "callers": SKIPPED["loops"]}
EPOCH = {**passing(8, error="ValueError", total=3), "loops": [], "steps": 8}
EPOCH["callers"] = passing(8, total=3)["loops"]
READER = {**passing(8, error="ValueError", done=2, total=9), "thread": True}
READER["loops"][0]["last"] = 8  # its handler is behind the loop
ASKS = SCRIPT.replace("except ValueError", "except KeyError")
BREAKS = SCRIPT.replace("continue", "break")
STOPPED = passing(13, 20, error="Stop")
GOES_ON = passing(2, 11, 16, done=None, total=None, goes_on=True)
UNKNOWN = passing(2, 11, 16, done=None, total=None)
LAST = {**passing(2, 11, 16, done=19), "before_step": False}
LOST = {**passing(11, 16), "message": "Connection closed by peer", "at": 1.0}
RULE = "run-completes"

test_finding = judged(
    row(
        RULE,
        "fail",
        TRAIN,
        names=("every rank", "iteration 3 of 20"),
        **survey(rank(DIED), rank(DIED)),
    ),
    row(RULE, "fail", TRAIN, names=("rank 1", "train.py:17"), **survey(rank(steps=20), rank(DIED))),
    # rank 0 lost rank 1, and caught that before
    row(RULE, "fail", TRAIN, names=("rank 1 raised",), **survey(rank(LOST), rank(DIED))),
    row(RULE, "fail", TRAIN, names=("still holds",), **survey(rank(GOES_ON))),
    row(RULE, "fail", TRAIN, names=("another rank 9",), **survey(rank(UNKNOWN), rank(steps=9))),
    row(RULE, "inconclusive", TRAIN, names=("no loop shows",), **survey(rank(UNKNOWN))),
    # what fails is behind the step of the last iteration
    row(RULE, "inconclusive", TRAIN, names=("no loop shows",), **survey(rank(LAST))),
    # batches are left out until the loop is over
    row(RULE, "pass", TRAIN, **survey(rank(SKIPPED_LAST))),
    row(RULE, "pass", TRAIN, **survey(rank(SKIPPED, reached(3), reached(4)))),
    # the loop was left otherwise after the error that was caught in its body
    row(RULE, "inconclusive", TRAIN, names=("another reason",), **survey(rank(SKIPPED))),
    # a look into a cache
    row(RULE, "pass", TRAIN, **survey(rank(passing(8, error="KeyError")), text=ASKS)),
    # what is behind the step may fail before a break; micro-batches are left over
    row(RULE, "pass", TRAIN, **survey(rank({**SKIPPED, "before_step": False}))),
    row(RULE, "pass", TRAIN, **survey([*rank(SKIPPED)[:-2], reached(2, ended=True)])),
    # a function that makes a step catches it, and the loop that calls it ends
    row(RULE, "inconclusive", TRAIN, names=("iteration 3",), **survey(rank(IN_STEP))),
    # an epoch made no step, the last one: a decorator around it caught the error
    row(RULE, "fail", TRAIN, names=("iteration 3 of 3",), **survey(rank(EPOCH))),
    row(RULE, "pass", TRAIN, **survey(rank({**EPOCH, "steps": 2}))),
    row(RULE, "pass", TRAIN, **survey(rank({**EPOCH, "since_step": 1}))),
    # each iteration to the end raises it
    row(
        RULE,
        "fail",
        TRAIN,
        names=("7 times after step 2",),
        **survey(rank({**SKIPPED, "again": 7})),
    ),
    row(RULE, "inconclusive", TRAIN, **survey(rank({**SKIPPED, "again": 2}))),
    # a thread that makes the batches ends, and later the training
    row(RULE, "fail", TRAIN, names=("iteration 3 of 9", "2 steps"), **survey(rank(READER))),
    row(RULE, "inconclusive", TRAIN, names=("needs",), **survey(rank(READER, reached(3)))),
    row(RULE, "pass", TRAIN, **survey(rank({**READER, "loops": []}))),
    row(RULE, "fail", TRAIN, names=("except ValueError",), **survey(rank(SKIPPED), text=BREAKS)),
    row(RULE, "pass", TRAIN, **survey(rank(SKIPPED_LAST), text=BREAKS)),
    row(RULE, "pass", TRAIN, **survey(rank(STOPPED))),
    row(
        RULE,
        "inconclusive",
        TRAIN,
        names=("the project's",),
        **survey(rank(passing(13, 16, error="Stop"))),
    ),
    row(RULE, "pass", TRAIN, **survey(rank(passing(11, 16, error="KeyboardInterrupt")))),
    # training begins again after it
    row(RULE, "pass", TRAIN, **survey(rank(DIED, reached(0, stack=[place(14)]), reached(1)))),
)


def test_errors_after_which_the_training_goes_on() -> None:
    other = {**passing(11, 16), "number": 2, "steps": 4}
    again = {**other, "number": 3, "steps": 5}
    made = [SKIPPED, reached(3), reached(4), other, reached(5), again, reached(6)]
    evidence = survey(rank(*made), rank())
    found = survived(evidence["survey"], evidence["sources"])
    assert [(one.step, one.line) for one in found] == [(3, 9), (5, 17)]
    assert "rank 0: ValueError: no memory in train.py:8" in found[0].text
    # the last one of a training, what asks a cache, and a stop
    asked = survey(rank(passing(8, error="KeyError"), reached(3)), text=ASKS)
    stopped = survey(rank(STOPPED, reached(3)))
    for one in (survey(rank(DIED)), asked, stopped):
        assert survived(one["survey"], one["sources"]) == []


def test_an_error_that_the_rank_dies_of_is_not_swallowed() -> None:
    records = rank(DIED)[:-2]
    died = run([*records, end("RuntimeError", "no memory")], role="survey")
    found = judge(RULE, TRAIN, survey=died, **sources(SCRIPT))
    assert found.status == "fail" and "after the compared steps" in found.evidence


def test_who_caught_it_stands_before_a_hang() -> None:
    late = survey(rank(steps=2)[:-2], rank(DIED)[:-2], timed_out=True)
    found = judge(RULE, TRAIN, **late)
    assert found.status == "fail" and "rank 1 raised RuntimeError" in found.evidence
    assert "the others waited for it" in found.evidence
    # the ranks part because of it; a difference between the compared steps has another cause
    others = [
        Finding(name, "fail", "")
        for name in ("rank-local-control-flow", "uneven-batches-hang", "matches-ddp")
    ]
    judged = with_consequences([*others, found], Evidence(**late))
    assert [one.consequence for one in judged] == [True, True, True, False]
    alone = with_consequences([others[2], found], Evidence(**late))
    assert [one.consequence for one in alone] == [False, False]


def test_a_crash_stands_before_what_another_rank_caught() -> None:
    crashed = [*rank()[:-2], end("ValueError", "no such sample")]
    found = judge(RULE, TRAIN, **survey(rank(LOST), crashed))
    assert found.status == "fail" and "rank 1 raised ValueError" in found.evidence


def test_a_training_that_dies_before_its_first_step() -> None:
    first = {**passing(2, 11, 16, done=0), "training": False, "steps": 0}
    without = run([first, reached(0, ended=True), {"kind": "end", "how": "return"}], role="survey")
    found = judge(RULE, run([]), survey=without, **sources(SCRIPT))
    assert found.status == "fail" and "iteration 1 of 20, after 0 steps" in found.evidence
    named = sources(SCRIPT.replace("except Exception as error", "except RuntimeError"))
    assert judge(RULE, run([]), survey=without, **named).status == "inconclusive"


@cases(
    "line, error, caught",
    (8, "ValueError", 9),
    (8, "RuntimeError", None),
    (11, "ValueError", None),
    (16, "RuntimeError", 17),
    (20, "Stop", 21),
    (20, "RuntimeError", 23),
    (20, "ValueError", None),
)
def test_which_statement_catches(line: int, error: str, caught: int | None) -> None:
    assert _handler(SCRIPT, line, error) == caught


@cases(
    "text, caught",
    ("with suppress(Exception):\n    f()", 1),
    ("with suppress(KeyError):\n    f()", None),
    ("with contextlib.suppress(OSError, RuntimeError):\n    f()", 1),
    ("def f():\n    try:\n        g()\n    finally:\n        return 1", 5),
    ("def f():\n    try:\n        g()\n    finally:\n        h()", None),
    ("try:\n    f()\nexcept Exception:\n    h()\n    raise", None),
    ("try:\n    f()\nexcept:\n    pass", 3),
    ("try:\n    f()\nexcept (OSError, RuntimeError):\n    pass", 3),
    ("@contextmanager\ndef safely():\n    yield\nwith safely():\n    f()", 4),
    ("with open(path):\n    f()", None),
)
def test_ways_to_catch(text: str, caught: int | None) -> None:
    lines = text.splitlines()
    line = next(k for k, one in enumerate(lines, 1) if one.strip() in ("f()", "g()"))
    assert _handler(text, line, "RuntimeError") == caught


def _handler(text: str, line: int, error: str) -> int | None:
    at = Place(file=FILE, line=line, function="f", code="")
    found = handler_of(Sources({FILE: text}, (FILE,)), at, CLASSES[error])
    return found.line if found is not None else None


@cases(
    "loop, total, done, goes_on",
    ("for step in range(2, 9, 2):", 4, 1, None),
    ("for step in range(cfg.steps):", 12, 4, None),
    ("for step in range(settings['steps']):", 12, 4, None),
    ("for step in range(min(int(cfg.steps), 9)):", 9, 4, None),
    ("for step in range(cfg.asked()):", None, None, None),
    ("for i, step in enumerate(items):", 7, 4, None),
    ("for i, step in enumerate(tqdm(items), start=1):", 7, 4, None),
    ("for step in tqdm(range(len(items))):", 7, 4, None),
    ("for step in items:", 7, None, None),
    ("for step in iter(items):", None, None, None),
    ("while True:", None, None, None),
    ("while step < cfg.steps:", None, None, True),
    ("while step < cfg.steps and not cfg.over:", None, None, True),
    ("while step != 4:", None, None, False),
    ("while cfg.asked():", None, None, None),
    # to compare a tensor may run a collective
    ("while cfg.loss > 1:", None, None, None),
    ("for step in iter(items):\n        if step == 9:\n            break", None, None, True),
    ("for step in iter(items):\n        if not cfg.asked():\n            break", None, None, None),
)
def test_progress_of_a_loop(
    loop: str, total: int | None, done: int | None, goes_on: bool | None, tmp_path: Path
) -> None:
    tail = "next(values)" if loop.startswith("while") else "step"
    text = f"""
times = []
class Config:
    steps, over = 12, False
    def asked(self, other=0):
        times.append(1)
        return 9
    __gt__ = asked
cfg = Config()
cfg.loss, settings = Config(), dict(steps=12)
def tqdm(x):
    return x
def train(items=[0, 1, 2, 3, 4, 5, 6]):
    values = iter(range(9)); step = 0
    {loop}
        step = {tail}
        if step == 4:
            1 / 0
"""
    file = tmp_path / "loop.py"
    file.write_text(text.replace("tqdm(items), start=1", "tqdm(items), 1"))
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with pytest.raises(ZeroDivisionError) as caught:
        names["train"]()
    raised = caught.value.__traceback__
    assert raised is not None and raised.tb_next is not None
    asked = len(names["times"])
    found = loops_at(raised.tb_next.tb_frame, raised.tb_next.tb_lineno)
    assert len(names["times"]) == asked  # no code of the script was run
    assert [(one.total, one.done, one.goes_on) for one in found] == [(total, done, goes_on)]


PROBE = """
import json, sys
from pathlib import Path
from verified_fsdp2.verifier.probe.frames import Frames
from verified_fsdp2.verifier.probe.line_coverage import Lines
from verified_fsdp2.verifier.probe.passing_errors import PassingErrors

class Session:
    def __init__(self, folder):
        self.frames, self.events, self.made = Frames(folder), [], 0
    def write(self, event):
        self.events.append(event)
    def report(self, name, error):
        raise error

session = Session(sys.argv[1])
lines = Lines(session.frames)
lines.start()
errors = PassingErrors(session, lines, lambda: session.made)
errors.start()

def step():
    if not session.made:
        lines.again()
        errors.begin()
    session.made += 1
    errors.stepped()

script = Path(sys.argv[1], "train.py")
exec(compile(script.read_text(), str(script), "exec"), {"step": step, "__name__": "__main__"})
errors.end()
sys.settrace(None)
for one in session.events:
    loops = [(loop.line, loop.done) for loop in one.loops]
    print(json.dumps([one.number, one.error, one.steps, [f.line for f in one.frames], loops]))
"""
PROBED = """
def make(k):
    if k == 2:
        raise ValueError("no")
    step()

def train():
    for k in range(8):
        make(k)

def again():
    for epoch in range(2):
        try:
            train()
        except ValueError as error:
            print("caught", file=sys.stderr)

import sys
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    pool.submit(again)
    pool.submit(train)
def read(source, out):
    for k in source:
        out.append(1 / (k - 3))

def ask(future):
    try:
        future.result()
    except ZeroDivisionError:
        return
    out.clear()

out = []
with ThreadPoolExecutor(1) as pool:
    pool.submit(read, range(6), out)
    ask(pool.submit(read, range(6), out))
for left_out in range(9):
    try:
        train() if left_out == 0 else [].pop()
    except (IndexError, ValueError):
        pass
"""


def test_what_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROBED))
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    # each error with more and more frames; the loops with the iterations behind them
    first = [1, "ValueError", 2]
    assert found[:3] == [
        [*first, [4], []],
        [*first, [4, 9], [[8, 2]]],
        [*first, [4, 9, 14], [[12, 0], [8, 2]]],
    ]
    # another error at the same line, though it may have the id of the first one
    assert found[5] == [2, "ValueError", 4, [4, 9, 14], [[12, 1], [8, 2]]]
    # one that no code of the project catches
    assert found[7] == [3, "ValueError", 6, [4, 9], [[8, 2]]]
    # one that leaves a thread that makes no steps
    threads = [one for one in found if one[1] == "ZeroDivisionError"]
    assert [one[2:] for one in threads] == [[6, [25], [[24, 3]]]] * 2
    # what else does not make the steps is not followed
    assert {one[1] for one in found} == {"ValueError", "ZeroDivisionError"}


def test_nothing_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("step()\n")
    code = PROBE + "\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_runs_without_such_errors_are_read() -> None:
    empty: Run = run(rank(), role="survey")
    assert judge(RULE, TRAIN, survey=empty, **sources(SCRIPT)).status == "pass"
