"""The judgement of the checkpoint rules on records written in the tests."""

from dataclasses import replace
from typing import Any

import pytest

from records import LINE, cases, judge, judged_as, micro, model, parameter, row, run, step, stepped
from verified_fsdp2.verifier.analysis.crash_moments import moments
from verified_fsdp2.verifier.analysis.saves import all_saves, final_path
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.checkpoint._recovery import outcome_of
from verified_fsdp2.verifier.trace import Ended, Run

A, B, C = ([float(k + 1), float(k), 2.0, 3.0, 4.0] for k in range(3))
WHOLE = [3.0, 1.0, 4.0, 6.0, 8.0]  # A + B


def shard(rank: int, sketch: list[float] = A) -> dict[str, Any]:
    return {**tensor(sketch=sketch), "kind": "dtensor", "own": [2, 4], "offset": [2 * rank, 0], "sharded": True}


def tensor(shape: tuple[int, ...] = (4, 4), sketch: list[float] = A) -> dict[str, Any]:
    return {"kind": "tensor", "shape": list(shape), "dtype": "float32", "sketch": sketch, "copy": 0, "sharded": False}


def saving(entries: dict[str, Any], op: str = "save", to: str = "/c/1", after: int = 1, **more: Any) -> dict[str, Any]:
    base = {"kind": "saving", "op": op, "call": 1, "after_step": after, "to": to, "main": True, "alone": False}
    return {**base, "entries": entries, "random": None, "weights": {"w": A}, "state": {}, **more}


def opened(path: str = "/c/1", error: str | None = None, lost: tuple[str, ...] = (), **entries: Any) -> Run:
    record = {"kind": "inspected_checkpoint", "path": path, "format": "dcp", "error": error}
    return run([{**record, "missing_files": list(lost), "entries": entries}], role="inspect")


def train(*ranks: list[dict[str, Any]]) -> Run:
    halves = [model(parameter("w", local_numel=8, numel=16)) for _ in ranks]
    return run(*[[halves[k], micro(), step(), stepped(), *records] for k, records in enumerate(ranks)])


PATH, EXPORT, HOLDS, RACE = (
    *("rank-dependent-checkpoint-path", "local-shard-export"),
    *("checkpoint-holds-what-ranks-held", "async-save-state-race"),
)
LOST = opened(error="1 of 2 files of the metadata are not there", lost=("__1_0.distcp",))
ONE = train([saving({"w": tensor()})], [])
BOTH = train([saving({"w": shard(0, A)})], [saving({"w": shard(1, B)})])
BEHIND = train([saving({"w": tensor()}, "async_save")], [])
MASK = tensor(sketch=[float("inf"), *[float("nan")] * 4])
MASKED = train([saving({"m": MASK})], [])


def files(key: str, make: Any, op: str, to: str) -> Run:
    """Each of two ranks saves one entry; `{}` in the key or the path is its number."""
    return train(*[[saving({key.format(rank): make(rank)}, op, to.format(rank))] for rank in range(2)])


def part(rank: int) -> dict[str, Any]:
    return tensor((2, 4))


