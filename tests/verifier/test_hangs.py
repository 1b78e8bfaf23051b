"""Why ranks wait for one another, judged from logs written in the tests: the right rule, and none
where none is known.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from records import cases, end, ended, judge, run, steps, trace
from scripts import edited
from verified_fsdp2.verifier.analysis import rank_guards
from verified_fsdp2.verifier.analysis.divergence import parting
from verified_fsdp2.verifier.analysis.root_cause import root_cause
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.hang._named import HangRule
from verified_fsdp2.verifier.source.sources import with_named_files
from verified_fsdp2.verifier.trace import Ended, Run, read_run
from verified_fsdp2.verifier.trace.events import ProgressEvent

NAMES = [name for name, rule in RULES.items() if isinstance(rule, HangRule)]
LOOP = """
def main():
    for step, batch in enumerate(batches):
        loss = model(batch)  # F
        {between}
        loss.backward()  # B
        optimizer.step()  # S
    dist.all_reduce(total)  # R
    dist.barrier()  # X
"""
TURN = "forward@F backward@B step@S "


class Script:
    """A source whose lines carry marks, and logs that speak of them: `forward@F` is a forward at
    the line marked `# F`.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.path = folder / "train.py"
        self.path.write_text(source)
        lines = enumerate(source.splitlines(), 1)
        self.lines = {
            line.rpartition("# ")[2].strip(): number for number, line in lines if "# " in line
        }

    def events(self, text: str) -> list[ProgressEvent]:
        return [self.event(word) for word in text.split()]

    def event(self, word: str) -> ProgressEvent:
        what, _, where = word.partition("@")
        op, _, value = what.partition("=")
        frames = [
            (str(self.path), self.lines[mark.partition(":")[0]], mark.partition(":")[2] or "main")
            for mark in where.split("<")
        ]
        return ProgressEvent(
            op=op.replace("_data", " of data"), frames=frames, value=int(value) if value else None
        )

    def hung(self, *logs: str, **more: Any) -> Run:
        traces = tuple(trace(rank, ()) for rank in range(len(logs)))
        ended = tuple(Ended(rank, -9, True) for rank in range(len(logs)))
        progress = {rank: self.events(log) for rank, log in enumerate(logs)}
        return Run(
            "train", len(logs), traces, ended, **{"timed_out": True, "progress": progress, **more}
        )

    def named(self, *logs: str, **more: Any) -> Finding | None:
        run = self.hung(*logs, **more)
        evidence = Evidence(train=run, sources=with_named_files(Sources(), [run]))
        failed = [f for name in NAMES if (f := judge_one(RULES[name], evidence)).status == "fail"]
        assert len(failed) <= 1
        return failed[0] if failed else None


def named(tmp_path: Path, source: str, *logs: str) -> tuple[str, int] | None:
    found = Script(tmp_path, source).named(*logs)
    return (
        (found.rule, found.location.line)
        if found is not None and found.location is not None
        else None
    )


def line(source: str, text: str) -> int:
    return next(n for n, row in enumerate(source.splitlines(), 1) if text in row)


@cases(
    "guard",
    "if rank == 0:",
    "if dist.get_rank() == 0 and step % 10 == 0:",
    "if self.is_main_process:",
    "if chosen:",
    "if not other:",
    "while rank < 1:",
)
def test_a_collective_under_a_condition_on_the_rank(tmp_path: Path, guard: str) -> None:
    source = f"""
chosen = dist.get_rank() == 0
other = RANK != 0
def main():
    loss = model(batch)  # F
    {guard}
        state = get_model_state_dict(model)  # G
    loss.backward()  # B
"""
    found = named(tmp_path, source, "forward@F get_model_state_dict@G", "forward@F backward@B")
    assert found == ("rank-conditional-collective", line(source, guard))


EARLY_RETURN = """
def save():
    if dist.get_rank() != 0:
        return
    state = get_model_state_dict(model)  # G
def main():
    loss = model(batch)  # F
    save()  # C
    loss.backward()  # B
"""
AROUND_THE_CALLER = """
def evaluate():
    return model(batch)  # E
def main():
    loss = model(batch)  # F
    if rank == 0:
        evaluate()  # C
    loss.backward()  # B
"""


@cases(
    "source, first, where",
    (EARLY_RETURN, "forward@F get_model_state_dict@G:save<C", "get_rank() != 0"),
    (AROUND_THE_CALLER, "forward@F forward@E:evaluate<C", "rank == 0"),
)
def test_a_condition_on_the_rank_in_a_function(
    tmp_path: Path, source: str, first: str, where: str
) -> None:
    found = named(tmp_path, source, first, "forward@F backward@B")
    assert found == ("rank-conditional-collective", line(source, where))


