"""A mixture of experts in the decoder: what it computes, how it balances its load, on any number of
ranks.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scaffold_launch import assert_close, run
from torch.nn import functional

from model_project import built, imported, write
from records import cases
from trees import DECODER, SMALL, Generate, write_project
from verified_fsdp2.skill.spec import SpecError, load

EXPERTS = "model.experts={number: 5, top_k: 2, first_dense: 1}"
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
SPEC = {**SMALL, "train": {"steps": 20, "global_batch": 8}, "verify": {"reshard_to": [4]}}


def layer(module: Any, top_k: int = 2, width: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    made = module.MixtureOfExperts(width, 16, 5, top_k)
    random = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random).to(dtype) * 0.3
    made.bias.copy_(torch.tensor([0.0, 0.3, 0.0, -9.0, 0.0]))  # no token gets the fourth
    return made


def naive(made: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
    """One token after the other."""
    gate, up, down = (weight.chunk(5) for weight in made.stacked.parameters())
    rows = []
    for token in x.flatten(0, 1):
        scores = torch.sigmoid(made.router @ token)
        chosen = (scores + made.bias).topk(made.top_k).indices.tolist()
        total = sum(scores[one] for one in chosen) if made.top_k > 1 else 1.0
        parts = [
            down[one] @ (functional.silu(gate[one] @ token) * (up[one] @ token)) for one in chosen
        ]
        rows.append(
            scale * sum(scores[one] / total * part for one, part in zip(chosen, parts, strict=True))
        )
    return torch.stack(rows).view_as(x)


@cases("top_k, scale", (1, 1.0), (2, 2.5), (5, 1.0))
def test_each_token_goes_through_its_experts(generate: Generate, top_k: int, scale: float) -> None:
    experts = f"model.experts={{number: 5, top_k: {top_k}, scale: {scale}}}"
    made = layer(generate(SPEC, "experts", experts), top_k)
    x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(2))
    found, counts = made(x)
    wanted = naive(made, x, scale)
    torch.testing.assert_close(found, wanted)
    assert counts.sum() == 21 * top_k and (counts[3] == 0) == (top_k < 5)
    for one, other in zip(
        *(torch.autograd.grad(y.square().sum(), made.parameters()) for y in (found, wanted)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_grouped_product_is_that_of_each_expert(generate: Generate) -> None:
    module = generate(SPEC, "experts", EXPERTS, "precision.param_dtype=bfloat16")
    weights = [
        weight.detach() for weight in layer(module, dtype=torch.bfloat16).stacked.parameters()
    ]
    stacked = [weight.unflatten(0, (5, -1)).requires_grad_() for weight in weights]
    x, counts = torch.randn(20, 8).bfloat16(), torch.tensor([4, 0, 9, 7, 0])
    results = [compute(x, counts, *stacked) for compute in (module.all_at_once, module.one_by_one)]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(result.square().sum(), stacked) for result in results]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
        assert (
            not one[1].any() and one[0].any()
        )  # an expert without tokens has a gradient all the same


@pytest.mark.usefixtures("alone")
def test_the_bias_evens_out_the_load(generate: Generate) -> None:
    module = generate(SPEC, "experts", "model.experts={number: 5, balance_rate: 0.01}")
    made = layer(module)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3)) + 0.7
    before = made(x)[1]
    module.balance_experts(made, before[None].clone())
    direction = torch.tensor([1.0 if 5 * number < 128 else -1.0 for number in before])
    torch.testing.assert_close(
        made.bias, torch.tensor([0.0, 0.3, 0.0, -9.0, 0.0]) + 0.01 * direction
    )
    made.bias.zero_()
    for _ in range(300):
        module.balance_experts(made, made(x)[1][None])
    after = made(x)[1]
    assert before.max() > 40 and after.max() - after.min() < 12 and after.sum() == 128


@pytest.mark.usefixtures("alone")
def test_size_initial_values_and_counts_of_the_model(tmp_path: Path) -> None:
    with imported(write(tmp_path, {**DECODER, "layers": 3}, EXPERTS)) as modules:
        model = built(modules)
        assert (
            sum(p.numel() for p in model.parameters())
            == load(tmp_path / "spec.yaml", [EXPERTS]).parameters
        )
        model(TOKENS)
        again = model.routed
        assert again.shape == (2, 5) and again.sum(1).tolist() == [128, 128]
        for block in model.blocks[1:]:
            assert not block.experts.bias.any()
            assert block.experts.stacked.gate.full_tensor().std().item() == pytest.approx(
                32**-0.5, rel=0.05
            )
            assert block.experts.stacked.down.full_tensor().std().item() == pytest.approx(
                (32 * 6) ** -0.5, rel=0.05
            )
        assert [name for name in model.state_dict() if "bias" in name] == [
            "blocks.1.experts.bias",
            "blocks.2.experts.bias",
        ]


@pytest.mark.usefixtures("alone")
def test_adapters_leave_the_experts_and_their_balance_alone(tmp_path: Path) -> None:
    lora = "finetune={kind: lora, rank: 2, targets: [query, gate]}"
    with imported(write(tmp_path / "plain", {**DECODER, "layers": 3}, EXPERTS)) as modules:
        wanted = built(modules)(TOKENS)
    with imported(
        project := write(tmp_path / "lora", {**DECODER, "layers": 3}, EXPERTS, lora)
    ) as modules:
        model = built(modules)
        found = model(TOKENS)
        assert torch.equal(found, wanted)
        functional.cross_entropy(found.flatten(0, 1), TOKENS.flatten()).backward()
    trained = {
        name.partition(".lora_")[0]
        for name, one in model.named_parameters()
        if one.grad is not None
    }
    layers = [f"blocks.{number}.attention.query" for number in range(3)]
    assert trained == {
        *layers,
        "blocks.0.feed_forward.gate",
        *(f"blocks.{n}.shared_experts.gate" for n in (1, 2)),
    }
    assert "balance" not in "".join(
        (project / name).read_text() for name in ("train.py", "model.py", "experts.py")
    )


@pytest.mark.usefixtures("alone")
def test_float8_leaves_the_routed_experts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchao computes as in float8 on the CPU."""
    float8 = pytest.importorskip("torchao.float8")
    emulated = partial(
        float8.convert_to_float8_training, config=float8.Float8LinearConfig(emulate=True)
    )
    monkeypatch.setattr(float8, "convert_to_float8_training", emulated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    fp8 = "precision={fp8: true, param_dtype: bfloat16}"
    with imported(write(tmp_path, DECODER, EXPERTS, fp8)) as modules:
        model = built(modules)
        model(TOKENS).float().square().mean().backward()
    kinds = {name: type(module).__name__ for name, module in model.blocks[1].named_modules()}
    layers = ("query", "key", "value", "output", "gate", "up", "down")
    assert {name.rpartition(".")[2] for name, kind in kinds.items() if "Float8Linear" in kind} == {
        *layers
    }
    assert kinds["experts.stacked"].endswith("Experts")
    for parameter in model.parameters():
        assert parameter.grad.full_tensor().isfinite().all()


@pytest.mark.launch
def test_one_trajectory_on_other_ranks_with_recomputation_and_after_a_resume(
    tmp_path: Path,
) -> None:
    """A bias that moves fast: tokens that are counted twice, or on one rank alone, would change the
    losses.
    """
    experts = "model.experts={number: 5, balance_rate: 0.1}"
    found = []
    for number, more in enumerate(
        ([], ["memory.activation_checkpointing=full", "train.micro_batch=2"])
    ):
        (tmp_path / str(number)).mkdir()
        project = write_project(tmp_path / str(number), SPEC, experts, *more)
        found.append(run(project, 1 + number, tmp_path / f"out-{number}", 4))
    assert_close(*found, 5e-5)
    run(project, 2, tmp_path / "two", 2)
    assert_close(run(project, 1, tmp_path / "two", 4, "--resume"), found[0], 5e-5)


@cases(
    "settings, key",
    (["model.experts={number: 4, top_k: 5}"], "model.experts.top_k"),
    (["model.experts={number: 4, first_dense: 2}"], "model.experts.first_dense"),
    (["model.experts={number: 4, ffn: 36}", "precision.param_dtype=bfloat16"], "model.experts.ffn"),
    (["model.experts={number: 1}"], "model.experts.number"),
    (["model.experts={}"], "model.experts.number"),
    (
        ["model.experts={number: 4, ffn: 24}", "precision={fp8: true, param_dtype: bfloat16}"],
        "precision.fp8",
    ),
    ([EXPERTS, "finetune={kind: lora, targets: [experts.gate]}"], "finetune.targets[0]"),
    ([EXPERTS, "model.window=8", "checkpoint.export=huggingface"], "checkpoint.export"),
    (
        ["model.experts={number: 4, shared: 0}", "checkpoint.export=huggingface"],
        "checkpoint.export",
    ),
    (["model.experts={number: 4, ffn: 32}", "model.ffn=64"], "model.ffn"),
    ([EXPERTS, "finetune={kind: freeze, train: ['0.experts']}"], "finetune.train[0]"),
)
def test_what_is_refused(tmp_path: Path, settings: list[str], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        write(tmp_path, DECODER, *settings)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert not (tmp_path / "project").exists()


def test_a_preset_with_experts_needs_its_memory(tmp_path: Path) -> None:
    launch = "launch={engines: [torchrun], nodes: 1, devices_per_node: 8, device_memory: 80}"
    small = "verify.model={layers: 2, width: 64, vocabulary: 64, sequence_length: 16}"
    model = {"kind": "decoder", "preset": "8b"}
    with pytest.raises(SpecError) as caught:
        write(tmp_path, model, launch, small, "model.experts={number: 64, ffn: 2048}")
    (problem,) = caught.value.problems
    assert problem.key == "launch.nodes" and "54,746,419,200" in problem.message
    project = write(
        tmp_path,
        model,
        launch,
        small,
        "model.experts={number: 8, top_k: 1, ffn: 1024, first_dense: 31}",
    )
    text = (project / "model.py").read_text()
    assert "expert_ffn=96,\n    dense_layers=1,\n" in text and "dense_layers: int = 31" in text