test_what_is_saved = judged_as(
    row(PATH, "fail", train([saving({})], [saving({}, to="/c/2")]), at=LINE),
    row(PATH, "pass", train([saving({})], [saving({})])),
    row(PATH, "not_applicable", files("w", part, "torch.save", "/c/r{}.pt")),
    row(PATH, "not_applicable", train([saving({}, alone=True)], [saving({}, to="/c/2", alone=True)])),
    row(PATH, "fail", train([saving({})], [saving({})]), inspect=LOST, names=("__1_0.distcp",)),
    *(  # rank 0 alone saves; the numbers are elements
        row(EXPORT, "fail", train([saving({"model.w": entry}, "torch.save", "/c/a.pt")], []), names=("8", "16"))
        for entry in (shard(0), tensor((2, 4)))
    ),
    row(EXPORT, "fail", files("w", shard, "torch.save", "/c/a.pt")),  # all ranks into one file
    row(EXPORT, "pass", files("w", shard, "torch.save", "/c/{}.pt")),
    row(EXPORT, "pass", files("w", part, "torch.save", "/c/{}.pt")),
    row(EXPORT, "pass", files("w", shard, "save", "/c/1")),  # dcp takes shards of DTensors, but not plain ones
    row(EXPORT, "fail", files("w", part, "save", "/c/1")),
    row(EXPORT, "pass", files("rank{}.w", part, "save", "/c/1")),
    row(EXPORT, "pass", train([saving({"w": tensor()}, "torch.save", "/c/a.pt")], [])),  # a whole tensor
    row(HOLDS, "pass", BOTH, inspect=opened(w=tensor(sketch=WHOLE))),  # the sum of shards is what must be there
    row(HOLDS, "fail", BOTH, inspect=opened(w=tensor(sketch=A))),
    row(
        HOLDS,
        "fail",
        train([saving({"w": tensor(), "v": tensor()})], []),
        inspect=opened(w=tensor()),
        names=("v: 1 of 2",),
    ),
    row(HOLDS, "pass", MASKED, inspect=opened(m=MASK)),  # infinities are no difference
    row(HOLDS, "fail", MASKED, inspect=opened(m=tensor())),
    row(  # the last save to a path counts
        HOLDS,
        "pass",
        train([saving({"w": tensor()}), saving({"w": tensor(sketch=B)}, after=2)], []),
        inspect=opened(w=tensor(sketch=B)),
    ),
    row(HOLDS, "not_applicable", BEHIND, inspect=opened(w=tensor(sketch=B))),  # a save in the background is the race's
    row(RACE, "fail", BEHIND, inspect=opened(w=tensor(sketch=B))),
    row(RACE, "pass", BEHIND, inspect=opened(w=tensor())),
    row(HOLDS, "inconclusive", ONE),
    row(HOLDS, "inconclusive", ONE, inspect=opened(error="no .metadata")),
    *(
        row("wrapper-prefix-keys", status, train([saving(dict.fromkeys(keys, tensor()), "torch.save")], []))
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
)


def test_renames_are_followed() -> None:
    moved = {"kind": "renamed", "old": "/c/1.tmp", "new": "/c/1"}
    run_ = train([saving({"w": tensor()}, to="/c/1.tmp/state.pt"), moved], [])
    assert final_path(run_, all_saves(run_)[0]) == "/c/1/state.pt"


class TestLenient:
    @staticmethod
    def lenient(missing: tuple[str, ...], unused: tuple[str, ...], names: tuple[str, ...] = ()) -> dict[str, Any]:
        base = {"kind": "lenient", "how": "strict=False", "wanted": 2, "names": list(names or missing), "step": 1}
        lists = {"missing": list(missing), "unused": list(unused)}
        return {**base, **lists, "missing_count": len(missing), "unused_count": len(unused)}

    @cases(
        "missing, unused, status",
        ((), (), "pass"),
        (("head.w",), ("old_head.w",), "pass"),
        (("lora.a",), (), "pass"),
        (("w",), ("module.w",), "fail"),
        (("model.w",), ("_orig_mod.w",), "fail"),
        (("a", "b"), ("c", "d"), "fail"),
    )
    def test_a_pretrained_load(self, missing: tuple[str, ...], unused: tuple[str, ...], status: str) -> None:
        assert judge("lenient-load-hides-mismatch", train([self.lenient(missing, unused)], [])).status == status

    @pytest.mark.parametrize(("weights", "status"), [(A, "pass"), (B, "fail")])
    def test_a_resume_is_judged_by_what_came_back(self, weights: list[float], status: str) -> None:
        checkpoint = {"kind": "checkpoint", "op": "save", "after_step": 1}
        saved = run([*[model(), micro(), step(), stepped(), checkpoint], step(2, weights={"w": A}), stepped(2)])
        again = run([model(), self.lenient((), ("module.w",), ("w",)), step(weights={"w": weights}), stepped()])
        assert judge("lenient-load-hides-mismatch", saved, resume=replace(again, role="resume")).status == status


def generators(*states: tuple[str, list[float]]) -> Run:
    entries = [({key: {**tensor(sketch=state), "dtype": "uint8"}}, state) for key, state in states]
    return train(*[[saving(entry, random=state)] for entry, state in entries])


test_random_states_without_a_resume = judged_as(
    row("per-rank-state-deduplicated", "fail", generators(("rng", A), ("rng", B))),  # one key, each rank's own state
    row("per-rank-state-deduplicated", "inconclusive", generators(("rng", A), ("rng", A))),
    row("per-rank-state-deduplicated", "inconclusive", generators(("rng.0", A), ("rng.1", B))),
)


class TestTemplates:
    @staticmethod
    def template(**more: Any) -> dict[str, Any]:
        base = {"kind": "template", "op": "get_state_dict", "step": 2, "full": False, "offload": False}
        return {**base, "optimizers": 1, "states": 1, "bytes": 64, "had_state": False, "had_grads": False, **more}

    @cases(
        "more, keeps, status",
        ({"had_grads": True, "states": 0}, True, "fail"),
        ({"had_grads": True, "states": 0}, False, "not_applicable"),
        ({"had_grads": True, "states": 1, "had_state": True}, True, "pass"),
        ({}, True, "pass"),
    )
    def test_gradients_before_a_step(self, more: dict[str, Any], keeps: bool, status: str) -> None:
        state = {"w": {"exp_avg": A}} if keeps else {}
        run_ = run([model(), micro(), saving({}), self.template(**more), step(2, state=state), stepped(2)])
        assert judge("optim-template-with-grads", run_, resume=run_).status == status
        assert judge("optim-template-with-grads", run_).status == ("inconclusive" if status == "pass" else status)

    def test_a_full_dict_on_idle_ranks_fails(self) -> None:
        save, whole = saving({"w": tensor()}, "torch.save"), self.template(full=True)
        found = judge("full-state-dict-oom", train([whole, save], [whole]))
        assert (found.status, "64 bytes" in found.evidence) == ("fail", True)
        for other in ({**whole, "bytes": 0}, {**whole, "offload": True}):
            assert judge("full-state-dict-oom", train([whole, save], [other])).status == "pass"
        both = train([whole, save], [whole, saving({}, "torch.save", "/b")])
        assert judge("full-state-dict-oom", both).status == "pass"
        for none in ([[whole], [whole]], [[saving({})], [saving({})]], [[whole, save]]):
            assert judge("full-state-dict-oom", train(*none)).status == "not_applicable"

    @pytest.mark.parametrize(
        ("counter", "loaded", "status"),
        [(0.0, False, "pass"), (1.0, False, "fail"), (1.0, True, "not_applicable"), (None, False, "not_applicable")],
    )
    def test_the_counter_before_the_first_step(self, counter: float | None, loaded: bool, status: str) -> None:
        load = [{"kind": "checkpoint", "op": "load", "after_step": 0}] if loaded else []
        first, second = ({"w": {"step": counter + k}} if counter is not None else {} for k in range(2))
        steps = [step(state=first), stepped(), saving({}), step(2, state=second), stepped(2)]
        assert judge("step0-save-advances-adam", run([model(), *load, micro(), *steps])).status == status

    @pytest.mark.parametrize(("apart", "status"), [(False, "fail"), (True, "pass")])
    def test_a_collective_in_flight(self, apart: bool, status: str) -> None:
        flight = {"kind": "save_in_flight", "what": "a forward", "saved_line": LINE, "apart": apart}
        run_ = train([saving({}, "async_save"), flight], [saving({}, "async_save")])
        assert judge("async-save-process-group", run_).status == status


def crashed(after: int = 6, place: str = "/c/{}") -> Run:
    """A run that saved after step 3 (w = A) and was killed in the save after `after` (w = B)."""
    first = saving({}, to=place.format(3), after=3, weights={"w": A, "v": A}, call=1)
    second = saving({}, to=place.format(after), after=after, weights={"w": B, "v": B}, call=2)
    rank = [model(), step(weights={"w": C, "v": C}), first, second]
    made = run([*rank], [*rank, {"kind": "killed", "moment": "before-data"}], role="crash")
    return replace(made, note="rank 1 killed")


def recovered(*weights: dict[str, Any]) -> Run:
    return run(*[[model(), step(weights=w, grads={"w": C}), stepped()] for w in weights], role="recovered")


def refused() -> Run:
    ranks = [[{"kind": "end", "how": "exception", "error": "OSError", "message": "no .metadata", "frames": [LINE]}]] * 2
    return replace(run(*ranks, role="recovered"), ended=tuple(Ended(rank, 1, False) for rank in range(2)))


class TestCrash:
    @staticmethod
    def evidence(crash: Run, after: Run) -> Evidence:
        checkpoint = {"kind": "checkpoint", "op": "save", "after_step": 1}
        base = [model(), step(), stepped(), checkpoint, step(2, weights={"w": A}), stepped(2)]
        again = [model(), step(weights={"w": A}), stepped()]
        return Evidence(train=run(base, base), resume=run(again, again), crashes=((crash, after),))

    def statuses(self, crash: Run, after: Run) -> tuple[str, str]:
        evidence = self.evidence(crash, after)
        names = ("incomplete-checkpoint-chosen", "partial-overwrite-mixes-checkpoints")
        return tuple(judge_one(RULES[name], evidence).status for name in names)  # type: ignore[return-value]

    def test_the_last_complete_one(self) -> None:
        whole = {"w": A, "v": A}
        assert self.statuses(crashed(), recovered(whole, whole)) == ("pass", "pass")
        torn = {"w": B, "v": B}
        assert self.statuses(crashed(), recovered(torn, torn)) == ("pass", "pass")

    @pytest.mark.parametrize("other", [{"w": B, "v": A}, {"w": A, "v": C}])
    def test_a_mixture(self, other: dict[str, Any]) -> None:
        assert self.statuses(crashed(), recovered({"w": A, "v": A}, other))[1] == "fail"

    def test_a_refusal_where_another_folder_is_complete(self) -> None:
        assert self.statuses(crashed(), refused()) == ("fail", "pass")
        assert self.statuses(crashed(place="/c/one"), refused()) == ("pass", "pass")

    def test_a_new_beginning(self) -> None:
        fresh = {"w": C, "v": C}
        assert self.statuses(crashed(), recovered(fresh, fresh)) == ("fail", "pass")
        unseeded = {"w": [9.0, 9.0, 9.0, 9.0, 9.0], "v": C}
        assert outcome_of(crashed(), recovered(unseeded, unseeded)).fresh
        alone = run([model(), saving({}, after=3)], [model(), saving({}, after=3), {"kind": "killed"}], role="crash")
        assert self.statuses(replace(alone, note="killed"), recovered(fresh, fresh)) == ("pass", "pass")

    def test_a_resume_that_never_brings_all_back_is_not_a_new_beginning(self) -> None:
        fresh = {"w": C, "v": C}
        evidence = self.evidence(crashed(), recovered(fresh, fresh))
        other = [model(), step(weights={"w": B}), stepped()]
        found = judge_one(RULES["incomplete-checkpoint-chosen"], replace(evidence, resume=run(other, other)))
        assert found.status == "pass"

    def test_a_frozen_tensor_is_of_every_save(self) -> None:
        def rank(w: list[float]) -> dict[str, Any]:
            return {"w": w, "frozen": C}

        saves = [saving({}, after=k, to=f"/c/{k}", weights=rank(w)) for k, w in ((3, A), (6, B))]
        made = run([model(), step(weights=rank(C)), *saves, {"kind": "killed"}], role="crash")
        assert outcome_of(made, recovered(rank(A))).step == 3
        assert outcome_of(made, recovered(rank(C))).fresh

    def test_a_damaged_one_that_is_loaded_in_part(self) -> None:
        evidence = self.evidence(crashed(), refused())
        before = [model(), step(weights={"w": C}), saving({}, weights={"w": A})]
        checkpoint = {"kind": "checkpoint", "op": "save", "after_step": 1}
        rank = [*before, stepped(), checkpoint, step(2, weights={"w": A}), stepped(2)]
        train_ = run(rank, rank)

        def found(*weights: dict[str, Any]) -> Finding:
            damaged = replace(recovered(*weights), note="cut")
            return judge_one(RULES["damaged-checkpoint-loaded"], replace(evidence, train=train_, damaged=(damaged,)))

        part = found({"w": A}, {"w": C})
        assert (part.status, "1 of 2" in part.evidence) == ("fail", True), part.evidence  # tensors
        assert found({"w": A}, {"w": A}).status == "pass"
        assert found({"w": C}, {"w": C}).status == "pass"
        assert found().status == "pass"


class TestMoments:
    def test_the_second_save_comes_first(self) -> None:
        both = train(*[[saving({}, after=3)] for _ in range(2)])
        first = moments(both, thorough=False)[0]
        assert (first.rank, first.call, first.moment, first.steps) == (1, 2, "before-data", 7)
        assert {m.moment for m in moments(both, thorough=True)} == {"before-data", "before-metadata"}

    def test_a_script_that_writes_one_file_loses_half_of_it(self) -> None:
        one = train([saving({}, "torch.save", after=2), saving({}, "torch.save", after=4)], [])
        first = moments(one, thorough=False)[0]
        assert (first.rank, first.call, first.moment, first.steps) == (0, 2, "half-file", 5)

    def test_no_save_no_moment(self) -> None:
        assert moments(train([], []), thorough=True) == []
