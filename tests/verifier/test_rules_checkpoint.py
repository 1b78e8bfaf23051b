"""The judgement of the checkpoint rules on records written in the tests."""

from dataclasses import replace
from typing import Any

from records import (
    LINE,
    cases,
    end,
    judge,
    judged_as,
    micro,
    model,
    parameter,
    row,
    run,
    sources,
    step,
    stepped,
)
from verified_fsdp2.verifier.analysis.crash_moments import moments
from verified_fsdp2.verifier.analysis.saves import all_saves, final_path
from verified_fsdp2.verifier.evidence import Course, Evidence
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.checkpoint._recovery import outcome_of
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import Checkpoint, Step
from verified_fsdp2.verifier.trace.reader import from_the_load_on

A, B, C = ([float(k + 1), float(k), 2.0, 3.0, 4.0] for k in range(3))
WHOLE = [3.0, 1.0, 4.0, 6.0, 8.0]  # A + B


def shard(rank: int, sketch: list[float] = A) -> dict[str, Any]:
    return {
        **tensor(sketch=sketch),
        "kind": "dtensor",
        "own": [2, 4],
        "offset": [2 * rank, 0],
        "sharded": True,
    }


def tensor(shape: tuple[int, ...] = (4, 4), sketch: list[float] = A) -> dict[str, Any]:
    return {
        "kind": "tensor",
        "shape": list(shape),
        "dtype": "float32",
        "sketch": sketch,
        "copy": 0,
        "sharded": False,
    }


def saving(
    entries: dict[str, Any], op: str = "save", to: str = "/c/1", after: int = 1, **more: Any
) -> dict[str, Any]:
    base = {
        "kind": "saving",
        "op": op,
        "call": 1,
        "after_step": after,
        "to": to,
        "main": True,
        "alone": False,
    }
    return {**base, "entries": entries, "random": None, "weights": {"w": A}, "state": {}, **more}


def opened(
    path: str = "/c/1", error: str | None = None, lost: tuple[str, ...] = (), **entries: Any
) -> Run:
    record = {"kind": "inspected_checkpoint", "path": path, "format": "dcp", "error": error}
    return run([{**record, "missing_files": list(lost), "entries": entries}], role="inspect")


def train(*ranks: list[dict[str, Any]]) -> Run:
    halves = [model(parameter("w", local_numel=8, numel=16)) for _ in ranks]
    return run(
        *[[halves[k], micro(), step(), stepped(), *records] for k, records in enumerate(ranks)]
    )


PATH, EXPORT = "rank-dependent-checkpoint-path", "local-shard-export"
HOLDS, RACE = "checkpoint-holds-what-ranks-held", "async-save-state-race"
LOST = opened(error="1 of 2 files of the metadata are not there", lost=("__1_0.distcp",))
ONE = train([saving({"w": tensor()})], [])
BOTH = train([saving({"w": shard(0, A)})], [saving({"w": shard(1, B)})])
BEHIND = train([saving({"w": tensor()}, "async_save")], [])
TWO_TENSORS = train([saving({"w": tensor(), "v": tensor()})], [])
SAVED_AGAIN = train([saving({"w": tensor()}), saving({"w": tensor(sketch=B)}, after=2)], [])
MASK = tensor(sketch=[float("inf"), *[float("nan")] * 4])
MASKED = train([saving({"m": MASK})], [])


def files(key: str, make: Any, op: str, to: str) -> Run:
    """Each of two ranks saves one entry; `{}` in the key or the path is its number."""
    return train(
        *[[saving({key.format(rank): make(rank)}, op, to.format(rank))] for rank in range(2)]
    )


def part(rank: int) -> dict[str, Any]:
    return tensor((2, 4))


