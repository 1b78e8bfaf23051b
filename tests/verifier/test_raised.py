"""Rules that name an error of torch: each on the text that torch 2.13.0 really gave, and none on a neighbour's text."""

from __future__ import annotations

from typing import Any

import pytest

from records import model, parameter, step, stepped, trace
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import RaisedRule
from verified_fsdp2.verifier.trace import Ended, Run

NAMES = [name for name, rule in RULES.items() if isinstance(rule, RaisedRule)]
MIXED = "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!"
TORCH = "/lib/python3.11/site-packages/torch"


def line(number: int, function: str = "main") -> dict[str, Any]:
    return {"file": "train.py", "line": number, "function": function, "code": f"line {number}"}


def frame(number: int, function: str = "main", **of: Any) -> dict[str, Any]:
    return {"file": "train.py", "line": number, "function": function, "own": True, **_whole(of)}


def inner(file: str, function: str, **of: Any) -> dict[str, Any]:
    return {"file": f"{TORCH}/{file}", "line": 1, "function": function, "own": False, **_whole(of)}


def _whole(of: dict[str, Any]) -> dict[str, Any]:
    base = {"number": 0, "fsdp": True, "shards": 0, "shards_below": 9, "tensors": {}, "buffers": {}}
    return {**base, **of} if "module" in of else of


def shard(number: int, **more: Any) -> dict[str, Any]:
    base = {"kind": "shard", "modules": ["M"], "param_dtype": None, "output_dtype": None, "parameters": []}
    return {**base, "at_line": line(number), **more}


LOW = {"param_dtype": "bfloat16"}
FLOAT = {"param_dtype": "bfloat16", "output_dtype": "float32"}
METHOD = [frame(40, "encode", module="M"), frame(90)]
PART = [
    inner("nn/modules/linear.py", "forward", module="Linear", number=1, fsdp=False, shards=2),
    inner("nn/modules/module.py", "_call_impl", module="Linear", number=1, fsdp=False, shards=2),
    frame(90),
]
BY_NAME = [
    *PART[:2],
    frame(40, "forward", module="M"),
    frame(90),
]
PENALTY = [
    frame(90),
]
IN_FORWARD = [
    frame(40, "forward", module="M", tensors={"x": "bfloat16"}, buffers={"mix": "float32"}),
    inner("nn/modules/module.py", "_call_impl", module="M"),
    frame(90),
]
STEP = [inner("optim/adamw.py", "step", optimizer="AdamW"), frame(90)]
STEP_OF_A_LIBRARY = [
    {**inner("optimization.py", "step", optimizer="Adafactor"), "file": "/lib/transformers/optimization.py"},
    inner("optim/optimizer.py", "wrapper", optimizer="Adafactor"),
    frame(90),
]
PLAIN = [model(parameter("a"), parameter("head", managed=False, sharded=False))]

