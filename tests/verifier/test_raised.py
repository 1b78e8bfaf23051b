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
BY_NAME = [*PART[:2], frame(40, "forward", module="M"), frame(90)]
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


def named(rule: str, where: int, *texts: str, frames: Any = None, records: Any = ()) -> list[tuple[Any, ...]]:
    """A case for each error that `rule` names: its line to change, error: message, frames and other records."""
    return [(rule, *text.split(": ", 1), frames or [frame(where)], [*records], where) for text in texts]


CASES = [
    *named("custom-forward-bypass", 90, f"RuntimeError: aten.embedding.default {MIXED}", frames=METHOD),
    *named("custom-forward-bypass", 90, f"RuntimeError: aten.addmm.default {MIXED}", frames=PART),
    *named("custom-forward-bypass", 90, f"RuntimeError: aten.embedding.default {MIXED}", frames=BY_NAME),
    *named("weight-used-outside-forward", 90, f"RuntimeError: aten.mm.default {MIXED}"),
    *named("weight-used-outside-forward", 40, f"RuntimeError: aten.mm.default {MIXED}", frames=IN_FORWARD),
    *named(
        "full-sd-into-dtensor",
        90,
        'RuntimeError: Error(s) in loading state_dict for FSDPM:\n\tWhile copying the parameter named "emb.weight", whose '
        "dimensions in the model are torch.Size([16, 8]) and whose dimensions in the checkpoint are torch.Size([16, 8]), an "
        f"exception occurred : ('aten.copy_.default {MIXED}',).",
        frames=[inner("nn/modules/module.py", "load_state_dict", module="M"), frame(90)],
    ),
    *named("full-sd-into-dtensor", 90, f"RuntimeError: aten.lerp_.Scalar {MIXED}", frames=STEP, records=[model()]),
    *named(
        "ddp-around-fsdp",
        90,
        "NotImplementedError: Operator c10d.broadcast_.default does not have a sharding strategy registered.",
        frames=[inner("nn/parallel/distributed.py", "__init__"), frame(90)],
    ),
    *named(
        "ddp-around-fsdp",
        90,
        f"RuntimeError: aten.cat.default {MIXED}",
        frames=[inner("nn/parallel/distributed.py", "f"), frame(90)],
    ),
    *named(
        "parent-before-child",
        58,
        "TypeError: Invariant encountered: value was None when it should not be",
        "RuntimeError: Cannot concatenate overlapping meshes: [DeviceMesh((dp=2), 'cpu', stride=(1,)), DeviceMesh((dp=2), 'cpu', "
        "stride=(1,))]",
        frames=[frame(60)],
        records=[shard(58), shard(60)],
    ),
    *named(
        "sharded-twice",
        60,
        "AssertionError: Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
        "been applied to the following module:\nFSDPM()",
    ),
    *named(
        "submodule-forward-before-root",
        70,
        "RuntimeError: FSDP state has already been lazily initialized for blocks.0\nFSDP requires running forward through the "
        "root module first",
        frames=[frame(90)],
        records=[{**model(), "at_line": line(70)}],
    ),
    *named(
        "unsupported-module-or-param",
        60,
        "ValueError: fully_shard does not support containers that do not implement forward: ModuleList(\n)",
        "ValueError: fully_shard doesn't support scalar parameters. Change t to a 1D tensor with numel equal to 1.",
        "NotImplementedError: FSDP does not support uneven sharding on dim 1: torch.Size([7, 7]) (world size: 2)",
        "NotImplementedError: FSDP does not support non-contiguous parameters yet: param.shape=torch.Size([8, 8]) "
        "param.stride()=(1, 8)",
    ),
    *named(
        "deepcopy-of-fsdp-model",
        60,
        "AssertionError: FSDP does not support deepcopy. Please use state dict for serialization.",
    ),
    *named(
        "pickled-fsdp-model",
        60,
        "PicklingError: Can't pickle <class 'torch.distributed.fsdp._fully_shard._fsdp_init.FSDPM'>: attribute lookup FSDPM on "
        "torch.distributed.fsdp._fully_shard._fsdp_init failed",
    ),
    *named(
        "meta-not-materialized",
        60,
        "RuntimeError: FSDP parameters should be materialized from meta device before training, but the following were still on "
        "meta device: ['emb.weight']\nFor example, call module.to_empty(device) to materialize to device and call "
        "module.reset_parameters()",
        frames=[frame(90)],
        records=[shard(60)],
    ),
    *named(
        "meta-not-materialized",
        65,
        "NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of "
        "torch.nn.Module.to() when moving module from meta to a different device.",
        records=[shard(60)],
    ),
    *named(
        "parameter-replaced-after-shard",
        90,
        "AttributeError: 'Parameter' object has no attribute '_local_tensor'",
        records=[shard(60)],
    ),
    *named(
        "inference-mode-before-training",
        70,
        "RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a "
        "normal tensor",
        frames=[frame(90)],
        records=[shard(60), {**model(), "at_line": line(70)}],
    ),
    *named(
        "mixed-orig-dtype-in-group",
        60,
        "AssertionError: FSDP expects uniform original parameter dtype but got {torch.bfloat16, torch.float32}",
        frames=[frame(90)],
        records=[shard(60, parameters=[{"dtype": "torch.float32"}, {"dtype": "torch.bfloat16"}])],
    ),
    *named(
        "output-dtype-on-inner-blocks",
        60,
        "RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float",
        frames=IN_FORWARD,
        records=[shard(60, **FLOAT), shard(61, **FLOAT)],
    ),
    *named(
        "buffers-and-odd-inputs-not-cast",
        40,
        "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "RuntimeError: expected scalar type Float but found BFloat16",
        "RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float",
        "RuntimeError: Expected query, key, and value to have the same dtype, but got query.dtype: c10::BFloat16 key.dtype: "
        "c10::BFloat16 and value.dtype: float instead.",
        "RuntimeError: Index put requires the source and destination dtypes match, got BFloat16 for the destination and Float "
        "for the source.",
        "RuntimeError: index_add_(): self (BFloat16) and source (Float) must have the same scalar type",
        frames=IN_FORWARD,
        records=[shard(60, **LOW), shard(61, **FLOAT)],
    ),
    *named(
        "lowbit-or-unsupported-optimizer",
        70,
        f"RuntimeError: aten.add_.Tensor {MIXED}",
        frames=STEP_OF_A_LIBRARY,
        records=[model(), {"kind": "optimizer", "at_line": line(70)}],
    ),
    *named(
        "lowbit-or-unsupported-optimizer",
        70,
        "RuntimeError: aten.pow_.Scalar: in-place operations that require placement changes are not supported. The input has "
        "placement (_NormPartial(2),), but no valid strategy preserves this placement.\n\nSharding propagation failed for "
        "aten.pow_.Scalar",
        frames=STEP,
        records=[{"kind": "optimizer", "at_line": line(70)}],
    ),
    *named(
        "op-without-sharding-strategy",
        90,
        "RuntimeError: aten.nonzero.default\n\nSharding propagation failed for aten.index.Tensor(Spec(f32[16, 8](S(0))))",
        "RuntimeError: .numpy() is not supported for tensor subclasses.",
    ),
    *named(
        "clip-mixed-mesh",
        90,
        "RuntimeError: All operands in aten.stack.default must have the same mesh, but got DeviceMesh((dp=2, tp=2), 'cpu', "
        "stride=(2, 1)) and DeviceMesh((dp=2), 'cpu', stride=(2,)).\n\nSharding propagation failed for aten.stack.default",
        frames=[inner("nn/utils/clip_grad.py", "get_total_norm"), frame(90)],
    ),
    *named(
        "tensors-on-two-meshes",
        90,
        "RuntimeError: Cannot run aten.lerp_.Scalar on inputs with different meshes: got DeviceMesh((2,), 'cpu', stride=(1,)) "
        "and DeviceMesh((dp=2), 'cpu', stride=(1,))\n\nSharding propagation failed for aten.lerp_.Scalar",
    ),
    *named(
        "mesh-refused",
        60,
        "AssertionError: Please init the 2D mesh for HSDP with mesh_dim_names specified",
        "ValueError: fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh((a=2, b=1, c=1), 'cpu', stride=(1, (), ()))",
        "RuntimeError: Mesh should not be bigger than default world size 2, but found 8 ranks!",
    ),
    *named(
        "op-without-sharding-strategy",
        90,
        "AssertionError: ",
        frames=[inner("distributed/tensor/_ops/utils.py", "f"), frame(90)],
    ),
    *named(
        "gloo-premul-sum",
        70,
        "RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo",
        frames=[frame(90)],
        records=[{"kind": "divide", "factor": 1.0, "at_line": line(70)}],
    ),
    *named("no-sync-idiom", 90, "AttributeError: 'FSDPM' object has no attribute 'no_sync'"),
    *named(
        "fsdp1-idiom",
        90,
        "AttributeError: 'FSDPM' object has no attribute 'clip_grad_norm_'",
        "AttributeError: 'FSDPM' object has no attribute 'module'",
    ),
    *named("fsdp1-idiom", 60, "TypeError: fully_shard() got an unexpected keyword argument 'sharding_strategy'"),
    *named(
        "missing-optim-state-for-unused-param",
        90,
        "CheckpointException: CheckpointException ranks:dict_keys([0, 1])\nTraceback (most recent call last): (RANK 0)\n  File "
        "...\nRuntimeError: Missing key in checkpoint state_dict: optim.state.unused.weight.step.\n",
        "RuntimeError: Missing optimizer state for parameter 'unused.weight' in checkpoint. The parameter requires gradients but "
        "has no saved optimizer state. To load anyway, use StateDictOptions(strict=False).",
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