STAGED = train(
    *[[saving({"w": part(r)}, "torch.save", f"/c/{r}.pt", after=1 + r)] for r in range(2)]
)
test_what_is_saved = judged_as(
    row(PATH, "fail", train([saving({})], [saving({}, to="/c/2")]), at=LINE),
    row(PATH, "pass", train([saving({})], [saving({})])),
    row(PATH, "not_applicable", files("w", part, "torch.save", "/c/r{}.pt")),
    row(
        PATH, "not_applicable", train([saving({}, alone=True)], [saving({}, to="/c/2", alone=True)])
    ),
    row(PATH, "fail", train([saving({})], [saving({})]), inspect=LOST, names=("__1_0.distcp",)),
    *(  # rank 0 alone saves; the numbers are elements
        row(
            EXPORT,
            "fail",
            train([saving({"model.w": entry}, "torch.save", "/c/a.pt")], []),
            names=("8", "16"),
        )
        for entry in (shard(0), tensor((2, 4)))
    ),
    row(EXPORT, "fail", files("w", shard, "torch.save", "/c/a.pt")),  # all ranks into one file
    row(EXPORT, "pass", files("w", shard, "torch.save", "/c/{}.pt")),
    row(EXPORT, "pass", files("w", part, "torch.save", "/c/{}.pt")),
    row(EXPORT, "pass", STAGED),  # ranks that write one after the other
    row(
        EXPORT, "pass", files("w", shard, "save", "/c/1")
    ),  # dcp takes shards of DTensors, but not plain ones
    row(EXPORT, "fail", files("w", part, "save", "/c/1")),
    row(EXPORT, "pass", files("rank{}.w", part, "save", "/c/1")),
    row(
        EXPORT, "pass", train([saving({"w": tensor()}, "torch.save", "/c/a.pt")], [])
    ),  # a whole tensor
    row(
        HOLDS, "pass", BOTH, inspect=opened(w=tensor(sketch=WHOLE))
    ),  # the sum of shards is what must be there
    row(HOLDS, "fail", BOTH, inspect=opened(w=tensor(sketch=A))),
    row(HOLDS, "fail", TWO_TENSORS, inspect=opened(w=tensor()), names=("v: 1 of 2",)),
    row(HOLDS, "pass", MASKED, inspect=opened(m=MASK)),  # infinities are no difference
    row(HOLDS, "fail", MASKED, inspect=opened(m=tensor())),
    row(
        HOLDS, "pass", SAVED_AGAIN, inspect=opened(w=tensor(sketch=B))
    ),  # the last save to a path counts
    row(
        HOLDS, "not_applicable", BEHIND, inspect=opened(w=tensor(sketch=B))
    ),  # a save in the background is the race's
    row(RACE, "fail", BEHIND, inspect=opened(w=tensor(sketch=B))),
    row(RACE, "pass", BEHIND, inspect=opened(w=tensor())),
    row(HOLDS, "inconclusive", ONE),
    row(HOLDS, "inconclusive", ONE, inspect=opened(error="no .metadata")),
    *(
        row(
            "wrapper-prefix-keys",
            status,
            train([saving(dict.fromkeys(keys, tensor()), "torch.save")], []),
        )
        for status, *keys in (
            ("pass", "model.w"),
            ("fail", "model._orig_mod.w"),
            ("fail", "b._checkpoint_wrapped_module.w"),
            ("fail", "module.w"),
            ("pass", "ema.module.w", "model.w"),
            ("pass", "ema.module.w", "ema.n_averaged"),
            ("pass", "my_module.w"),
        )
    ),
    *(
        row(
            "wrapper-prefix-keys",
            status,
            train([saving({"module.w": tensor()}, "torch.save")], []),
            **sources(text),
        )
        for text, status in (
            ("state = {k.removeprefix('module.'): v for k, v in state.items()}", "pass"),
            ("state = {'module.' + k: v for k, v in state.items()}", "fail"),
        )
    ),
)


def test_renames_are_followed() -> None:
    moved = {"kind": "renamed", "old": "/c/1.tmp", "new": "/c/1"}
    run_ = train([saving({"w": tensor()}, to="/c/1.tmp/state.pt"), moved], [])
    assert final_path(run_, all_saves(run_)[0]) == "/c/1/state.pt"