# rule, error, message, frames, other records, the line to be changed
CASES: list[tuple[str, str, str, list[dict[str, Any]], list[dict[str, Any]], int]] = [
    ("custom-forward-bypass", "RuntimeError", f"aten.embedding.default {MIXED}", METHOD, [], 90),
    ("custom-forward-bypass", "RuntimeError", f"aten.addmm.default {MIXED}", PART, [], 90),
    ("custom-forward-bypass", "RuntimeError", f"aten.embedding.default {MIXED}", BY_NAME, [], 90),
    ("weight-used-outside-forward", "RuntimeError", f"aten.mm.default {MIXED}", PENALTY, [], 90),
    ("weight-used-outside-forward", "RuntimeError", f"aten.mm.default {MIXED}", IN_FORWARD, [], 40),
    (
        "full-sd-into-dtensor",
        "RuntimeError",
        'Error(s) in loading state_dict for FSDPM:\n\tWhile copying the parameter named "emb.weight", whose dimensions in the '
        "model are torch.Size([16, 8]) and whose dimensions in the checkpoint are torch.Size([16, 8]), an exception occurred : "
        f"('aten.copy_.default {MIXED}',).",
        [inner("nn/modules/module.py", "load_state_dict", module="M"), frame(90)],
        [],
        90,
    ),
    ("full-sd-into-dtensor", "RuntimeError", f"aten.lerp_.Scalar {MIXED}", STEP, [model()], 90),
    (
        "ddp-around-fsdp",
        "NotImplementedError",
        "Operator c10d.broadcast_.default does not have a sharding strategy registered.",
        [inner("nn/parallel/distributed.py", "__init__"), frame(90)],
        [],
        90,
    ),
    (
        "ddp-around-fsdp",
        "RuntimeError",
        f"aten.cat.default {MIXED}",
        [inner("nn/parallel/distributed.py", "f"), frame(90)],
        [],
        90,
    ),
    (
        "parent-before-child",
        "TypeError",
        "Invariant encountered: value was None when it should not be",
        [frame(60)],
        [shard(58), shard(60)],
        58,
    ),
    (
        "parent-before-child",
        "RuntimeError",
        "Cannot concatenate overlapping meshes: [DeviceMesh((dp=2), 'cpu', stride=(1,)), DeviceMesh((dp=2), 'cpu', stride=(1,))]",
        [frame(60)],
        [shard(58), shard(60)],
        58,
    ),
    (
        "sharded-twice",
        "AssertionError",
        "Each distinct composable distributed API can only be applied to a module once. fully_shard has already been applied to "
        "the following module:\nFSDPM()",
        [frame(60)],
        [],
        60,
    ),
    (
        "submodule-forward-before-root",
        "RuntimeError",
        "FSDP state has already been lazily initialized for blocks.0\nFSDP requires running forward through the root module first",
        [frame(90)],
        [{**model(), "at_line": line(70)}],
        70,
    ),
    (
        "unsupported-module-or-param",
        "ValueError",
        "fully_shard does not support containers that do not implement forward: ModuleList(\n)",
        [frame(60)],
        [],
        60,
    ),
    (
        "unsupported-module-or-param",
        "ValueError",
        "fully_shard doesn't support scalar parameters. Change t to a 1D tensor with numel equal to 1.",
        [frame(60)],
        [],
        60,
    ),
    (
        "unsupported-module-or-param",
        "NotImplementedError",
        "FSDP does not support uneven sharding on dim 1: torch.Size([7, 7]) (world size: 2)",
        [frame(60)],
        [],
        60,
    ),
    (
        "unsupported-module-or-param",
        "NotImplementedError",
        "FSDP does not support non-contiguous parameters yet: param.shape=torch.Size([8, 8]) param.stride()=(1, 8)",
        [frame(60)],
        [],
        60,
    ),
    (
        "deepcopy-of-fsdp-model",
        "AssertionError",
        "FSDP does not support deepcopy. Please use state dict for serialization.",
        [frame(60)],
        [],
        60,
    ),
    (
        "pickled-fsdp-model",
        "PicklingError",
        "Can't pickle <class 'torch.distributed.fsdp._fully_shard._fsdp_init.FSDPM'>: attribute lookup FSDPM on "
        "torch.distributed.fsdp._fully_shard._fsdp_init failed",
        [frame(60)],
        [],
        60,
    ),
    (
        "meta-not-materialized",
        "RuntimeError",
        "FSDP parameters should be materialized from meta device before training, but the following were still on meta device: "
        "['emb.weight']\nFor example, call module.to_empty(device) to materialize to device and call module.reset_parameters()",
        [frame(90)],
        [shard(60)],
        60,
    ),
    (
        "meta-not-materialized",
        "NotImplementedError",
        "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of torch.nn.Module.to() when "
        "moving module from meta to a different device.",
        [frame(65)],
        [shard(60)],
        65,
    ),
    (
        "parameter-replaced-after-shard",
        "AttributeError",
        "'Parameter' object has no attribute '_local_tensor'",
        [frame(90)],
        [shard(60)],
        90,
    ),
    (
        "inference-mode-before-training",
        "RuntimeError",
        "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a normal tensor",
        [frame(90)],
        [shard(60), {**model(), "at_line": line(70)}],
        70,
    ),
    (
        "mixed-orig-dtype-in-group",
        "AssertionError",
        "FSDP expects uniform original parameter dtype but got {torch.bfloat16, torch.float32}",
        [frame(90)],
        [shard(60, parameters=[{"dtype": "torch.float32"}, {"dtype": "torch.bfloat16"}])],
        60,
    ),
    (
        "output-dtype-on-inner-blocks",
        "RuntimeError",
        "mixed dtype (CPU): expect parameter to have scalar type of Float",
        IN_FORWARD,
        [shard(60, **FLOAT), shard(61, **FLOAT)],
        60,
    ),
    *(
        (
            "buffers-and-odd-inputs-not-cast",
            "RuntimeError",
            text,
            IN_FORWARD,
            [shard(60, **LOW), shard(61, **FLOAT)],
            40,
        )
        for text in (
            "expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float",
            "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
            "expected scalar type Float but found BFloat16",
            "mixed dtype (CPU): expect parameter to have scalar type of Float",
            "Expected query, key, and value to have the same dtype, but got query.dtype: c10::BFloat16 key.dtype: "
            "c10::BFloat16 and value.dtype: float instead.",
            "Index put requires the source and destination dtypes match, got BFloat16 for the destination and Float for the source.",
            "index_add_(): self (BFloat16) and source (Float) must have the same scalar type",
        )
    ),
    (
        "lowbit-or-unsupported-optimizer",
        "RuntimeError",
        f"aten.add_.Tensor {MIXED}",
        STEP_OF_A_LIBRARY,
        [model(), {"kind": "optimizer", "at_line": line(70)}],
        70,
    ),
    (
        "lowbit-or-unsupported-optimizer",
        "RuntimeError",
        "aten.pow_.Scalar: in-place operations that require placement changes are not supported. The input has placement "
        "(_NormPartial(2),), but no valid strategy preserves this placement.\n\nSharding propagation failed for aten.pow_.Scalar",
        STEP,
        [{"kind": "optimizer", "at_line": line(70)}],
        70,
    ),
    (
        "op-without-sharding-strategy",
        "RuntimeError",
        "aten.nonzero.default\n\nSharding propagation failed for aten.index.Tensor(Spec(f32[16, 8](S(0))))",
        [frame(90)],
        [],
        90,
    ),
    (
        "clip-mixed-mesh",
        "RuntimeError",
        "All operands in aten.stack.default must have the same mesh, but got DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)) and "
        "DeviceMesh((dp=2), 'cpu', stride=(2,)).\n\nSharding propagation failed for aten.stack.default",
        [inner("nn/utils/clip_grad.py", "get_total_norm"), frame(90)],
        [],
        90,
    ),
    (
        "tensors-on-two-meshes",
        "RuntimeError",
        "Cannot run aten.lerp_.Scalar on inputs with different meshes: got DeviceMesh((2,), 'cpu', stride=(1,)) and "
        "DeviceMesh((dp=2), 'cpu', stride=(1,))\n\nSharding propagation failed for aten.lerp_.Scalar",
        [frame(90)],
        [],
        90,
    ),
    (
        "mesh-refused",
        "AssertionError",
        "Please init the 2D mesh for HSDP with mesh_dim_names specified",
        [frame(60)],
        [],
        60,
    ),
    (
        "mesh-refused",
        "ValueError",
        "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh((a=2, b=1, c=1), 'cpu', stride=(1, (), ()))",
        [frame(60)],
        [],
        60,
    ),
    (
        "mesh-refused",
        "RuntimeError",
        "Mesh should not be bigger than default world size 2, but found 8 ranks!",
        [frame(60)],
        [],
        60,
    ),
    (
        "op-without-sharding-strategy",
        "RuntimeError",
        ".numpy() is not supported for tensor subclasses.",
        [frame(90)],
        [],
        90,
    ),
    (
        "op-without-sharding-strategy",
        "AssertionError",
        "",
        [inner("distributed/tensor/_ops/utils.py", "f"), frame(90)],
        [],
        90,
    ),
    (
        "gloo-premul-sum",
        "RuntimeError",
        "Cannot use ReduceOp.PREMUL_SUM with Gloo",
        [frame(90)],
        [{"kind": "divide", "factor": 1.0, "at_line": line(70)}],
        70,
    ),
    ("no-sync-idiom", "AttributeError", "'FSDPM' object has no attribute 'no_sync'", [frame(90)], [], 90),
    ("fsdp1-idiom", "AttributeError", "'FSDPM' object has no attribute 'clip_grad_norm_'", [frame(90)], [], 90),
    ("fsdp1-idiom", "AttributeError", "'FSDPM' object has no attribute 'module'", [frame(90)], [], 90),
    (
        "fsdp1-idiom",
        "TypeError",
        "fully_shard() got an unexpected keyword argument 'sharding_strategy'",
        [frame(60)],
        [],
        60,
    ),
    (
        "missing-optim-state-for-unused-param",
        "CheckpointException",
        "CheckpointException ranks:dict_keys([0, 1])\nTraceback (most recent call last): (RANK 0)\n  File ...\n"
        "RuntimeError: Missing key in checkpoint state_dict: optim.state.unused.weight.step.\n",
        [frame(90)],
        [],
        90,
    ),
    (
        "missing-optim-state-for-unused-param",
        "RuntimeError",
        "Missing optimizer state for parameter 'unused.weight' in checkpoint. The parameter requires gradients but has no saved "
        "optimizer state. To load anyway, use StateDictOptions(strict=False).",
        [frame(90)],
        [],
        90,
    ),
]