def test_two_sides_of_a_broadcast_are_no_parting(tmp_path: Path) -> None:
    source = """
def main():
    if rank == 0:
        dist.broadcast(x, 0)  # S
    else:
        dist.broadcast(y, 0)  # R
    loss = model(batch)  # F
    time.sleep(600)
"""
    script = Script(tmp_path, source)
    logs = ("broadcast@S forward@F", "broadcast@R forward@F")
    assert script.named(*logs) is None and parting(script.hung(*logs)) is None


@cases(
    "between, second, condition",
    ("if not torch.isfinite(loss): continue", "forward@F forward@F", "isfinite"),
    ("if loss.item() < 1: break", "forward@F all_reduce@R", "loss.item() < 1"),
    ("if len(batch) == 0: return", "forward@F", "len(batch) == 0"),
)
def test_a_branch_that_jumps_over_a_collective(
    tmp_path: Path, between: str, second: str, condition: str
) -> None:
    source = LOOP.format(between=between)
    found = Script(tmp_path, source).named(TURN + "forward@F backward@B", TURN + second)
    assert (found.rule, condition in found.evidence) == ("rank-local-control-flow", True)
    assert found.location.line == line(source, between)


@cases(
    "first, second, mark",
    (TURN + "forward@F backward@B", TURN + "forward@F forward@F", "# I"),
    (TURN + "forward@F backward@B step@S", TURN + "forward@F backward@B forward@F", "# J"),
    (TURN, "forward@F backward@B forward@F", "# J"),  # the rank is a part of the condition
)
def test_a_branch_around_a_collective_and_one_around_a_step(
    tmp_path: Path, first: str, second: str, mark: str
) -> None:
    source = """
def main():
    for batch in batches:
        loss = model(batch)  # F
        if loss > 0:  # I
            loss.backward()  # B
        if {condition}:  # J
            optimizer.step()  # S
""".replace("{condition}", "not (step == 2 and rank == 1)" if first == TURN else "norm < limit")
    assert named(tmp_path, source, first, second) == ("rank-local-control-flow", line(source, mark))


def test_ranks_that_begin_otherwise(tmp_path: Path) -> None:
    """A resume in which each rank chooses how it loads: no collective is common before it."""
    source = """
def main():
    if saved == mine:  # I
        load_fast()  # A
    else:
        dcp.load(state)  # B
"""
    at = ("rank-local-control-flow", line(source, "# I"))
    assert named(tmp_path, source, "set_model_state_dict@A", "dcp.load@B") == at


def test_a_handler_that_goes_on(tmp_path: Path) -> None:
    source = """
def train_step():
    try:
        loss = model(batch)  # F
        loss.backward()  # B
    except torch.OutOfMemoryError:  # O
        return None
    optimizer.step()  # S
def main():
    for batch in batches:
        train_step()  # C
        dist.all_reduce(loss)  # R
"""
    turn = "forward@F:train_step<C backward@B:train_step<C step@S:train_step<C all_reduce@R "
    want = ("rank-local-control-flow", line(source, "# O"))
    assert named(tmp_path, source, turn + "forward@F:train_step<C", turn + "all_reduce@R") == want
    again = source.replace("return None", "raise")
    assert named(tmp_path, again, turn + "forward@F:train_step<C", turn + "all_reduce@R") != want


def test_a_loader_that_ends_on_one_rank(tmp_path: Path) -> None:
    logs = (TURN + "forward@F", TURN + "end_data=1@F all_reduce@R")
    found = Script(tmp_path, LOOP.format(between="if loss < 1: break")).named(*logs)
    assert found.rule == "uneven-batches-hang"
    assert all(part in found.evidence for part in ("rank 1", "1 batch,")), found.evidence


@cases(
    "between, first, second, where",
    (
        "pass",
        TURN + "end_data=1@F all_reduce@R",
        TURN + "end_data=1@F barrier@X",
        None,
    ),  # it ends on all ranks
    ("pass", TURN + TURN, TURN + "all_reduce@R", "for step"),  # one rank has left the loop
    (
        "if step == args.steps: break",
        TURN + TURN,
        TURN + "all_reduce@R",
        "for step",
    ),  # a limit that all ranks share
    (
        "time.sleep(600)",
        TURN + "forward@F backward@B",
        TURN + "forward@F",
        None,
    ),  # a rank that sleeps
)
def test_a_plain_loop(
    tmp_path: Path, between: str, first: str, second: str, where: str | None
) -> None:
    source = LOOP.format(between=between)
    want = ("uneven-batches-hang", line(source, where)) if where else None
    assert named(tmp_path, source, first, second) == want