def lenient(missing: str = "", unused: str = "", names: str = "") -> dict[str, Any]:
    lists = {
        "missing": missing.split(),
        "unused": unused.split(),
        "names": (names or missing).split(),
    }
    counts = {f"{key}_count": len(lists[key]) for key in ("missing", "unused")}
    return {"kind": "lenient", "how": "strict=False", "wanted": 2, "step": 1, **lists, **counts}


def resumed(*records: dict[str, Any], weights: list[float] = A) -> Run:
    return run([model(), *records, step(weights={"w": weights}), stepped()], role="resume")


SAVED = [model(), micro(), step(), stepped(), {"kind": "checkpoint", "op": "save", "after_step": 1}]
THEN = [step(2, weights={"w": A}), stepped(2)]
LENIENT = "lenient-load-hides-mismatch"
test_lenient_loads = judged_as(
    *(
        row(LENIENT, status, train([lenient(*keys)], []))
        for status, *keys in (
            ("pass",),
            ("pass", "head.w", "old_head.w"),
            ("pass", "lora.a"),
            ("fail", "w", "module.w"),
            ("fail", "qkv.base.weight", "qkv.weight"),  # with one part more
            ("pass", "qkv.base.weight", "fc.weight"),
            ("fail", "model.w", "_orig_mod.w"),
            ("fail", "a b", "c d"),
        )
    ),
    *(  # a resume is judged by what came back
        row(
            LENIENT,
            status,
            [*SAVED, *THEN],
            resume=resumed(lenient("", "module.w", "w"), weights=weights),
        )
        for weights, status in ((A, "pass"), (B, "fail"))
    ),
)

test_saves_of_replaced_weights = judged_as(
    *(
        row(
            "saved-while-replaced",
            status,
            [*SAVED, saving(entries, weights={"w": held}), *THEN],
            resume=resumed(weights=now),
        )
        for held, now, entries, status in (
            (B, B, {"model.w": tensor(sketch=B), "ema.w": tensor(sketch=B)}, "fail"),
            (
                B,
                B,
                {"model.w": tensor(sketch=B), "kept.w": tensor(sketch=A)},
                "fail",
            ),  # loaded from the wrong key
            (
                B,
                A,
                {"model.w": tensor(sketch=A)},
                "pass",
            ),  # an average in the model, the training weights in the file
            (A, B, {"model.w": tensor(sketch=A)}, "pass"),
        )
    )
)


@cases("trainable, frozen", (False, True), (True, False))
def test_the_missing_keys_of_a_resume(trainable: bool, frozen: bool) -> None:
    """InternLM/xtuner: a save that ignores frozen parameters, and a strict load."""
    message = 'Error(s) in loading state_dict for M:\n\tMissing key(s) in state_dict: "tower.w". '
    saved = run([model(parameter("tower.w", trainable=trainable)), micro(), step(), stepped()])
    ended = run([end("RuntimeError", message)], role="resume")
    found = RULES["resume-is-exact"].judge(Evidence(train=saved, resume=ended))
    assert found.status == "fail" and 'Missing key(s) in state_dict: "tower.w"' in found.evidence
    assert ("that of a frozen parameter" in found.evidence) is frozen


BOTH, FROZEN = {"w": A, "v": A}, {"w": A, "v": None}
test_the_first_step_of_a_resume = judged_as(
    *(
        row(
            "resume-is-exact",
            status,
            [*SAVED, micro(2), step(2, grads=BOTH, held=held), stepped(2)],
            resume=run(
                [model(), micro(loss=loss), step(grads=grads, held=["w"]), stepped()], role="resume"
            ),
            names=names,
        )
        for grads, loss, held, status, names in (
            (BOTH, 1.0, ["w", "v"], "pass", ()),
            (FROZEN, 1.0, ["w", "v"], "pass", ()),  # what an earlier backward has left
            (
                FROZEN,
                2.0,
                ["w", "v"],
                "fail",
                ("1 parameter (v) has gradients without the resume",),
            ),
            (BOTH, 1.0, ["v"], "inconclusive", ("take turns",)),  # that of another optimizer
        )
    )
)


