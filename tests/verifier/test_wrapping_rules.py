"""The rules of the wrapping and init families on written records."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from records import (
    LINE,
    cases,
    judge,
    judged_as,
    micro,
    model,
    parameter,
    row,
    run,
    step,
    stepped,
    steps,
    stopped,
)
from verified_fsdp2.verifier.evidence import Sources
from verified_fsdp2.verifier.finding import Finding, Hit, Suppression
from verified_fsdp2.verifier.probe.measures import shard_digest

Records = list[dict[str, Any]]
NO_FILE = ("ValueError", "no such file")
SHARED = (
    "Parameter 'b' is shared with a parameter already managed by another FSDP group. For shared"
)
FREED = "setStorage: sizes [8, 8] are out of bounds for storage of size 0"
A, B = [1.0, 1, 0, 0, 0], [2.0, 1, 0, 0, 0]
SHARD = {"kind": "shard", "parameters": []}
VIEW = {"kind": "inplace_view", "module": "Linear", "step": 1}
STALE = {"kind": "stale", "groups": [""], "after_step": 1, "stepped": True, "evaluated": LINE}
UNREAD = {"kind": "shard", "unread": ["offload_policy"], "parameters": []}
BLOCK = {"parent": "blocks", "cls": "m.Block", "count": 2, "numel": 16}


def ties(parameters: int) -> Records:
    names = ["embed.weight", "head.weight"]
    return steps(
        {"kind": "ties", "ties": [{"names": names, "parameters": parameters, "line": LINE}]}
    )


def late(*grads: list[float], late: bool = True) -> list[Records]:
    plain = parameter("adapter", managed=False, sharded=False)
    first = [SHARD, model(parameter(), plain), *[{"kind": "late", "names": ["adapter"]}] * late]
    return [[*first, micro(), step(grads={"adapter": grad}), stepped()] for grad in grads]


def reduce(*missing: str, **more: Any) -> dict[str, Any]:
    base = {
        "kind": "reduce",
        "group": "layer",
        "step": 1,
        "micro": 0,
        "missing": list(missing),
        "parameters": 2,
    }
    return {**base, "filled": False, "ranks": [0, 1], **more}


def digests(copy: int = 0, **of: str | None) -> Records:
    entries = [parameter(name, copy) for name in of]
    return [model(*entries), {"kind": "shards", "digests": of}, micro(), step(), stepped()]


def given(keys: int, broadcast: bool = False) -> dict[str, Any]:
    base = {
        "kind": "set_state",
        "op": "set_model_state_dict",
        "given": keys,
        "full": True,
        "strict": True,
    }
    return {**base, "broadcast": broadcast}


def alone(*shape: int) -> Any:
    """A run of one process whose parameter has this shape."""
    entry = parameter(shape=list(shape), numel=math.prod(shape), ranks=[0])
    return run([model(entry), micro(), step(), stepped()], role="single")


def local(*shape: int, line: Any = LINE) -> Records:
    return steps(
        {
            "kind": "from_local",
            "shape": list(shape),
            "local": [2, 4],
            "ranks": [0, 1],
            "at_line": line,
        }
    )


def blocks(blocks: int, groups: int) -> Records:
    root = model(blocks=[BLOCK] * blocks, groups=[{"module": str(k)} for k in range(groups)])
    return [root, micro(), step(), stepped()]


def second_model() -> dict[str, Any]:
    """A reference beside the policy, sharded as one group, too."""
    group = [{"module": "model1.", "parameters": 1}]
    return model(parameter("model1.w"), root="model1.", blocks=[BLOCK], groups=group)


def meshes(second: list[int]) -> Records:
    """Of two parameters, the second is on this mesh."""
    return [model(parameter(), parameter("v", mesh=second)), micro(), step(), stepped()]


TIED, ADDED = "tied-weights-split-groups", "params-added-after-shard"
ROOT, DIVERGENT = "root-not-wrapped", "rank-divergent-param-use"
INPLACE, STALE_GROUP = "inplace-op-on-output-view", "stale-unsharded-after-step"
EQUAL, RANK_0 = "dtensor-rng-identical-shards-cpu", "rank0-sd-without-broadcast"
LOCAL, ROOT_ONLY = "local-shard-assumptions", "root-only-wrap"
EVEN, UNREAD_OPTION = "shards-are-even", "shard-option-unread"
ORDERED = ("parent-before-child", "submodule-forward-before-root")


def adapters(first: float, last: float, others: str = "b") -> list[dict[str, Any]]:
    """Three parameters, of which `w` has the same digest on both ranks, and these squares after two
    steps.
    """
    squares = [
        stepped(k, weights={"w": [x, 0.0, 0.0, 0.0, 0.0]}) for k, x in ((1, first), (2, last))
    ]
    return [*digests(w="a", v=others, u=others + "e")[:-1], *squares]


UNWRAPPED = [model(parameter(sharded=False), groups=[]), micro(), step(), stepped()]
test_the_status = judged_as(
    row(TIED, "not_applicable", steps(), steps()),  # no tie
    row(TIED, "inconclusive", stopped(*NO_FILE, steps(), steps())),  # no tie before an error
    row(ADDED, "fail", *late(A, B)),  # gradients that differ
    row(ADDED, "pass", *late(A, A)),  # gradients that the script reduces
    row(ADDED, "pass", *late(A, B, late=False)),  # a plain parameter that was there
    row(ROOT, "pass", *late(A, B)),  # a late parameter is the other rule's
    row(ROOT, "fail", *late(A, B, late=False)),  # a plain parameter that was there
    row(DIVERGENT, "fail", steps(reduce("a")), steps()),  # a rank that lacks nothing writes nothing
    row(DIVERGENT, "pass", steps(reduce("a")), steps(reduce("a"))),  # the same on all ranks
    row(
        DIVERGENT, "pass", steps(reduce("a", filled=True)), steps(reduce("b", filled=True))
    ),  # zeros
    row(
        DIVERGENT, "pass", steps(reduce("a"), reduce("a", "b")), steps(reduce("a"))
    ),  # two of one backward
    row(
        DIVERGENT, "pass", steps(reduce("a", ranks=[0])), steps(reduce("b", ranks=[1]))
    ),  # different meshes
    row(
        DIVERGENT, "inconclusive", stopped(*NO_FILE, [model()], [model(), reduce("a")])
    ),  # a rank that raised before
    row(INPLACE, "pass", steps(VIEW), steps(VIEW)),  # a changed view alone
    row(
        INPLACE, "fail", *[[model(), VIEW, micro(), step(unsynced=["w"]), stepped()]] * 2
    ),  # it was not reduced
    row(INPLACE, "fail", stopped("RuntimeError", FREED, *[[model(), VIEW]] * 2)),  # freed weights
    row(
        INPLACE, "inconclusive", stopped("RuntimeError", FREED, [model()], [model()])
    ),  # freed weights without a view
    row(STALE_GROUP, "pass", steps(), steps()),  # no stale group
    row(EQUAL, "fail", digests(w="a", v="b"), digests(w="a", v="b")),  # equal shards
    row(
        EQUAL, "pass", digests(w="a", v="b", u="c"), digests(w="a", v="d", u="e")
    ),  # a few among many
    row(
        EQUAL, "fail", adapters(2.0, 3.0), adapters(2.0, 3.0, "d")
    ),  # a few among many, which training does not part
    row(EQUAL, "pass", adapters(2.0, 3.0), adapters(2.0, 4.0, "d")),  # experts that begin as copies
    row(EQUAL, "pass", adapters(2.0, 2.0), adapters(2.0, 2.0, "d")),  # frozen
    row(EQUAL, "inconclusive", digests(w=None), digests(w=None)),  # no digests
    row(EQUAL, "not_applicable", digests(w="a")),  # one rank
    row(EQUAL, "not_applicable", digests(0, w="a"), digests(1, w="a")),  # replicas
    row(RANK_0, "fail", steps(given(9)), steps(given(0))),  # keys on rank 0
    row(RANK_0, "pass", steps(given(9, True)), steps(given(0, True))),  # a broadcast
    # of what each rank has made, one rank's part is left; a padded table is another thing
    row(RANK_0, "fail", steps(given(9, True)), steps(given(0, True)), single=alone(8, 4)),
    row(RANK_0, "pass", steps(given(9)), steps(given(9)), single=alone(8, 4)),
    row(RANK_0, "pass", steps(given(9, True)), steps(given(0, True)), single=alone(5, 4)),
    row(RANK_0, "pass", steps(given(9)), steps(given(9))),  # keys on both ranks
    row(RANK_0, "pass", steps(given(9)), steps(given(4))),  # some keys on the other rank
    row(
        RANK_0, "fail", stopped("RuntimeError", "Connection closed by peer", [given(9)], [given(0)])
    ),  # no forward
    row(RANK_0, "not_applicable", steps(), steps()),  # no call
    row(LOCAL, "pass", local(6, 4), local(6, 4)),  # the whole shape
    row(LOCAL, "fail", local(6, 4), local(4, 4)),  # a shape of its own
    row(
        LOCAL, "pass", local(6, 4), local(4, 4, line=replace(LINE, line=2))
    ),  # other lines are other tensors
    row(LOCAL, "inconclusive", local(6, 4), steps()),  # another number of calls
    row(LOCAL, "not_applicable", steps(), steps()),  # no call
    row(LOCAL, "inconclusive", stopped(*NO_FILE, steps(), steps())),  # no call before an error
    row(ROOT_ONLY, "fail", *[blocks(1, 1)] * 2),  # blocks and one group
    row(ROOT_ONLY, "pass", *[blocks(1, 2)] * 2),  # blocks and two groups
    row(ROOT_ONLY, "fail", *[[*blocks(1, 1), second_model()]] * 2),  # each with one group
    row(ROOT_ONLY, "not_applicable", *[blocks(0, 1)] * 2),  # no blocks
    row(ROOT_ONLY, "inconclusive", *[blocks(1, 0)] * 2),  # blocks and no group
    row(ROOT_ONLY, "inconclusive", *[blocks(0, 0)] * 2),  # nothing
    row(EVEN, "not_applicable", steps()),  # one rank
    row(EVEN, "pass", steps(), steps()),  # two ranks
    row(UNREAD_OPTION, "fail", [UNREAD, *steps()], [SHARD, *steps()]),  # an unread option
    row(UNREAD_OPTION, "pass", [SHARD, *steps()], [SHARD, *steps()]),  # none
    *(
        row(rule, "inconclusive", UNWRAPPED, UNWRAPPED) for rule in (ROOT, ROOT_ONLY)
    ),  # no fully_shard at all
    *(
        row(rule, "not_applicable", *[[SHARD, *steps()]] * 2) for rule in ORDERED
    ),  # one sharded module has no order
    *(row(rule, "pass", *[[SHARD, SHARD, *steps()]] * 2) for rule in ORDERED),
    row("tensors-on-two-meshes", "not_applicable", *[meshes([2])] * 2),
    row("tensors-on-two-meshes", "pass", *[meshes([2, 1])] * 2),
)


def gathered(weights: int, *lines: dict[str, Any]) -> list[Records]:
    traffic = {"kind": "traffic", "step": 2, "weights": weights, "lines": list(lines)}
    return [[*steps(), micro(2), step(2), stepped(2), traffic]] * 2


COPIED = stopped(
    "AssertionError", "FSDP does not support deepcopy. For state dict", steps(), steps()
)
test_what_is_named = judged_as(
    *(
        row(TIED, status, *[ties(k)] * 2, names=("embed.weight", "head.weight"))
        for k, status in ((1, "pass"), (2, "fail"))
    ),
    row(
        TIED, "fail", stopped("ValueError", SHARED, [model()], [model()]), at=LINE
    ),  # the error of torch is enough
    row(DIVERGENT, "fail", steps(reduce("a")), steps(reduce("b")), names=("rank 0", "rank 1")),
    row(STALE_GROUP, "fail", [*steps(), STALE], steps(), at=LINE, names=("'root'",)),
    row(RANK_0, "not_covered", steps(), steps(), saving=LINE),
    row("model-gathered-every-step", "fail", *gathered(16 * 4)),  # the bytes of the whole model
    row("model-gathered-every-step", "pass", *gathered(16 * 4 - 1)),
    row(
        "deepcopy-of-fsdp-model",
        "fail",
        COPIED,
        sources=Sources({"train.py": "pass"}, ("train.py",)),
    ),
)


def test_what_a_digest_distinguishes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    assert shard_digest(weight) == shard_digest(weight.clone()) != shard_digest(weight + 1)
    alike = (
        torch.ones(16, 4),
        torch.arange(4.0).repeat(8, 1),
        torch.randn(4),
        torch.randn(1, 64),
        torch.ones(()),
    )
    assert [shard_digest(silent) for silent in alike] == [None] * len(alike)
    assert shard_digest(torch.randn(1000, 100)) is not None


UNSHARDED = [
    *(
        "custom-forward-bypass",
        "fsdp1-idiom",
        "inplace-op-on-output-view",
        "model-gathered-every-step",
    ),
    *("op-without-sharding-strategy", "parameter-replaced-after-shard", "params-added-after-shard"),
    *(
        "parent-before-child",
        "rank-divergent-param-use",
        "shard-option-unread",
        "sharded-twice",
        "shards-are-even",
    ),
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

    @cases(
        "rule, source",
        ("ddp-around-fsdp", "from torch.nn.parallel import DistributedDataParallel as DDP"),
        ("deepcopy-of-fsdp-model", "from copy import deepcopy as copied"),
        ("deepcopy-of-fsdp-model", "getattr(copy, 'deepcopy')"),
        ("inference-mode-before-training", "with torch.inference_mode():\n    pass"),
        ("mesh-refused", "fully_shard(model, mesh=world)"),
        ("shard-option-unread", "options = {'ignored_params': ()}"),
    )
    def test_what_the_sources_name(self, rule: str, source: str) -> None:
        assert self.named(rule, source).status != "not_applicable"
        assert self.named(rule, f'"""{source.splitlines()[0]}"""\npass').status == "not_applicable"
        assert self.named(rule, "no python").status != "not_applicable"

    @cases(
        "rule, source",
        ("ac-compile-order", "block = checkpoint_wrapper(block)"),
        ("cpu-offload-nccl-only", "policy = CPUOffloadPolicy()"),
        ("set-device-missing", "init_process_group('cpu:gloo,cuda:nccl')"),
    )
    def test_what_only_sources_show(self, rule: str, source: str) -> None:
        assert self.named(rule, source, followed="from the script on").status == "pass"
        assert self.named(rule, source).status == "not_covered"
        absent = self.named(rule, "pass")
        assert (absent.status, absent.tier) == ("not_applicable", "static")
        assert self.named(rule, "pass", hits={rule: (Hit(rule, "seen", LINE),)}).status == "fail"

    def test_no_comment_ignores_a_rule(self) -> None:
        comment = Suppression(LINE, ("root-only-wrap",), "one layer", range(1, 2))
        assert self.named("unused-suppression", "pass").status == "not_applicable"
        assert (
            self.named(
                "unused-suppression", "pass", suppressions=(comment,), followed="from the script on"
            ).status
            == "pass"
        )


@cases("line, status", (3, "pass"), (4, "fail"))
def test_a_gather_under_a_condition_may_be_that_of_the_best_weights(line: int, status: str) -> None:
    source = (
        "for step in range(9):\n    if value < best:\n        kept = whole(model)\n    other ="
        " whole(model)\n"
    )
    place = replace(LINE, line=line)
    sources = Sources({"train.py": source}, ("train.py",))
    ranks = gathered(64, {"at_line": place})
    assert judge("model-gathered-every-step", *ranks, sources=sources).status == status


@pytest.mark.parametrize("asks", [False, True])
def test_equal_shards_of_a_cpu_warn_where_the_script_would_take_a_gpu(asks: bool) -> None:
    shards = digests(w="a", v="b")
    asked = [{"kind": "asks_for_accelerators", "at_line": LINE}] if asks else []
    found = judge(EQUAL, [*asked, *shards], [*asked, *shards])
    assert (found.status, found.required) == ("fail", not asks)
