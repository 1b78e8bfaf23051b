"""What a report lists of the script's own code as not reached, and in which order."""

import ast
from typing import Any

from records import cases, run, step, stepped
from verified_fsdp2.verifier.analysis.not_covered import lines_of_a_resume, unreached
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.source.expression_sides import choices, span

FILE = "/p/train.py"
HEAD = """import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
args = parser.parse_args()
world = dist.get_world_size()
"""


def evidence(
    body: str, *not_run: str, late: dict[str, int] | None = None, sizes: tuple[int, ...] = (2, 1)
) -> Evidence:
    """A survey of 120 steps in which the lines and sides of the script with these texts were not
    reached, or after so many steps, and a train run of 9.
    """
    text = HEAD + body
    late = late or {}
    numbers = range(1, len(text.splitlines()) + 1)
    lines = {n: text.splitlines()[n - 1].strip() for n in numbers}
    parts = [one for choice in choices(ast.walk(ast.parse(text))) for one in
             (choice.first, *choice.sides)]  # fmt: skip
    sides = {span(part): ast.unparse(part) for part in parts}
    without = {*not_run, *late}
    place = {"file": FILE, "line": 1, "function": "<module>", "code": ""}

    def reached(steps: int, wanted: Any, **more: Any) -> dict[str, Any]:
        found = {
            "lines": {FILE: [n for n, line in lines.items() if wanted(line)]},
            "sides": {FILE: [list(where) for where, side in sides.items() if wanted(side)]},
        }
        return {"kind": "reached", "steps": steps, "backwards": 1, **found, **more}

    events = [reached(0, lambda code: code not in without, stack=[place], sharded=True)]
    # reports end after step 40, but for what is new
    at = {*range(1, 41), *late.values()}
    events += [reached(k, lambda code, k=k: late.get(code) == k) for k in sorted(at)]
    events.append({"kind": "reached", "steps": 120, "ended": True})
    survey = run(*[events] * sizes[0], role="survey")
    steps = [one for k in range(1, 10) for one in (step(k), stepped(k))]
    others = {
        role: run(*[steps] * size, role=role)
        for role, size in zip(("train", "single"), sizes, strict=False)
    }
    return Evidence(survey=survey, **others, sources=Sources({FILE: text}, (FILE,)))


def listed(found: Evidence) -> list[tuple[str, int | None]]:
    return [(one.side or one.code, one.step) for one in unreached(found)]


@cases("at, expected", (9, []), (10, [9]), (41, [40]), (90, [89]))
def test_a_line_is_not_compared_where_its_report_is_behind_the_compared_steps(
    at: int, expected: list[int]
) -> None:
    body = "for step in steps:\n    if step == 90:\n        double(grads)\n"
    found = listed(evidence(body, late={"double(grads)": at}))
    assert found == [("if step == 90:", k) for k in expected]


def test_sides_that_no_run_has_evaluated() -> None:
    body = "loss = loss if accum == 1 else loss * accum\nx = 0 < a < f(b) and g(a)\n"
    found = listed(evidence(body, "loss * accum", "f(b)", "g(a)"))
    assert [side for side, _ in found] == [
        "`loss * accum` of `loss if accum == 1 else loss * accum`",
        "`g(a)` of `0 < a < f(b) and g(a)`",
        "`f(b)` of `0 < a < f(b)`",
    ]
    body = "lr = 1 if step < 150 else 2 * rate\n"
    later = listed(evidence(body, late={"2 * rate": 100}))
    assert later == [("`2 * rate` of `1 if step < 150 else 2 * rate`", 99)]
    # the first operand was not evaluated, either: the expression itself was not reached
    assert listed(evidence("y = a if c else f(b)\n", "c", "f(b)", "a")) == []


def test_the_setup_and_what_matters_first() -> None:
    body = """
def build(model):
    if deep:
        widen(model)
    if args.wandb:
        start(model)
    if sharded:
        fully_shard(model)
    if half:
        lower(model)
    return model
def lower(model):
    model.bfloat16()
build(model)
"""
    missing = ("widen(model)", "start(model)", "fully_shard(model)", "lower(model)")
    codes = [code for code, _ in listed(evidence(body, *missing, "model.bfloat16()"))]
    assert codes == ["if sharded:", "if half:", "if args.wandb:", "if deep:"]


@cases(
    "body, missing",
    ("if bad:\n    raise ValueError(f(x))\n", ("raise ValueError(f(x))",)),
    ("if bad:\n    print(f(x))\n", ("print(f(x))",)),
    ("try:\n    import fast\n    HAS = f(1)\nexcept ImportError:\n    HAS = 0\n", ("HAS = f(1)",)),
    ("if __name__ == '__main__':\n    f(1)\n", ("f(1)",)),
    ("if typing.TYPE_CHECKING:\n    Batch = f(1)\n", ("Batch = f(1)",)),
    (
        "if torch.cuda.is_available():\n    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n",
        ("torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",),
    ),
    ("d = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n", ("'cuda'",)),
    ("if 'RANK' not in os.environ:\n    f(1)\n", ("f(1)",)),
    ("if x is None:\n    x = 4\n", ("x = 4",)),
    ("x = y or 4\n", ("4",)),
    ("x = y if y is not None else z\n", ("z",)),
    ("x = f(y) if y.is_dir() else []\n", ("[]",)),
    ("log.info('a' if f(x) else g(x))\n", ("g(x)",)),
    ("assert x or f(x)\n", ("f(x)",)),
    ("if world == 1:\n    f(1)\n", ("f(1)",)),  # one process has taken it
    ("if world > 1:\n    f(1)\n", ()),
    ("if world < 1:\n    raise ValueError\n", ("raise ValueError",)),
)
def test_what_a_reviewer_need_not_read(body: str, missing: tuple[str, ...]) -> None:
    assert listed(evidence(body, *missing)) == []