def exported(*factors: float) -> Run:
    merged = [
        {"kind": "merged", "name": f"layer{n}.weight", "factor": f, "at_line": LINE}
        for n, f in enumerate(factors)
    ]
    return run(merged, role="survey")


MERGED = "merged-with-another-scale"
test_merged_weights = judged_as(
    row(MERGED, "pass", [*SAVED], survey=exported(1.0, 0.999)),
    row(
        MERGED,
        "fail",
        [*SAVED],
        survey=exported(1.0, 0.25),
        at=LINE,
        names=("layer1.weight", "0.25"),
    ),
    row(MERGED, "not_applicable", [*SAVED], survey=exported()),
    row(MERGED, "not_applicable", [*SAVED]),
)


def generators(*states: tuple[str, list[float]]) -> Run:
    entries = [({key: {**tensor(sketch=state), "dtype": "uint8"}}, state) for key, state in states]
    return train(*[[saving(entry, random=state)] for entry, state in entries])


def under_one_key(dtype: str, numel: int) -> Run:
    given = [{"mean": {**tensor(sketch=one), "dtype": dtype, "shape": [numel]}} for one in (A, B)]
    return train(*[[saving(entry, random=[0.0] * 5)] for entry in given])


test_random_states_without_a_resume = judged_as(
    row(
        "per-rank-state-deduplicated", "fail", generators(("rng", A), ("rng", B))
    ),  # one key, each rank's own state
    row("per-rank-state-deduplicated", "inconclusive", generators(("rng", A), ("rng", A))),
    row("per-rank-state-deduplicated", "inconclusive", generators(("rng.0", A), ("rng.1", B))),
    row(
        "per-rank-state-deduplicated", "fail", under_one_key("uint8", 5056), names=("random state",)
    ),  # a generator of its own
    row(
        "per-rank-state-deduplicated",
        "fail",
        under_one_key("float32", 4),
        names=("another tensor on each rank",),
    ),
    row(
        "per-rank-state-deduplicated", "inconclusive", under_one_key("float32", 1)
    ),  # a number for the log
)


def template(**more: Any) -> dict[str, Any]:
    base = {"kind": "template", "op": "get_state_dict", "step": 2, "full": False, "offload": False}
    return {
        **base,
        "optimizers": 1,
        "states": 1,
        "bytes": 64,
        "had_state": False,
        "had_grads": False,
        **more,
    }


@cases(
    "more, keeps, status",
    ({"had_grads": True, "states": 0}, True, "fail"),
    ({"had_grads": True, "states": 0}, False, "not_applicable"),
    ({"had_grads": True, "states": 1, "had_state": True}, True, "pass"),
    ({}, True, "pass"),
)
def test_gradients_before_a_step(more: dict[str, Any], keeps: bool, status: str) -> None:
    state = {"w": {"exp_avg": A}} if keeps else {}
    run_ = run([model(), micro(), saving({}), template(**more), step(2, state=state), stepped(2)])
    assert judge("optim-template-with-grads", run_, resume=run_).status == status
    assert judge("optim-template-with-grads", run_).status == (
        "inconclusive" if status == "pass" else status
    )


def counted(counter: float | None, *load: dict[str, Any]) -> list[dict[str, Any]]:
    first, second = ({"w": {"step": counter + k}} if counter is not None else {} for k in range(2))
    return [
        model(),
        *load,
        micro(),
        step(state=first),
        stepped(),
        saving({}),
        step(2, state=second),
        stepped(2),
    ]


def in_flight(apart: bool) -> Run:
    flight = {"kind": "save_in_flight", "what": "a forward", "saved_line": LINE, "apart": apart}
    return train([saving({}, "async_save"), flight], [saving({}, "async_save")])