# errors of user code that no rule here may name
OTHERS = [
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (8x16 and 8x16)", IN_FORWARD, [shard(60, **LOW)]),
    (
        "RuntimeError",
        "expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float",
        IN_FORWARD,
        [shard(60)],
    ),
    ("RuntimeError", f"aten._foreach_norm.Scalar {MIXED}", [inner("nn/utils/clip_grad.py", "f"), frame(90)], PLAIN),
    ("RuntimeError", f"aten._foreach_mul_.Scalar {MIXED}", STEP, PLAIN),
    ("AttributeError", "'M' object has no attribute 'module'", [frame(90)], []),
    ("AttributeError", "'FSDPM' object has no attribute 'lm_haed'", [frame(90)], []),
    ("TypeError", "Invariant encountered: value was None when it should not be", [frame(90)], [shard(60)]),
    (
        "CheckpointException",
        "CheckpointException ranks:dict_keys([0])\nRuntimeError: Missing key in checkpoint state_dict: model.unused.weight.",
        [frame(90)],
        [],
    ),
    ("KeyError", "0", [frame(90)], []),
    ("AssertionError", "", [frame(90)], []),
    ("TypeError", "float() argument must be a string or a real number, not 'dict'", [frame(90)], []),
]


def stopped(error: str, message: str, frames: list[dict[str, Any]], records: list[dict[str, Any]]) -> Run:
    own = [line(f["line"], f["function"]) for f in frames if f["own"]]
    raised = {"kind": "raised", "error": error, "frames": frames}
    end = {"kind": "end", "how": "exception", "error": error, "message": message, "frames": own}
    full = [{"seq": k, "at": float(k), "at_line": None, **r} for k, r in enumerate([*records, raised, end])]
    return Run("train", 1, (trace(0, tuple(full)),), (Ended(0, 1, False),))