def test_the_other_way_and_the_end_of_a_script() -> None:
    body = "if a(x):\n    f(1)\nelse:\n    g(1)\n"
    assert listed(evidence(body, "g(1)")) == [("else of if a(x):", None)]
    body = "dist.barrier()\ndist.destroy_process_group()\n"
    assert listed(evidence(body, late=dict.fromkeys(body.split(), 120))) == []
    assert listed(evidence(body, *body.split())) == [("dist.barrier()", None)]


def test_a_condition_of_several_lines_is_shown_whole() -> None:
    body = "if (\n    a(x)\n    and b(x)\n):\n    f(1)\nelse:\n    g(1)\n"
    assert listed(evidence(body, "f(1)"))[0] == ("if a(x) and b(x):", None)
    assert listed(evidence(body, "g(1)"))[0] == ("else of if a(x) and b(x):", None)


def test_a_condition_is_listed_once() -> None:
    body = "if args.every and step % f(args.every) == 0:\n    save(model)\n"
    missing = ("save(model)", "step % f(args.every) == 0")
    assert listed(evidence(body, *missing)) == [(body.splitlines()[0], None)]


def test_what_a_device_does_beside_being_chosen_is_listed() -> None:
    body = "if torch.cuda.is_available():\n    weight += dist.get_rank()\n"
    found = listed(evidence(body, "weight += dist.get_rank()"))
    assert found == [("if torch.cuda.is_available():", None)]


def test_what_is_trained_on_stands_first() -> None:
    body = "if args.a:\n    f(1)\nif cuda.is_available():\n    loss = loss / 2\nloss.backward()\n"
    found = [code for code, _ in listed(evidence(body, "f(1)", "loss = loss / 2"))]
    assert found == ["if cuda.is_available():", "if args.a:"]


def test_a_slice_of_data_is_no_default() -> None:
    body = "for name in files[rank::size] or files[:1]:\n    f(name)\n"
    assert len(listed(evidence(body, "files[:1]"))) == 1
    assert not listed(evidence(body.replace("files[:1]", "files[1]"), "files[1]"))
    inside = "names = [name for name in files[rank::size] or files[:1]]\n"
    assert len(listed(evidence(inside, "files[:1]"))) == 1


def test_comparisons_of_the_number_of_ranks() -> None:
    body = "size = int(os.environ['WORLD_SIZE'])\nfactor = 1 + (size > 4)\n"
    assert listed(evidence(body)) == [("`size > 4` is always False on 1 and 2 ranks", None)]
    assert listed(evidence(body, sizes=(8, 2))) == []
    branch = "if world > 4:\n    loss *= 2\n"
    assert listed(evidence(branch, "loss *= 2")) == [("if world > 4:", None)]


@cases(
    "expression, value",
    ("max(1, size // 8)", "1"),
    ("size // 8", "0"),
    ("min(size, 8)", "size"),
    ("2 + size % 16 // 4", "0"),
    ("(4 < size <= 64)", "False"),
    ("min(1.0, 4 / size)", "1.0"),
    ("size // 2", None),  # it is 0 and 1
    ("max(size, 1)", None),  # on any number of ranks
    ("(size > 0)", None),
    ("size * 8", None),
    ("batch // size", None),
    ("max(losses, key=len)", None),
)
def test_what_depends_on_the_number_of_ranks(expression: str, value: str | None) -> None:
    text = f"size = dist.get_world_size()\nfactor = {expression}\n"
    found = [code for code, _ in listed(evidence(text))]
    assert [one.rpartition(" is always ")[2] for one in found] == (
        [f"{value} on 1 and 2 ranks"] if value else []
    )


def test_a_choice_by_what_is_not_known() -> None:
    text = "size = dist.get_world_size()\nrows = max(8, batch // size)\n"
    assert listed(evidence(text)) == [("`max(8, batch // size)` beyond 1 and 2 ranks", None)]


def test_what_a_resume_reaches_is_not_listed() -> None:
    body = """
def restore(path):
    dist.barrier()
    if x:
        f(path)
if args.resume:
    restore(args.resume)
y = g(args) if args.resume else 0
"""
    missing = ("dist.barrier()", "if x:", "f(path)", "restore(args.resume)", "g(args)")
    found = evidence(body, *missing)
    never = ["if args.resume:", "`g(args)` of `g(args) if args.resume else 0`"]
    assert [code for code, _ in listed(found)] == never
    first = len(HEAD.splitlines()) + 1
    asked = [first + 2, first + 3, first + 4, first + 6, first + 7]
    assert lines_of_a_resume(found) == {FILE: asked}
    side = list(span(ast.parse(HEAD + body).body[-1].value.body))  # type: ignore[attr-defined]
    visited = {"lines": {FILE: [n for n in asked if n != first + 4]}, "sides": {FILE: [side]}}
    resume = run([{"kind": "visited", **visited}], role="resume")
    resumed = found.having("resume", resume)
    assert [code for code, _ in listed(resumed)] == ["if x:"]