LATE = step(optimizer=1, state={"w": {"step": 1.0}})
SAVE, FULL = saving({"w": tensor()}, "torch.save"), template(full=True)
MEMORY, COUNTER = "full-state-dict-oom", "step0-save-advances-adam"
test_templates = judged_as(
    row(
        MEMORY, "fail", train([FULL, SAVE], [FULL]), names=("64 bytes",)
    ),  # a full dict on a rank that does not save
    *(
        row(MEMORY, "pass", train([FULL, SAVE], [{**FULL, **other}]))
        for other in ({"bytes": 0}, {"offload": True})
    ),
    row(MEMORY, "pass", train([FULL, SAVE], [FULL, saving({}, "torch.save", "/b")])),
    *(
        row(MEMORY, "not_applicable", train(*none))
        for none in ([[FULL], [FULL]], [[saving({})], [saving({})]], [[FULL, SAVE]])
    ),
    row(COUNTER, "pass", counted(0.0)),
    row(COUNTER, "fail", counted(1.0)),
    row(
        COUNTER,
        "not_applicable",
        counted(1.0, {"kind": "checkpoint", "op": "load", "after_step": 0}),
    ),
    row(COUNTER, "not_applicable", counted(None)),
    *(  # of an optimizer that begins later: by a helper, or with the state of another
        row(COUNTER, status, [*counted(0.0), *made, LATE])
        for status, made in (
            ("fail", [template(had_state=False)]),
            ("pass", []),
            ("pass", [template(had_state=True)]),
        )
    ),
    row("async-save-process-group", "fail", in_flight(False)),
    row("async-save-process-group", "pass", in_flight(True)),
)


def crashed(after: int = 6, place: str = "/c/{}") -> Run:
    """A run that saved after step 3 (w = A) and was killed in the save after `after` (w = B)."""
    first = saving({}, to=place.format(3), after=3, weights={"w": A, "v": A}, call=1)
    second = saving({}, to=place.format(after), after=after, weights={"w": B, "v": B}, call=2)
    rank = [model(), step(weights={"w": C, "v": C}), first, second]
    made = run([*rank], [*rank, {"kind": "killed", "moment": "before-data"}], role="crash")
    return replace(made, note="rank 1 killed")


def recovered(*weights: dict[str, Any]) -> Run:
    return run(
        *[[model(), step(weights=w, grads={"w": C}), stepped()] for w in weights], role="recovered"
    )


REFUSED = run(*[[end("OSError", "no .metadata")]] * 2, role="recovered")
WHOLE_, TORN, FRESH = ({"w": w, "v": w} for w in (A, B, C))
AGAIN = run(*[[model(), step(weights={"w": A}), stepped()]] * 2)
CHOSEN, MIXES = "incomplete-checkpoint-chosen", "partial-overwrite-mixes-checkpoints"
ALONE = run(
    [model(), saving({}, after=3)],
    [model(), saving({}, after=3), {"kind": "killed"}],
    role="crash",
    note="killed",
)


def after_crash(crash: Run, after: Run, chosen: str, mixes: str = "pass") -> list[Any]:
    """A row for each of the two rules on crashes."""
    crashes = {"crashes": ((crash, after),), "resume": AGAIN}
    return [
        row(rule, s, *[[*SAVED, *THEN]] * 2, **crashes)
        for rule, s in ((CHOSEN, chosen), (MIXES, mixes))
        if s
    ]


