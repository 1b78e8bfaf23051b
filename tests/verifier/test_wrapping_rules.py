"""The rules of the wrapping and init families on written records."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from records import LINE, cases, judge, judged_as, micro, model, parameter, row, step, stepped, steps, stopped
from verified_fsdp2.verifier.evidence import Sources
from verified_fsdp2.verifier.finding import Finding, Hit, Suppression
from verified_fsdp2.verifier.probe.measures import shard_digest

Records = list[dict[str, Any]]


NO_FILE = ("ValueError", "no such file")
SHARED = "Parameter 'b' is shared with a parameter already managed by another FSDP group. For shared"
FREED = "setStorage: sizes [8, 8] are out of bounds for storage of size 0"
A, B = [1.0, 1, 0, 0, 0], [2.0, 1, 0, 0, 0]
SHARD = {"kind": "shard", "parameters": []}
VIEW = {"kind": "inplace_view", "module": "Linear", "step": 1}
STALE = {"kind": "stale", "groups": [""], "after_step": 1, "stepped": True, "evaluated": LINE}
UNREAD = {"kind": "shard", "unread": ["offload_policy"], "parameters": []}
BLOCK = {"parent": "blocks", "cls": "m.Block", "count": 2, "numel": 16}


def ties(parameters: int) -> Records:
    names = ["embed.weight", "head.weight"]
    return steps({"kind": "ties", "ties": [{"names": names, "parameters": parameters, "line": LINE}]})


def late(*grads: list[float], late: bool = True) -> list[Records]:
    plain = parameter("adapter", managed=False, sharded=False)
    first = [SHARD, model(parameter(), plain), *[{"kind": "late", "names": ["adapter"]}] * late]
    return [[*first, micro(), step(grads={"adapter": grad}), stepped()] for grad in grads]


def reduce(*missing: str, **more: Any) -> dict[str, Any]:
    base = {"kind": "reduce", "group": "layer", "step": 1, "micro": 0, "missing": list(missing), "parameters": 2}
    return {**base, "filled": False, "ranks": [0, 1], **more}


def digests(copy: int = 0, **of: str | None) -> Records:
    entries = [parameter(name, copy) for name in of]
    return [model(*entries), {"kind": "shards", "digests": of}, micro(), step(), stepped()]


def given(keys: int, broadcast: bool = False) -> dict[str, Any]:
    base = {"kind": "set_state", "op": "set_model_state_dict", "given": keys, "full": True, "strict": True}
    return {**base, "broadcast": broadcast}


def local(*shape: int, line: Any = LINE) -> Records:
    return steps({"kind": "from_local", "shape": list(shape), "local": [2, 4], "ranks": [0, 1], "at_line": line})


def blocks(blocks: int, groups: int) -> Records:
    root = model(blocks=[BLOCK] * blocks, groups=[{"module": str(k)} for k in range(groups)])
    return [root, micro(), step(), stepped()]


# rule, {what the ranks record: (their records or their run, the status)}
JUDGED: dict[str, dict[str, tuple[Any, str]]] = {
    "tied-weights-split-groups": {
        "no tie": ([steps(), steps()], "not_applicable"),
        "no tie before an error": ([stopped(*NO_FILE, steps(), steps())], "inconclusive"),
    },
    "params-added-after-shard": {
        "gradients that differ": (late(A, B), "fail"),
        "gradients that the script reduces": (late(A, A), "pass"),
        "a plain parameter that was there": (late(A, B, late=False), "pass"),
    },
    "root-not-wrapped": {
        "a late parameter is the other rule's": (late(A, B), "pass"),
        "a plain parameter that was there": (late(A, B, late=False), "fail"),
    },
    "rank-divergent-param-use": {
        "a rank that lacks nothing writes nothing": ([steps(reduce("a")), steps()], "fail"),
        "the same on all ranks": ([steps(reduce("a")), steps(reduce("a"))], "pass"),
        "zeros": ([steps(reduce("a", filled=True)), steps(reduce("b", filled=True))], "pass"),
        "a second reduction of one backward": ([steps(reduce("a"), reduce("a", "b")), steps(reduce("a"))], "pass"),
        "different meshes": ([steps(reduce("a", ranks=[0])), steps(reduce("b", ranks=[1]))], "pass"),
        "a rank that raised before": ([stopped(*NO_FILE, [model()], [model(), reduce("a")])], "inconclusive"),
    },
    "inplace-op-on-output-view": {
        "a changed view alone": ([steps(VIEW), steps(VIEW)], "pass"),
        "gradients that are not reduced": ([[model(), VIEW, micro(), step(unsynced=["w"]), stepped()]] * 2, "fail"),
        "freed weights": ([stopped("RuntimeError", FREED, *[[model(), VIEW]] * 2)], "fail"),
        "freed weights without a view": ([stopped("RuntimeError", FREED, [model()], [model()])], "inconclusive"),
    },
    "stale-unsharded-after-step": {"no stale group": ([steps(), steps()], "pass")},
    "dtensor-rng-identical-shards-cpu": {
        "equal shards": ([digests(w="a", v="b"), digests(w="a", v="b")], "fail"),
        "a few among many": ([digests(w="a", v="b", u="c"), digests(w="a", v="d", u="e")], "pass"),
        "no digests": ([digests(w=None), digests(w=None)], "inconclusive"),
        "one rank": ([digests(w="a")], "not_applicable"),
        "replicas": ([digests(0, w="a"), digests(1, w="a")], "not_applicable"),
    },
    "rank0-sd-without-broadcast": {
        "keys on rank 0": ([steps(given(9)), steps(given(0))], "fail"),
        "a broadcast": ([steps(given(9, True)), steps(given(0, True))], "pass"),
        "keys on both ranks": ([steps(given(9)), steps(given(9))], "pass"),
        "some keys on the other rank": ([steps(given(9)), steps(given(4))], "pass"),
        "before the first forward": (
            [stopped("RuntimeError", "Connection closed by peer", [given(9)], [given(0)])],
            "fail",
        ),
        "no call": ([steps(), steps()], "not_applicable"),
    },
    "local-shard-assumptions": {
        "the whole shape": ([local(6, 4), local(6, 4)], "pass"),
        "a shape of its own": ([local(6, 4), local(4, 4)], "fail"),
        "other lines are other tensors": ([local(6, 4), local(4, 4, line=replace(LINE, line=2))], "pass"),
        "another number of calls": ([local(6, 4), steps()], "inconclusive"),
        "no call": ([steps(), steps()], "not_applicable"),
        "no call before an error": ([stopped(*NO_FILE, steps(), steps())], "inconclusive"),
    },
    "root-only-wrap": {
        "blocks and one group": ([blocks(1, 1)] * 2, "fail"),
        "blocks and two groups": ([blocks(1, 2)] * 2, "pass"),
        "no blocks": ([blocks(0, 1)] * 2, "not_applicable"),
        "blocks and no group": ([blocks(1, 0)] * 2, "inconclusive"),
        "nothing": ([blocks(0, 0)] * 2, "inconclusive"),
    },
    "shards-are-even": {"one rank": ([steps()], "not_applicable"), "two ranks": ([steps(), steps()], "pass")},
    "shard-option-unread": {
        "an unread option": ([[UNREAD, *steps()], [SHARD, *steps()]], "fail"),
        "none": ([[SHARD, *steps()], [SHARD, *steps()]], "pass"),
    },
}


test_the_status = judged_as(
    *(row(rule, status, *ranks) for rule, rows in JUDGED.items() for ranks, status in rows.values())
)


def gathered(weights: int, *lines: dict[str, Any]) -> list[Records]:
    traffic = {"kind": "traffic", "step": 2, "weights": weights, "lines": list(lines)}
    return [[*steps(), micro(2), step(2), stepped(2), traffic]] * 2


TIED = "tied-weights-split-groups"
test_what_is_named = judged_as(
    *(
        row(TIED, status, *[ties(k)] * 2, names=("embed.weight", "head.weight"))
        for k, status in ((1, "pass"), (2, "fail"))
    ),
    row(TIED, "fail", stopped("ValueError", SHARED, [model()], [model()]), at=LINE),  # the error of torch is enough
    row("rank-divergent-param-use", "fail", steps(reduce("a")), steps(reduce("b")), names=("rank 0", "rank 1")),
    row("stale-unsharded-after-step", "fail", [*steps(), STALE], steps(), at=LINE, names=("'root'",)),
    row("rank0-sd-without-broadcast", "inconclusive", steps(), steps(), saving=LINE),
    row("model-gathered-every-step", "fail", *gathered(16 * 4)),  # the bytes of the whole model
    row("model-gathered-every-step", "pass", *gathered(16 * 4 - 1)),
)


def test_what_a_digest_distinguishes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    assert shard_digest(weight) == shard_digest(weight.clone()) != shard_digest(weight + 1)
    alike = (torch.ones(16, 4), torch.arange(4.0).repeat(8, 1), torch.randn(4), torch.randn(1, 64), torch.ones(()))
    assert [shard_digest(silent) for silent in alike] == [None] * len(alike)
    assert shard_digest(torch.randn(1000, 100)) is not None


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
        return judge(rule, steps(), steps(), sources=sources, **more)

    @pytest.mark.parametrize("rule", UNSHARDED)
    def test_a_model_that_is_not_sharded(self, rule: str) -> None:
        plain = [model(parameter(sharded=False, managed=False)), micro(), step(), stepped()]
        assert judge(rule, plain, plain).status == "not_applicable"
        assert judge(rule, stopped(*NO_FILE, plain, plain)).status != "not_applicable"

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

    @cases(
        "rule, source",
        ("ddp-around-fsdp", "from torch.nn.parallel import DistributedDataParallel as DDP"),
        ("deepcopy-of-fsdp-model", "from copy import deepcopy"),
        ("deepcopy-of-fsdp-model", "getattr(copy, 'deepcopy')"),
        ("inference-mode-before-training", "with torch.inference_mode():\n    pass"),
        ("mesh-refused", "fully_shard(model, mesh=world)"),
        ("shard-option-unread", "options = {'ignored_params': ()}"),
    )
    def test_what_the_sources_name(self, rule: str, source: str) -> None:
        assert self.named(rule, source).status != "not_applicable"
        assert self.named(rule, f'"""{source.splitlines()[0]}"""\npass').status == "not_applicable"
        assert self.named(rule, "no python").status != "not_applicable"

    def test_an_error_counts_whatever_the_sources_name(self) -> None:
        train = stopped("AssertionError", "FSDP does not support deepcopy. For state dict", steps(), steps())
        sources = Sources({"train.py": "pass"}, ("train.py",))
        assert judge("deepcopy-of-fsdp-model", train, sources=sources).status == "fail"

    @cases(
        "rule, source",
        ("ac-compile-order", "block = checkpoint_wrapper(block)"),
        ("cpu-offload-nccl-only", "policy = CPUOffloadPolicy()"),
        ("set-device-missing", "init_process_group('cpu:gloo,cuda:nccl')"),
    )
    def test_what_only_sources_show(self, rule: str, source: str) -> None:
        assert self.named(rule, source, followed=True).status == "pass"
        assert self.named(rule, source).status == "inconclusive"
        absent = self.named(rule, "pass")
        assert (absent.status, absent.tier) == ("not_applicable", "static")
        assert self.named(rule, "pass", hits={rule: (Hit(rule, "seen", LINE),)}).status == "fail"

    def test_no_comment_ignores_a_rule(self) -> None:
        comment = Suppression(LINE, ("root-only-wrap",), "one layer", range(1, 2))
        assert self.named("unused-suppression", "pass").status == "not_applicable"
        assert self.named("unused-suppression", "pass", suppressions=(comment,), followed=True).status == "pass"


@cases("line, status", (3, "pass"), (4, "fail"))
def test_a_gather_under_a_condition_may_be_that_of_the_best_weights(line: int, status: str) -> None:
    source = "for step in range(9):\n    if value < best:\n        kept = whole(model)\n    other = whole(model)\n"
    place = replace(LINE, line=line)
    sources = Sources({"train.py": source}, ("train.py",))
    ranks = gathered(64, {"at_line": place})
    assert judge("model-gathered-every-step", *ranks, sources=sources).status == status
