"""The decoder with weights of Hugging Face transformers: read into it shard by shard, trained on,
and written out again.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_scaffold_launch import assert_close, run

from model_project import built, imported, values, write
from records import Capsys, cases
from trees import code_of
from verified_fsdp2.skill.spec import SpecError

TOKENS = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 32, "initializer_range": 0.3}
LLAMA = {**SHAPE, "model_type": "llama", "rms_norm_eps": 1e-5}
QWEN3 = {**SHAPE, "model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama, grouped, tied": {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {**QWEN3, "rms_norm_eps": 1e-6},
    "qwen3, near": {**QWEN3, "use_sliding_window": True, "sliding_window": 5}
    | {"max_window_layers": 0},
    "qwen3, far": {**QWEN3, "use_sliding_window": True, "sliding_window": 5},
    "qwen3, near and far": {**QWEN3, "use_sliding_window": True, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {**SHAPE, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
}
LORA = "finetune={kind: lora, rank: 2, targets: [query]}"
pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore"),  # those of transformers
]


def of_transformers(folder: Path, config: Mapping[str, Any], dtype: str = "float32") -> Any:
    """A model with random weights, scales of norms included, which is saved in several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def project(folder: Path, weights: Path, *settings: str) -> Path:
    model = {"kind": "decoder", "config": str(weights), "sequence_length": 16}
    return write(folder, model, f"train.init_from={weights}", *settings)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    dtype = "bfloat16" if name == "qwen3" else "float32"
    wanted = of_transformers(tmp_path / "weights", CONFIGS[name], dtype)
    assert len([*(tmp_path / "weights").glob("*.safetensors")]) > 2
    if name == "llama, grouped, tied":  # some files have the head as well
        save_file({"lm_head.weight": torch.ones(64, 32)}, tmp_path / "weights" / "head.safetensors")
    with imported(project(tmp_path / "project", tmp_path / "weights")) as modules:
        model = built(modules)
        modules["starting"].start_from(str(tmp_path / "weights"), None, model)
        with torch.no_grad():
            found = model(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(found, wanted(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.launch
def test_trained_on_from_the_same_weights_on_any_number_of_ranks(tmp_path: Path) -> None:
    """On two ranks nothing is lost of them: an export after a step with a learning rate of 0 holds
    them bit for bit.
    """
    of_transformers(tmp_path / "weights", CONFIGS["qwen3"])
    made = project(tmp_path / "project", tmp_path / "weights", "checkpoint.export=huggingface")
    one = run(made, 1, tmp_path / "one", 4)
    two = run(made, 2, tmp_path / "two", 4)
    assert_close(two, one, 1e-5)
    run(made, 2, tmp_path / "still", 1, "--lr", "0")
    exported = tmp_path / "exported"
    with imported(made) as modules:
        checkpoint = tmp_path / "still/run-001/checkpoints/step_00000001"
        assert code_of(modules["export"], checkpoint, exported) == 0
    assert tensors_of(exported) == tensors_of(tmp_path / "weights")


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor.tolist() for file in files for name, tensor in file.items()}


@pytest.mark.usefixtures("alone")
def test_adapters_are_new_beside_the_weights(tmp_path: Path) -> None:
    base = of_transformers(tmp_path / "weights", CONFIGS["llama"])
    with imported(project(tmp_path / "project", tmp_path / "weights", LORA)) as modules:
        model = built(modules)
        new = {name: value for name, value in values(model).items() if ".lora_" in name}
        modules["starting"].start_from(str(tmp_path / "weights"), None, model)
        found = values(model)
    assert len(new) == 4 and all(torch.equal(found[name], value) for name, value in new.items())
    queries = base.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(found["blocks.1.attention.query.weight"], queries)


def state_of(modules: dict[str, ModuleType], model: Any, base: Path) -> Any:
    settings = modules["settings"].Settings()
    optimizer = modules["optim"].build_optimizer(model, settings)
    scheduler = modules["optim"].build_scheduler(optimizer, settings)
    name = modules["starting"].fingerprint(str(base))
    return modules["checkpoint"].TrainState(model, optimizer, scheduler, 10, name, 1)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_holds_the_adapters_alone(tmp_path: Path, capsys: Capsys) -> None:
    """A resume, an export and a prompt need the folder of the other weights again."""
    from transformers import AutoModelForCausalLM

    base, other, run = tmp_path / "weights", tmp_path / "other", tmp_path / "run"
    of_transformers(base, CONFIGS["llama"])
    of_transformers(other, {**CONFIGS["llama"], "initializer_range": 0.1})
    settings = (LORA, "checkpoint.export=huggingface", "checkpoint.generate=true")
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    checkpoint = run / "checkpoints" / "step_00000001"
    with imported(project(tmp_path / "project", base, *settings)) as modules:
        start_from, error = modules["starting"].start_from, modules["distributed"].SetupError
        model = built(modules)
        start_from(str(base), None, model)
        for name, parameter in model.named_parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter) if ".lora_" in name else 0.0)
        modules["checkpoint"].Checkpointer(run, 9, 0).save(state_of(modules, model, base))
        stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        kept = {name for name in stored if name.startswith("model.")}
        assert len(kept) == 4 and all(".lora_" in name for name in kept)
        again = built(modules, seed=1)
        start_from(str(base), checkpoint, again)
        modules["checkpoint"].load_checkpoint(checkpoint, state_of(modules, again, base))
        wanted, found = values(model), values(again)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        with pytest.raises(error, match="was trained beside other frozen weights"):
            modules["checkpoint"].load_checkpoint(checkpoint, state_of(modules, again, other))
        with torch.no_grad():
            logits = model(TOKENS)
        capsys.readouterr()
        assert code_of(modules["export"], checkpoint, tmp_path / "exported") == 0
        prompt = (checkpoint, " ".join(map(str, TOKENS[0].tolist())), "--tokens", 1)
        assert code_of(modules["generate"], *prompt, "--temperature", 0) == 0
        shown = capsys.readouterr().out.split()
        assert code_of(modules["export"], checkpoint, tmp_path / "wrong", "--base", other) == 2
        assert code_of(modules["generate"], *prompt, "--base", other) == 2
        assert capsys.readouterr().err.count("was trained beside other weights than those of") == 2
    assert int(shown[-1]) == int(logits[0, -1].argmax())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        torch.testing.assert_close(opened(TOKENS).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("alone")
@cases(
    "change, words",
    ({"rms_norm_eps": 1e-6}, ["rms_norm_eps is 1e-06 in config.json, 1e-05 in the model"]),
    ({"vocab_size": 96}, ["vocab_size is 96", "embedding.weight is [96, 32] in the files"]),
    ({"tie_word_embeddings": True}, ["tie_word_embeddings is True", "head.weight is not in the"]),
    ({"attention_bias": True}, ["attention_bias is True", "q_proj.bias is not in the model"]),
    ({"num_attention_heads": 2}, ["num_attention_heads is 2", "head_dim is 16", "8 in the model"]),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
        ["rope_type is 'linear'", "rope_theta is 7.0 in config.json, 10000.0 in the model"],
    ),
    ({"model_type": "qwen3", "head_dim": 8}, ["model_type is 'qwen3'", "q_norm.weight is not in"]),
)
def test_another_model_is_refused_and_nothing_is_loaded(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    """The flag may name another folder than the spec."""
    of_transformers(tmp_path / "weights", LLAMA)
    of_transformers(tmp_path / "other", {**LLAMA, **change})
    with imported(project(tmp_path / "project", tmp_path / "weights")) as modules:
        model = built(modules)
        before = values(model)
        with pytest.raises(modules["distributed"].SetupError) as caught:
            modules["starting"].start_from(str(tmp_path / "other"), None, model)
        assert all(torch.equal(before[name], value) for name, value in values(model).items())
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.usefixtures("alone")
def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    of_transformers(tmp_path / "weights", LLAMA)
    with imported(project(tmp_path / "project", tmp_path / "weights")) as modules:
        model, error = built(modules), modules["distributed"].SetupError
        (tmp_path / "weights/config.json").write_text("{")
        with pytest.raises(error, match=r"cannot be read: its config\.json is no JSON$"):
            modules["starting"].start_from(str(tmp_path / "weights"), None, model)
        (tmp_path / "weights/config.json").unlink()
        with pytest.raises(error, match=r"cannot be read: .*config\.json"):
            modules["starting"].start_from(str(tmp_path / "weights"), None, model)


def faults(folder: Path, config: Mapping[str, Any], *settings: str) -> list[str]:
    """What the check of a spec says that takes shape and weights from a folder with this config."""
    folder = Path(mkdtemp(dir=folder))
    weights = folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(config))
    (weights / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    try:
        project(folder / "project", weights, *settings)
    except SpecError as error:
        return [problem.message for problem in error.problems]
    return []


@cases(
    "change, setting, message",
    ({}, "model.norm_eps=1e-6", "model.norm_eps must be 1e-05, the rms_norm_eps of the model"),
    ({}, "model.layers=3", "model.layers must be 2, the num_hidden_layers of the model in"),
    ({}, "model.kv_heads=2", "model.kv_heads must be 4, the num_key_value_heads of the model"),
    ({}, "model.tied_embeddings=true", "model.tied_embeddings must be false, the tie_word_embed"),
    ({}, "model.window=4", "model.window must be null, the sliding_window of the model in"),
    ({}, "model.sequence_length=33", "model.sequence_length must be at most 32, the positions"),
    ({}, "model.experts={number: 4}", "which a decoder with model.experts cannot take"),
    ({}, "model.preset=1b", "model.config must be left out beside model.preset"),
    ({"model_type": "gpt2"}, None, "is of the architecture 'gpt2'; the decoder can be llama"),
    ({"head_dim": 16}, None, "has heads of size 16 (head_dim); those of the decoder are hidden"),
    ({"attention_bias": True}, None, "has biases (attention_bias), which the decoder has not"),
    ({"hidden_act": "gelu"}, None, "has the activation 'gelu' (hidden_act)"),
    ({"rope_scaling": {"type": "linear"}}, None, "scales its rotary positions (rope_type"),
)
def test_a_spec_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], setting: str | None, message: str
) -> None:
    config = {**LLAMA, "num_key_value_heads": 4, **change}
    assert faults(tmp_path, {**LLAMA}) == []
    found = faults(tmp_path, config, *([setting] if setting else []))
    assert any(message in one for one in found), found