test_crashes = judged_as(
    *after_crash(crashed(), recovered(WHOLE_, WHOLE_), "pass"),
    *after_crash(crashed(), recovered(TORN, TORN), "pass"),
    *after_crash(crashed(), recovered(WHOLE_, {"w": B, "v": A}), "", "fail"),  # a mixture
    *after_crash(crashed(), recovered(WHOLE_, {"w": A, "v": C}), "", "fail"),
    *after_crash(crashed(), REFUSED, "fail"),  # another folder is complete
    *after_crash(crashed(place="/c/one"), REFUSED, "pass"),
    *after_crash(crashed(), recovered(FRESH, FRESH), "fail"),  # a new beginning
    *after_crash(ALONE, recovered(FRESH, FRESH), "pass"),
    row(  # a resume that never brings all back is no new beginning
        *(CHOSEN, "pass", [*SAVED, *THEN], [*SAVED, *THEN]),
        crashes=((crashed(), recovered(FRESH, FRESH)),),
        resume=run(*[[model(), step(weights={"w": B}), stepped()]] * 2),
    ),
    *(
        row(
            *("damaged-checkpoint-loaded", status),
            *[
                [
                    model(),
                    step(weights={"w": C}),
                    saving({}, weights={"w": A}),
                    stepped(),
                    SAVED[-1],
                    *THEN,
                ]
            ]
            * 2,
            resume=AGAIN,
            damaged=(replace(recovered(*weights), note="cut"),),
            names=names,
        )
        for status, weights, names in (
            ("fail", ({"w": A}, {"w": C}), ("1 of 2",)),  # tensors
            ("pass", ({"w": A}, {"w": A}), ()),
            ("pass", ({"w": C}, {"w": C}), ()),
            ("pass", (), ()),
        )
    ),
)


def test_what_a_resume_after_a_crash_began_with() -> None:
    unseeded = {"w": [9.0] * 5, "v": C}
    assert outcome_of(crashed(), recovered(unseeded, unseeded)).fresh
    weights = [{"w": w, "frozen": C} for w in (A, B, C)]  # a frozen tensor is of every save
    saves = [
        saving({}, after=k, to=f"/c/{k}", weights=w) for k, w in zip((3, 6), weights, strict=False)
    ]
    made = run([model(), step(weights=weights[2]), *saves, {"kind": "killed"}], role="crash")
    assert outcome_of(made, recovered(weights[0])).step == 3
    assert outcome_of(made, recovered(weights[2])).fresh


def test_another_optimizer_has_not_stepped_when_a_resume_begins() -> None:
    """The state of a GAN's second model is in the save, and recorded in the resumed run when its
    optimizer steps.
    """
    saved = saving(
        {}, after=3, to="/c/3", weights={"w": A, "v": B}, state={"w": {"m": A}, "v": {"m": B}}
    )
    made = run([model(), step(weights={"w": C, "v": C}), saved, {"kind": "killed"}], role="crash")
    begun = step(weights={"w": A, "v": B}, state={"w": {"m": A}}, held=["w"])
    found = outcome_of(made, run([model(), begun], role="recovered"))
    assert found.step == 3


def test_state_that_no_resume_has_is_made_anew() -> None:
    """A head's optimizer that begins anew in each round is in the save of the crashed run, and in
    no resume.
    """
    saved = saving({}, after=3, to="/c/3", weights={"w": A}, state={"w": {"m": A, "head": B}})
    made = run([model(), step(weights={"w": C}), saved, {"kind": "killed"}], role="crash")
    found = run(
        [model(), step(weights={"w": A}, state={"w": {"m": A}}, held=["w"])], role="recovered"
    )
    assert outcome_of(made, found).mixed
    assert outcome_of(made, found, found).step == 3


def test_a_step_before_the_load_is_none_of_the_training() -> None:
    load = {"kind": "checkpoint", "op": "load", "after_step": 1, "to": "/c/3"}
    begun, ends = [micro(1), step(1), stepped(1)], [micro(2), step(2), stepped(2)]
    made = run(
        [*begun, load, *ends], [*begun, *ends], role="resume"
    )  # rank 0 loads, and broadcasts
    found = from_the_load_on({one.rank: list(one.records) for one in made.traces})
    assert [[r.step for r in own if isinstance(r, Step)] for own in found.values()] == [[1], [1]]
    assert [r.after_step for r in found[0] if isinstance(r, Checkpoint)] == [0]