def test_an_error_of_the_script_is_no_hang(tmp_path: Path) -> None:
    script = Script(tmp_path, LOOP.format(between="if loss < 1: break"))
    traces = (trace(0, ()), trace(1, (end("ValueError", "bad", at=1.0),)))
    exits = (Ended(1, 1, False), Ended(0, -9, True))
    assert script.named(TURN + "forward@F", TURN + "all_reduce@R", timed_out=False) is None
    run = script.hung(TURN + "forward@F", TURN + "all_reduce@R", timed_out=False)
    assert parting(Run("train", 2, traces, exits, progress=run.progress)) is None


def test_a_peer_that_left_in_silence_is_named(tmp_path: Path) -> None:
    script = Script(tmp_path, LOOP.format(between="if loss < 1: break"))
    lost = end("RuntimeError", "Connection closed by peer [127.0.0.1]:1", at=2.0)
    traces = (
        trace(0, (lost,)),
        trace(1, ({"kind": "end", "how": "return", "code": 0, "at": 1.0},)),
    )
    logs = script.hung(TURN + "forward@F", TURN)
    left = Run("train", 2, traces, (Ended(1, 0, False), Ended(0, 1, False)), progress=logs.progress)
    assert root_cause(left).rank == 1
    evidence = Evidence(train=left, sources=with_named_files(Sources(), [left]))
    assert [n for n in NAMES if judge_one(RULES[n], evidence).status == "fail"] == [
        "rank-local-control-flow"
    ]


def test_an_implicit_collective_is_read_from_the_stack(tmp_path: Path) -> None:
    source = """
def main():
    loss = model(batch)  # F
    if rank == 0:
        print(model.head.weight.norm().item())  # N
    loss.backward()  # B
"""
    script, number = Script(tmp_path, source), line(source, "# N")
    dump = f"""Current thread 0x1 (most recent call first):
  File "/x/site-packages/torch/distributed/_functional_collectives.py", line 9 in wait
  File "{script.path}", line {number} in main
"""
    found = script.named("forward@F", "forward@F backward@B", stacks={0: dump, 1: ""})
    at = line(source, "if rank == 0:")
    assert (found.rule, found.location.line) == ("rank-conditional-collective", at)


LOADER = """
def main():
    for batch in {loader}:  # D
        loss = model(batch)  # F
        {inside}
    for batch in other:
        use(batch)
"""
BOTH = ("data=8@D forward@F", "data=6@D forward@F")


@cases(
    "loader, inside, logs, status",
    ("tqdm(loader)", "pass", BOTH, "fail"),  # the loop takes all
    ("loader", "if step > 9: break", BOTH, "pass"),  # it may end sooner
    ("islice(loader, 5)", "pass", BOTH, "pass"),
    ("zip(loader, range(5))", "pass", BOTH, "pass"),
    ("loader", "pass", (BOTH[0], BOTH[0]), "pass"),
    ("loader", "pass", ("data=8@D", "data@D"), "pass"),
    ("loader", "pass", ("forward@F", "forward@F"), "pass"),
    ("loader", "pass", ("data=8@D", "data=6@D"), "pass"),  # a loop without the model
)
def test_lengths_foreseen(
    tmp_path: Path, loader: str, inside: str, logs: tuple[str, str], status: str
) -> None:
    script = Script(tmp_path, LOADER.format(loader=loader, inside=inside))
    done = run(
        steps(), steps(), progress={rank: script.events(log) for rank, log in enumerate(logs)}
    )
    found = judge("uneven-batches-hang", done, sources=with_named_files(Sources(), [done]))
    assert (found.status, "8, 6" in found.evidence) == (status, "data=6@D" in logs[1])
    assert status == "pass" or found.location.line == 3


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_waits_for_no_other_and_a_run_that_stopped_for_another_reason_is_inconclusive(
    name: str,
) -> None:
    assert judge(name, steps()).status == "not_applicable"
    assert judge(name, steps(), steps()).status == "pass"
    assert judge(name, ended(run(steps(), steps()))).status == "inconclusive"


def test_a_source_that_is_gone_explains_nothing() -> None:
    assert rank_guards.rank_guard(Sources(), "/nowhere.py", 3) is None
    assert rank_guards.skipping_branch(Sources(), "/nowhere.py", 1, 3) is None
    assert rank_guards.loop_is_plain(Sources(), "/nowhere.py", 3) is None


