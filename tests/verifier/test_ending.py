"""What a script prints and writes behind its last step, on recorded traces: what differs, and what
may differ in a right script.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from test_laws import alone, of, state, steps, tensor

from records import cases, judge, run
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.evidence import Course, Sources
from verified_fsdp2.verifier.pipeline import so_far
from verified_fsdp2.verifier.stages import Settings, endings

TEXT = """
def main():
    for step in range(9):
        loss = train_step(model)
        best = best_of(model)
        print(f"step {step} loss {loss:.3f}")
    print(f"final loss {loss.item():.3f} validation {evaluate(model):.3f}")
    print(f"best {best:.3f}")
    print("validation", evaluate(model))
    print("last", loss)
    print(f"took {clock():.3f} s")
"""
IN_LOOP, FINAL, BEST, PLAIN, LAST, TOOK = 6, 7, 8, 9, 10, 11
RULE = "ending-same-in-one-process"


def at(line: int) -> dict[str, Any]:
    return {"file": "train.py", "line": line, "function": "main", "code": ""}


def shown(text: str, line: int) -> dict[str, Any]:
    return {"kind": "printed", "text": text, "stack": [], "steps": 9, "at_line": at(line)}


def file(length: float) -> dict[str, Any]:
    return {"kind": "written", "path": "out.pt", "steps": 9, "values": {"w": tensor(length)}}


def whole(record: dict[str, Any], role: str) -> Any:
    return run([{"kind": "reached", "steps": 0, "stack": [at(4)]}, record], role=role)


def found(
    mine: dict[str, Any], theirs: dict[str, Any], *noise: dict[str, Any], own: float = 1.0
) -> str:
    ranks = [[*steps(), state(1, main__best=tensor(value))] for value in (1.0, own)]
    evidence = of(*ranks, single=alone(ranks[0]))
    ends: dict[str, Any] = {"sources": Sources({"train.py": TEXT}, ("train.py",))}
    ends |= {"survey": whole(mine, "survey"), "ending": whole(theirs, "ending")}
    if noise:
        ends["ending_perturbed"] = whole(noise[0], "ending_perturbed")
    return judge(RULE, replace(evidence, **ends)).status


@cases(
    "line, mine, theirs, status",
    (FINAL, "final loss 1.000 validation 0.500", "final loss 1.000 validation 0.600", "fail"),
    (
        FINAL,
        "final loss 1.000 validation 0.500",
        "final loss 2.000 validation 0.501",
        "pass",
    ),  # a rank's own last loss
    (FINAL, "final loss 1.000 validation nan", "final loss 1.000 validation 0.500", "fail"),
    (PLAIN, "validation 0.500", "validation 0.600", "fail"),
    (LAST, "last 0.5", "last 0.6", "not_covered"),
    (TOOK, "took 1.500 s", "took 2.500 s", "not_covered"),
    (IN_LOOP, "step 8 loss 1.5", "step 8 loss 2.5", "not_covered"),
    (BEST, "best 1.000", "best 2.000", "fail"),
    (PLAIN, "validation 3 on 2 ranks", "validation 3 on 1 ranks", "not_covered"),  # counts
)
def test_a_number_that_is_printed(line: int, mine: str, theirs: str, status: str) -> None:
    assert found(shown(mine, line), shown(theirs, line)) == status


def test_a_variable_that_the_ranks_have_for_themselves() -> None:
    assert found(shown("best 1.000", BEST), shown("best 2.000", BEST), own=1.5) == "not_covered"


def test_where_one_unit_in_the_last_place_moves_it_as_much() -> None:
    mine, theirs = shown("validation 0.500", PLAIN), shown("validation 0.600", PLAIN)
    assert found(mine, theirs, shown("validation 0.580", PLAIN)) == "pass"
    assert found(mine, theirs, shown("validation 0.6001", PLAIN)) == "fail"


@cases("loss, status", (1.001, "pass"), (1.0, "fail"))
def test_steps_that_agree_and_are_many_times_the_noise_apart(loss: float, status: str) -> None:
    """One perturbed run is one sample of what rounding does: the end may be as many times its noise
    apart as the steps are.
    """

    def rank(value: float) -> list[dict[str, Any]]:
        return [
            {**r, "loss": value} if r["kind"] == "micro" else r
            for r in [*steps(), state(1, main__best=tensor(1.0))]
        ]

    single, perturbed = alone(rank(1.0)), replace(alone(rank(1.0001)), role="perturbed")
    evidence = of(rank(loss), rank(loss), single=single, perturbed=perturbed)
    sources = Sources({"train.py": TEXT}, ("train.py",))
    ends = {"survey": whole(file(1.0), "survey"), "ending": whole(file(1.5), "ending")}
    ends |= {"ending_perturbed": whole(file(1.49), "ending_perturbed")}
    assert judge(RULE, replace(evidence, sources=sources, **ends)).status == status


@cases("length, status", (1.0, "pass"), (1.0001, "pass"), (1.1, "fail"))
def test_a_tensor_that_is_written(length: float, status: str) -> None:
    assert found(file(1.0), file(length)) == status


def test_a_survey_that_did_not_end() -> None:
    made = of(steps(), steps(), single=alone(steps()), survey=whole(file(1.0), "survey"))
    assert judge(RULE, made).status == "not_covered"
    without = judge(RULE, replace(made, survey=None))
    assert without.status == "not_covered"
    assert "no survey run" in without.evidence


@cases(
    "theirs, status",
    (["w", "b"], "fail"),
    (
        ["w", "b", "model1.w"],
        "not_covered",
    ),  # it found the teacher that the survey run has trained first
)
def test_models_that_only_the_first_run_trains(theirs: list[str], status: str) -> None:
    def ends(names: list[str], *more: dict[str, Any]) -> list[dict[str, Any]]:
        values = {name: [1.0, 1.0, 0.0, 0.0, 0.0] for name in names}
        return [
            {"kind": "reached", "steps": 0, "stack": [at(4)]},
            *more,
            {"kind": "final", "weights": values},
        ]

    survey = run(
        ends(["w", "b"], shown("validation 0.500", PLAIN)), ends(["w", "b"]), role="survey"
    )
    ending = run(ends(theirs, shown("validation 0.600", PLAIN)), role="ending")
    rank = [*steps(), state(1, main__best=tensor(1.0))]
    sources = Sources({"train.py": TEXT}, ("train.py",))
    evidence = of(rank, rank, single=alone(rank), survey=survey, ending=ending)
    assert judge(RULE, replace(evidence, sources=sources)).status == status


@cases("batch, words", (("--batch", "8"), ["--batch", "8"]), ((), []), (None, []))
def test_the_options_of_the_run_of_one_process_are_those_of_its_end(
    batch: tuple[str, ...] | None, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    ends = {
        "survey": whole(file(1.0), "survey"),
        "course": Course(single_ways=("ddp",), batch=batch),
    }
    evidence = replace(of(steps(), steps(), single=alone(steps())), **ends)
    settings = Settings(resolve(tmp_path / "train.py", {}), [RULE])
    (run,) = endings(settings, evidence, so_far(settings, evidence))
    assert (run.role, run.world_size, list(run.arguments)) == ("ending", 1, words)