def test_moments_of_crashes() -> None:
    both = train(*[[saving({}, after=3)] for _ in range(2)])
    one = train(
        [saving({}, "torch.save", after=2), saving({}, "torch.save", after=4)], []
    )  # it loses half of the file
    for made, expected in ((both, (1, 2, "before-data", 7)), (one, (0, 2, "half-file", 5))):
        first = moments(made, thorough=False)[0]
        assert (first.rank, first.call, first.moment, first.steps) == expected
    assert {m.moment for m in moments(both, thorough=True)} == {"before-data", "before-metadata"}
    assert moments(train([], []), thorough=True) == []


def saves_and(*between: dict[str, Any]) -> list[dict[str, Any]]:
    """A rank that saves after step 3 and step 6, with records after the second save."""
    records = [
        saving({}, to="/c/new", after=3),
        {"kind": "renamed", "old": "/c/new", "new": "/c/last"},
    ]
    return [*records, saving({}, to="/c/new", after=6), *between]


def file(path: str, after: int = 6) -> dict[str, Any]:
    return {"kind": "checkpoint", "op": "write", "after_step": after, "to": path}


TAKEN, RENAMED = (
    {"kind": "removed", "path": "/c/last"},
    {"kind": "renamed", "old": "/c/new", "new": "/c/last"},
)
ASIDE = {"kind": "renamed", "old": "/c/last", "new": "/c/old"}


@cases(
    "ranks, around",
    ([[TAKEN, RENAMED], []], [(0, 2, "before-rename")]),
    ([[ASIDE, RENAMED], []], [(0, 3, "before-rename")]),
    (
        [[RENAMED, {**TAKEN, "path": "/c/older"}], []],
        [],
    ),  # what is older goes when the new one is there
    ([[file("/c/new/a"), file("/c/new/b")], [file("/c/new/rank1")]], [(1, 1, "before-file")]),
    ([[file("/c/new/a"), file("/c/new/b")], []], [(0, 2, "before-file")]),
    (
        [[file("/c/latest"), file("/c/new/log", after=7)], []],
        [],
    ),  # a pointer to the checkpoint, a log
)
def test_moments_around_a_save(
    ranks: list[list[dict[str, Any]]], around: list[tuple[int, int, str]]
) -> None:
    made = train(*[saves_and(*records) for records in ranks])
    found = [m for m in moments(made, thorough=False, home="/c") if m.beside]
    assert [(m.rank, m.call, m.moment) for m in found] == around
    assert all(m.steps == 7 for m in found)


@cases("resumed, line, required", ("fresh", 8, True), ("refused", 1, False))
def test_a_crash_between_a_removal_and_a_rename(resumed: str, line: int, required: bool) -> None:
    """The new checkpoint is complete under another name: a resume that stops loses nothing, one
    that begins anew does.
    """
    taken = {**TAKEN, "at_line": replace(LINE, line=8)}
    killed = {"kind": "killed", "moment": "before-rename"}
    first, second = (
        saving({}, to="/c/new", after=k, weights={"w": w, "v": w}) for k, w in ((3, A), (6, B))
    )
    records = [model(), step(weights={"w": C, "v": C}), first, RENAMED, second, taken, killed]
    crash = run(records, role="crash", note="rank 0 killed")
    after = (
        recovered(FRESH)
        if resumed == "fresh"
        else run([end("OSError", "no .metadata")], role="recovered")
    )
    trained = run(
        [
            *SAVED,
            {
                "kind": "checkpoint",
                "op": "load",
                "after_step": 0,
                "to": "/c",
                "at_line": replace(LINE, line=3),
            },
            *THEN,
        ]
    )
    evidence = Evidence(
        train=trained,
        resume=run([model(), step(weights={"w": A}), stepped()]),
        crashes=((crash, after),),
    )
    finding = judge(CHOSEN, evidence)
    assert (finding.status, finding.required) == ("fail", required)
    assert finding.location is not None
    assert finding.location.line == line
    assert "the save after step 3 is complete" in finding.evidence


def missing_key(key: str) -> Run:
    return run(
        [end("RuntimeError", f"Missing key in checkpoint state_dict: {key}.")], role="resume"
    )


