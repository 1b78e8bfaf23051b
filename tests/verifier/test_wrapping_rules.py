"""The rules of the wrapping and init families on written records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from records import LINE, micro, model, parameter, run, step, stepped
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding, Hit, Suppression
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.probe.measures import shard_digest
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Run

Records = list[dict[str, Any]]


def judge(rule: str, *ranks: Records) -> Finding:
    return judge_one(RULES[rule], Evidence(train=run(*ranks)))


def steps(*between: dict[str, Any]) -> Records:
    return [model(), *between, micro(), step(), stepped()]


def stopped(error: str, message: str, *ranks: Records) -> Run:
    """The run of `ranks`, of which rank 0 raised."""
    whole = run(*ranks)
    trace = whole.traces[0]
    assert trace.end is not None
    end = replace(trace.end, how="exception", error=error, message=message, frames=[LINE])
    return replace(whole, traces=(replace(trace, records=(*trace.records[:-1], end)), *whole.traces[1:]))


class TestTiedWeights:
    def ties(self, parameters: int) -> dict[str, Any]:
        return {
            "kind": "ties",
            "ties": [{"names": ["embed.weight", "head.weight"], "parameters": parameters, "line": LINE}],
        }

    @pytest.mark.parametrize(("parameters", "status"), [(1, "pass"), (2, "fail")])
    def test_one_tensor_must_stay_one_parameter(self, parameters: int, status: str) -> None:
        found = judge("tied-weights-split-groups", *[steps(self.ties(parameters))] * 2)
        assert found.status == status
        assert all(name in found.evidence for name in ("embed.weight", "head.weight"))

    def test_without_a_tie_it_does_not_apply_unless_the_run_stopped_before(self) -> None:
        assert judge("tied-weights-split-groups", steps(), steps()).status == "not_applicable"
        train = stopped("ValueError", "no such file", steps(), steps())
        assert judge_one(RULES["tied-weights-split-groups"], Evidence(train=train)).status == "inconclusive"

    def test_the_error_of_torch_alone_is_enough(self) -> None:
        told = "Parameter 'b' is shared with a parameter already managed by another FSDP group. For shared"
        found = judge_one(
            RULES["tied-weights-split-groups"], Evidence(train=stopped("ValueError", told, [model()], [model()]))
        )
        assert (found.status, found.location) == ("fail", LINE)


class TestLateParameters:
    def ranks(self, *grads: list[float], late: bool = True) -> list[Records]:
        plain = parameter("adapter", managed=False, sharded=False)
        told = [{"kind": "late", "names": ["adapter"]}] if late else []
        first = {"kind": "shard", "parameters": []}
        return [
            [first, model(parameter(), plain), *told, micro(), step(grads={"adapter": grad}), stepped()]
            for grad in grads
        ]

    def test_gradients_that_differ_fail_and_only_here(self) -> None:
        ranks = self.ranks([1.0, 1, 0, 0, 0], [2.0, 1, 0, 0, 0])
        assert judge("params-added-after-shard", *ranks).status == "fail"
        assert judge("root-not-wrapped", *ranks).status == "pass"

    def test_gradients_that_the_script_reduces_pass(self) -> None:
        ranks = self.ranks([1.0, 1, 0, 0, 0], [1.0, 1, 0, 0, 0])
        assert judge("params-added-after-shard", *ranks).status == "pass"

    def test_a_plain_parameter_that_was_there_is_left_to_the_other_rule(self) -> None:
        ranks = self.ranks([1.0, 1, 0, 0, 0], [2.0, 1, 0, 0, 0], late=False)
        assert judge("params-added-after-shard", *ranks).status == "pass"
        assert judge("root-not-wrapped", *ranks).status == "fail"


class TestDivergentUse:
    def reduce(self, *missing: str, filled: bool = False, **more: Any) -> dict[str, Any]:
        base = {"kind": "reduce", "group": "layer", "step": 1, "micro": 0, "missing": list(missing), "parameters": 2}
        return {**base, "filled": filled, "ranks": [0, 1], **more}

    def test_other_parameters_on_another_rank_fail(self) -> None:
        found = judge("rank-divergent-param-use", steps(self.reduce("a")), steps(self.reduce("b")))
        assert found.status == "fail"
        assert "rank 0" in found.evidence and "rank 1" in found.evidence

    def test_a_rank_that_lacks_nothing_writes_nothing(self) -> None:
        assert judge("rank-divergent-param-use", steps(self.reduce("a")), steps()).status == "fail"

    @pytest.mark.parametrize("filled", [False, True])
    def test_the_same_on_all_ranks_and_zeros_for_the_unused_pass(self, filled: bool) -> None:
        other = "b" if filled else "a"
        ranks = [steps(self.reduce("a", filled=filled)), steps(self.reduce(other, filled=filled))]
        assert judge("rank-divergent-param-use", *ranks).status == "pass"

    def test_a_second_reduction_of_one_backward_adds_to_the_first(self) -> None:
        twice = steps(self.reduce("a"), self.reduce("a", "b"))
        assert judge("rank-divergent-param-use", twice, steps(self.reduce("a"))).status == "pass"

    def test_ranks_of_different_meshes_are_not_compared(self) -> None:
        ranks = [steps(self.reduce("a", ranks=[0])), steps(self.reduce("b", ranks=[1]))]
        assert judge("rank-divergent-param-use", *ranks).status == "pass"

    def test_a_rank_that_raised_before_is_not_counted(self) -> None:
        train = stopped("ValueError", "no such file", [model()], [model(), self.reduce("a")])
        assert judge_one(RULES["rank-divergent-param-use"], Evidence(train=train)).status == "inconclusive"


class TestViews:
    changed: ClassVar[dict[str, Any]] = {"kind": "inplace_view", "module": "Linear", "step": 1}

    def test_a_changed_view_alone_passes(self) -> None:
        assert judge("inplace-op-on-output-view", steps(self.changed), steps(self.changed)).status == "pass"

    def test_gradients_that_are_not_reduced_fail(self) -> None:
        rank = [model(), self.changed, micro(), step(unsynced=["w"]), stepped()]
        assert judge("inplace-op-on-output-view", rank, rank).status == "fail"

    @pytest.mark.parametrize(("views", "status"), [(1, "fail"), (0, "inconclusive")])
    def test_freed_weights_are_its_fault_only_with_a_changed_view(self, views: int, status: str) -> None:
        rank = [model(), *[self.changed] * views]
        train = stopped("RuntimeError", "setStorage: sizes [8, 8] are out of bounds for storage of size 0", rank, rank)
        assert judge_one(RULES["inplace-op-on-output-view"], Evidence(train=train)).status == status


class TestStale:
    def test_a_group_left_gathered_fails(self) -> None:
        left = {"kind": "stale", "groups": [""], "after_step": 1, "evaluated": LINE}
        found = judge("stale-unsharded-after-step", [*steps(), left], steps())
        assert (found.status, found.location) == ("fail", LINE)
        assert "'root'" in found.evidence

    def test_none_passes(self) -> None:
        assert judge("stale-unsharded-after-step", steps(), steps()).status == "pass"


class TestIdenticalShards:
    def rank(self, **digests: str | None) -> Records:
        entries = [parameter(name) for name in digests]
        return [model(*entries), {"kind": "shards", "digests": digests}, micro(), step(), stepped()]

    def test_equal_shards_fail(self) -> None:
        assert (
            judge("dtensor-rng-identical-shards-cpu", self.rank(w="a", v="b"), self.rank(w="a", v="b")).status == "fail"
        )

    def test_a_few_among_many_pass(self) -> None:
        first, second = self.rank(w="a", v="b", u="c"), self.rank(w="a", v="d", u="e")
        assert judge("dtensor-rng-identical-shards-cpu", first, second).status == "pass"

    def test_shards_without_digests_are_inconclusive(self) -> None:
        assert judge("dtensor-rng-identical-shards-cpu", self.rank(w=None), self.rank(w=None)).status == "inconclusive"
        assert judge("dtensor-rng-identical-shards-cpu", self.rank(w="a")).status == "not_applicable"

    def test_replicas_are_no_other_shards(self) -> None:
        ranks = [
            [model(parameter("w", copy)), {"kind": "shards", "digests": {"w": "a"}}, micro(), step(), stepped()]
            for copy in (0, 1)
        ]
        assert judge("dtensor-rng-identical-shards-cpu", *ranks).status == "not_applicable"

    def test_what_a_digest_distinguishes(self) -> None:
        torch.manual_seed(0)
        weight = torch.randn(4, 4)
        assert shard_digest(weight) == shard_digest(weight.clone()) != shard_digest(weight + 1)
        for silent in (
            torch.ones(16, 4),
            torch.arange(4.0).repeat(8, 1),
            torch.randn(4),
            torch.randn(1, 64),
            torch.ones(()),
        ):
            assert shard_digest(silent) is None
        large = torch.randn(1000, 100)
        assert shard_digest(large) is not None


class TestRankZeroStateDict:
    def call(self, keys: int, broadcast: bool = False) -> dict[str, Any]:
        base = {"kind": "set_state", "op": "set_model_state_dict", "given": keys, "full": True, "strict": True}
        return {**base, "broadcast": broadcast}

    @pytest.mark.parametrize(
        ("keys", "broadcast", "status"),
        [((9, 0), False, "fail"), ((9, 0), True, "pass"), ((9, 9), False, "pass"), ((9, 4), False, "pass")],
    )
    def test_who_holds_keys(self, keys: tuple[int, int], broadcast: bool, status: str) -> None:
        ranks = [steps(self.call(n, broadcast)) for n in keys]
        assert judge("rank0-sd-without-broadcast", *ranks).status == status

    def test_it_is_named_before_the_first_forward(self) -> None:
        train = stopped("RuntimeError", "Connection closed by peer", [self.call(9)], [self.call(0)])
        assert judge_one(RULES["rank0-sd-without-broadcast"], Evidence(train=train)).status == "fail"

    def test_a_script_that_sets_none(self) -> None:
        found = [Evidence(train=run(steps(), steps()), saving=saving) for saving in (None, LINE)]
        statuses = [judge_one(RULES["rank0-sd-without-broadcast"], evidence).status for evidence in found]
        assert statuses == ["not_applicable", "inconclusive"]


class TestLocalShards:
    def made(self, shape: tuple[int, ...], local: tuple[int, ...] = (2, 4), line: Any = LINE) -> dict[str, Any]:
        return {"kind": "from_local", "shape": list(shape), "local": list(local), "ranks": [0, 1], "at_line": line}

    @pytest.mark.parametrize(("other", "status"), [((6, 4), "pass"), ((4, 4), "fail")])
    def test_one_size_on_all_ranks(self, other: tuple[int, ...], status: str) -> None:
        ranks = [steps(self.made((6, 4))), steps(self.made(other))]
        assert judge("local-shard-assumptions", *ranks).status == status

    def test_other_lines_are_other_tensors(self) -> None:
        ranks = [steps(self.made((6, 4))), steps(self.made((4, 4), line=replace(LINE, line=2)))]
        assert judge("local-shard-assumptions", *ranks).status == "pass"

    def test_another_number_of_calls_is_inconclusive(self) -> None:
        assert judge("local-shard-assumptions", steps(self.made((6, 4))), steps()).status == "inconclusive"

    def test_without_a_call_it_does_not_apply_unless_the_run_stopped_before(self) -> None:
        assert judge("local-shard-assumptions", steps(), steps()).status == "not_applicable"
        train = stopped("ValueError", "no such file", steps(), steps())
        assert judge_one(RULES["local-shard-assumptions"], Evidence(train=train)).status == "inconclusive"


class TestGatheredEveryStep:
    def traffic(self, gathered: int) -> dict[str, Any]:
        return {"kind": "traffic", "step": 2, "script": {"all_gather": [1, gathered]}}

    @pytest.mark.parametrize(("gathered", "status"), [(16 * 4, "fail"), (16 * 4 - 1, "pass")])
    def test_bytes_of_the_whole_model_fail(self, gathered: int, status: str) -> None:
        ranks = [[*steps(), micro(2), step(2), stepped(2), self.traffic(gathered)]] * 2
        found = judge("model-gathered-every-step", *ranks)
        assert (found.status, found.limit) == (status, 64.0)


class TestRootOnly:
    block: ClassVar[dict[str, Any]] = {"parent": "blocks", "cls": "m.Block", "count": 2, "numel": 16}

    @pytest.mark.parametrize(
        ("blocks", "groups", "status"),
        [(1, 1, "fail"), (1, 2, "pass"), (0, 1, "not_applicable"), (1, 0, "inconclusive"), (0, 0, "inconclusive")],
    )
    def test_blocks_want_groups(self, blocks: int, groups: int, status: str) -> None:
        root = model(blocks=[self.block] * blocks, groups=[{"module": str(k)} for k in range(groups)])
        rank = [root, micro(), step(), stepped()]
        assert judge("root-only-wrap", rank, rank).status == status


class TestEven:
    def test_one_rank_has_nothing_to_share(self) -> None:
        assert judge("shards-are-even", steps()).status == "not_applicable"
        assert judge("shards-are-even", steps(), steps()).status == "pass"


class TestUnread:
    def rank(self, *unread: str) -> Records:
        return [{"kind": "shard", "unread": list(unread), "parameters": []}, *steps()]

    def test_an_unread_option_fails(self) -> None:
        assert judge("shard-option-unread", self.rank("offload_policy"), self.rank()).status == "fail"
        assert judge("shard-option-unread", self.rank(), self.rank()).status == "pass"


UNSHARDED = [
    *("custom-forward-bypass", "fsdp1-idiom", "inplace-op-on-output-view", "model-gathered-every-step"),
    *("op-without-sharding-strategy", "parameter-replaced-after-shard", "params-added-after-shard"),
    *("parent-before-child", "rank-divergent-param-use", "shard-option-unread", "sharded-twice", "shards-are-even"),
    *("stale-unsharded-after-step", "submodule-forward-before-root", "unsupported-module-or-param"),
    "weight-used-outside-forward",
]


class TestPresence:
    """What a script has nothing of is not applicable, if its runs completed."""

    def named(self, rule: str, source: str, **more: Any) -> Finding:
        sources = Sources({"train.py": source}, ("train.py",))
        return judge_one(RULES[rule], Evidence(train=run(steps(), steps()), sources=sources, **more))

    @pytest.mark.parametrize("rule", UNSHARDED)
    def test_a_model_that_is_not_sharded(self, rule: str) -> None:
        plain = [model(parameter(sharded=False, managed=False)), micro(), step(), stepped()]
        assert judge(rule, plain, plain).status == "not_applicable"
        train = stopped("ValueError", "no such file", plain, plain)
        assert judge_one(RULES[rule], Evidence(train=train)).status != "not_applicable"

    @pytest.mark.parametrize("rule", ["root-not-wrapped", "root-only-wrap"])
    def test_a_script_without_any_fully_shard_is_inconclusive(self, rule: str) -> None:
        plain = [model(parameter(sharded=False), groups=[]), micro(), step(), stepped()]
        assert judge(rule, plain, plain).status == "inconclusive"

    @pytest.mark.parametrize("rule", ["parent-before-child", "submodule-forward-before-root"])
    @pytest.mark.parametrize(("calls", "status"), [(1, "not_applicable"), (2, "pass")])
    def test_one_sharded_module_has_no_order(self, rule: str, calls: int, status: str) -> None:
        rank = [*[{"kind": "shard", "parameters": []}] * calls, *steps()]
        assert judge(rule, rank, rank).status == status

    @pytest.mark.parametrize(("mesh", "status"), [([2], "not_applicable"), ([2, 1], "pass")])
    def test_one_mesh(self, mesh: list[int], status: str) -> None:
        rank = [model(parameter(), parameter("v", mesh=mesh)), micro(), step(), stepped()]
        assert judge("tensors-on-two-meshes", rank, rank).status == status

    @pytest.mark.parametrize(
        ("rule", "source"),
        [
            ("ddp-around-fsdp", "from torch.nn.parallel import DistributedDataParallel as DDP"),
            ("deepcopy-of-fsdp-model", "from copy import deepcopy"),
            ("deepcopy-of-fsdp-model", "getattr(copy, 'deepcopy')"),
            ("inference-mode-before-training", "with torch.inference_mode():\n    pass"),
            ("mesh-refused", "fully_shard(model, mesh=world)"),
            ("shard-option-unread", "options = {'ignored_params': ()}"),
        ],
    )
    def test_what_the_sources_name(self, rule: str, source: str) -> None:
        assert self.named(rule, source).status != "not_applicable"
        assert self.named(rule, f'"""{source.splitlines()[0]}"""\npass').status == "not_applicable"
        assert self.named(rule, "no python").status != "not_applicable"

    def test_an_error_counts_whatever_the_sources_name(self) -> None:
        train = stopped("AssertionError", "FSDP does not support deepcopy. For state dict", steps(), steps())
        evidence = Evidence(train=train, sources=Sources({"train.py": "pass"}, ("train.py",)))
        assert judge_one(RULES["deepcopy-of-fsdp-model"], evidence).status == "fail"

    @pytest.mark.parametrize(
        ("rule", "source"),
        [
            ("ac-compile-order", "block = checkpoint_wrapper(block)"),
            ("cpu-offload-nccl-only", "policy = CPUOffloadPolicy()"),
            ("set-device-missing", "init_process_group('cpu:gloo,cuda:nccl')"),
        ],
    )
    def test_what_only_sources_show(self, rule: str, source: str) -> None:
        assert self.named(rule, source, followed=True).status == "pass"
        assert self.named(rule, source).status == "inconclusive"
        absent = self.named(rule, "pass")
        assert (absent.status, absent.tier) == ("not_applicable", "static")
        hit = Hit(rule, "seen", LINE)
        assert self.named(rule, "pass", hits={rule: (hit,)}).status == "fail"

    def test_no_comment_ignores_a_rule(self) -> None:
        comment = Suppression(LINE, ("root-only-wrap",), "one layer", range(1, 2))
        assert self.named("unused-suppression", "pass").status == "not_applicable"
        assert self.named("unused-suppression", "pass", suppressions=(comment,), followed=True).status == "pass"