def test_a_progress_log_is_read(tmp_path: Path) -> None:
    text = (
        '+{"op": "data", "frames": [["t.py", 3, "main"]]}\n0 8\n+{"op": "forward", "frames":'
        " []}\n1\n1\n0 8\n1"
    )
    (tmp_path / "rank0.progress").write_text(text)
    answer = {
        "ranks": [{"rank": 0, "code": 0, "killed": False, "at": 1.0}],
        "timed_out": False,
        "seconds": 1.0,
    }
    found = [
        (event.op, event.value) for event in read_run(tmp_path, "train", answer, 1, "").progress[0]
    ]
    assert found == [("data", 8), ("forward", None), ("forward", None), ("data", 8)]


def test_ranks_that_went_on_when_their_time_was_over_have_not_parted(tmp_path: Path) -> None:
    script = Script(tmp_path, LOOP.format(between="if stopped: break  # I"))
    logs = (f"{TURN}forward@F", f"{TURN}all_reduce@R")
    assert script.named(*logs, timeout=10.0, quiet=9.0) is not None
    assert script.named(*logs, timeout=10.0, quiet=0.5) is None


@cases(
    "quiet, busy, status", (0.5, (), "inconclusive"), (9.0, (), "fail"), (9.0, (1,), "inconclusive")
)
def test_a_run_that_goes_on_is_slow_and_does_not_hang(
    quiet: float, busy: tuple[int, ...], status: str
) -> None:
    found = judge(
        "run-completes", run(steps(), timed_out=True, timeout=10.0, quiet=quiet, busy=busy)
    )
    assert (found.status, "--timeout" in found.evidence) == (status, status == "inconclusive")
    assert ("rank 1 computed" in found.evidence) is bool(busy)


@cases(
    "body, busy",
    ("sum(range(10**9))", {0, 1}),
    ("time.sleep(100)", set()),
    ("dist.get_rank() or dist.barrier()", set()),
)
def test_the_launcher_says_which_ranks_computed(
    tmp_path: Path, launcher: Any, body: str, busy: set[int]
) -> None:
    loop = "    for step in range(STEPS):\n"
    script = edited(
        tmp_path, (loop, f"    import time\n    for step in range(1000):\n        {body}\n")
    )
    request = Request(str(tmp_path), str(script), str(tmp_path), 2, steps=1000, timeout=12.0)
    answer = launcher.finish(launcher.start(request))
    assert answer["timed_out"] and set(answer["busy"]) == busy


@cases("body, slow", ("time.sleep(0.3)", True), ("time.sleep(0.3 if step < 3 else 100)", False))
def test_the_launcher_says_how_long_nothing_was_recorded(
    tmp_path: Path, launcher: Any, body: str, slow: bool
) -> None:
    loop = "    for step in range(STEPS):\n"
    script = edited(
        tmp_path, (loop, f"    import time\n    for step in range(1000):\n        {body}\n")
    )
    request = Request(str(tmp_path), str(script), str(tmp_path), 2, steps=1000, timeout=15.0)
    answer = launcher.finish(launcher.start(request))
    assert answer["timed_out"] and (answer["quiet"] < 1.5) is slow


@cases(
    "message, fix",
    ("<class 'type'>", "make a new one for each save"),
    ("'lr'", "Fix the error at that line"),
)
def test_a_stager_that_serves_one_save(message: str, fix: str) -> None:
    """pytorch issue 183413: the second save raises on torch 2.11.0 and 2.12.1."""
    assert fix in root_cause(run([end("KeyError", message)])).fix


@cases(
    "stdout, stderr, text, fix",
    ("reading\nneeds 3 ranks\n", "", ": needs 3 ranks", "Do what it says"),
    ("needs 3 ranks\n", "UserWarning: old\n", ": needs 3 ranks", "Do what it says"),
    (
        "reading\n",
        "usage: train.py\ntrain.py: error: --data\n",
        ": train.py: error: --data",
        "after",
    ),
    ("", "", "1", "Pass the required script arguments"),
)
def test_what_a_script_says_before_it_leaves(stdout: str, stderr: str, text: str, fix: str) -> None:
    left = {"kind": "end", "how": "sys.exit", "code": 1, "message": "", "frames": []}
    made = run([left], stdout={0: stdout}, stderr={0: stderr})
    made = replace(made, ended=(Ended(0, 1, False),))
    cause = root_cause(made)
    assert cause.text == f"the script exited during startup with status 1{text.removeprefix('1')}"
    assert fix in cause.fix


def test_a_machine_that_was_lost_is_the_cause() -> None:
    lost = run([end("RuntimeError", "Connection reset by peer", at=1.0)], [])
    lost = replace(lost, ended=(Ended(1, -9, False, 0.0, "node-b"), Ended(0, 1, False, 2.0)))
    assert root_cause(lost).text == "node node-b stopped answering, and rank 1 with it"