OPTIMIZER = saving({"state.w.step": tensor(), "state.v.step": tensor()})
test_keys_with_a_prefix_too_many = judged_as(
    *(
        row("wrapper-prefix-keys", status, train([OPTIMIZER], []), resume=missing_key(key))
        for key, status in (
            ("state.module.w.step", "fail"),
            ("state._orig_mod.w.step", "fail"),
            ("state.u.step", "pass"),  # another fault
        )
    )
)


def test_a_resume_that_looks_beside_what_was_saved() -> None:
    """accelerate@e625c7a325: the folder of a part is chosen by a name that stands elsewhere."""
    ended = end("Error", "[Errno 2] No such file or directory: '/c/run/step_1/.metadata'")
    saved = train([saving({"w": tensor()}, to="/c/run/step_1/optimizer")], [])
    found = judge("resume-is-exact", Evidence(train=saved, resume=run([ended], role="resume")))
    assert found.status == "fail"
    assert "looks for `/c/run/step_1/.metadata`" in found.evidence
    assert "the saves wrote /c/run/step_1/optimizer" in found.evidence


@cases("first, ahead", (5, "those of 3 steps from step 2 on are left out"), (9, ""))
def test_a_resume_whose_data_are_ahead(first: int, ahead: str) -> None:
    """Lightning@25b1343f1c: a loader that is started twice."""
    whole = [{"kind": "batch", "step": k, "rows": [k, 10 + k], "size": 2} for k in range(1, 8)]
    again = run([model(), micro(rows=(first, 10 + first)), step(), stepped()], role="resume")
    train_run = run([*SAVED, micro(2, rows=(2, 12)), step(2), stepped(2)])
    survey = run(whole, role="survey")
    evidence = Evidence(train=train_run, resume=again, survey=survey)
    found = judge("scheduler-or-progress-not-restored", evidence)
    assert found.status == "fail" and "on other samples" in found.evidence
    assert ahead in found.evidence
    assert ("make the iterator once" in found.fix) is bool(ahead)


@cases(
    "without, mine, status",
    ({}, {"w": {"step": 1.0}}, "fail"),
    ({"w": {"step": 1.0}}, {"w": {"step": 1.0}}, "pass"),
    ({}, {"w": {"step": 0.0}}, "pass"),
)
def test_state_that_a_resume_makes_for_an_optimizer_without(
    without: dict[str, Any], mine: dict[str, Any], status: str
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5680: a stage begins with an optimizer that was not saved."""
    begun = [model(), micro(), step(state={"w": {"step": 0.0}}), stepped(), *SAVED[-1:]]
    saved = [*begun, saving({}), micro(2), step(2, state=without), stepped(2)]
    again = run([model(), template(had_state=False), step(state=mine), stepped()], role="resume")
    found = judge(COUNTER, Evidence(train=run(saved), resume=again))
    assert found.status == status
    assert ("before step 2, and 0 without it" in found.evidence) is (status == "fail")


@cases(
    "missing, status",
    ("/w/checkpoint/.metadata", "inconclusive"),
    ("/w/checkpoint/step_3/.metadata", "fail"),
    ("/w/checkpoint/other", "fail"),
    ("/data/.metadata", "fail"),
)
def test_a_resume_that_is_given_the_folder_above(missing: str, status: str) -> None:
    """What `--resume-args` name is the user's matter, not the script's."""
    resume = run(
        [end("CheckpointException", f"[Errno 2] No such file or directory: '{missing}'")],
        role="resume",
    )
    left = ("step_3", "step_3/.metadata", "step_3/__0_0.distcp")
    evidence = Evidence(
        train=ONE, resume=resume, course=Course(checkpoint="/w/checkpoint", left=left)
    )
    found = RULES["resume-is-exact"].judge(evidence)
    assert found.status == status
    assert ("saved to {checkpoint}/step_3: name that folder" in found.evidence) is (
        status == "inconclusive"
    )