@pytest.mark.parametrize(("rule", "error", "message", "frames", "records", "where"), CASES)
def test_one_rule_names_it(
    rule: str, error: str, message: str, frames: list[Any], records: list[Any], where: int
) -> None:
    evidence = Evidence(train=stopped(error, message, frames, records))
    found = {name: judge_one(RULES[name], evidence) for name in NAMES}
    assert [name for name, f in found.items() if f.status == "fail"] == [rule]
    assert error in found[rule].evidence
    assert found[rule].fix
    assert found[rule].location is not None
    assert found[rule].location.line == where
    assert {f.status for name, f in found.items() if name != rule} == {"inconclusive"}


@pytest.mark.parametrize(("error", "message", "frames", "records"), OTHERS)
def test_no_rule_names_what_is_none_of_theirs(error: str, message: str, frames: list[Any], records: list[Any]) -> None:
    evidence = Evidence(train=stopped(error, message, frames, records))
    assert [name for name in NAMES if judge_one(RULES[name], evidence).status == "fail"] == []


def test_plain_weights_in_an_optimizer_are_the_root_rules() -> None:
    for error, message, frames, records in OTHERS[2:4]:
        run = stopped(error, message, frames, [shard(60), *records])
        rule = RULES["root-not-wrapped"]
        two = Run("train", 2, (run.traces[0], trace(1, run.traces[0].records)), run.ended)
        assert rule.judge(Evidence(train=two)).status == "fail"


def test_the_dtypes_at_the_line_are_named() -> None:
    case = next(c for c in CASES if c[0] == "buffers-and-odd-inputs-not-cast")
    found = RULES[case[0]].judge(Evidence(train=stopped(*case[1:5])))
    assert all(part in found.evidence for part in ("x is bfloat16", "self.mix is float32"))


def test_a_parameter_without_gradients_is_named_before_any_resume() -> None:
    grads = {"w": [1.0, 0.5, 0.0, 0.0, 0.0], "unused": None}
    save = {"kind": "checkpoint", "op": "save", "after_step": 1}
    end = {"kind": "end", "how": "stopped"}
    records = [model(parameter(), parameter("unused")), step(grads=grads), stepped(), save, end]
    full = [{"seq": k, "at": float(k), "at_line": None, **r} for k, r in enumerate(records)]
    run = Run("train", 1, (trace(0, tuple(full)),), (Ended(0, 0, False),))
    found = judge_one(RULES["missing-optim-state-for-unused-param"], Evidence(train=run))
    assert (found.status, "unused" in found.evidence) == ("inconclusive", True)


def test_every_named_error_is_in_the_table() -> None:
    assert {case[0] for case in CASES} == {name for name in NAMES if isinstance(RULES[name], RaisedRule)}


def test_too_few_ranks_name_the_option() -> None:
    message = "Mesh should not be bigger than default world size 2, but found 8 ranks!"
    found = judge_one(RULES["mesh-refused"], Evidence(train=stopped("RuntimeError", message, [frame(60)], [])))
    assert "--nproc 8" in (found.fix or "")
