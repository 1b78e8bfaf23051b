"""Models of Hugging Face transformers in generated projects: as the library itself has them, bit
for bit, there and back.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_scaffold_launch import steps_of

from model_project import built, imported, values, whole, write
from records import cases
from scripts import forked
from trees import Patch
from verified_fsdp2.skill.spec import SpecError
from verified_fsdp2.verifier.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 64, **SMALL, "tie_word_embeddings": True},
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 64,
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    },
}
TOKENS = torch.arange(32).view(2, 16)
LLAMA = {"kind": "transformers", "config": MODELS["llama"], "vocabulary": 64, "sequence_length": 16}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 64,
    **SMALL,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model, in a folder as `save_pretrained` writes it; GPT-2 without its head, as the one
    that everybody has.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for name, config in MODELS.items():
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        found[name] = tmp_path_factory.mktemp(name)
        (model.transformer if name == "gpt2" else model).save_pretrained(
            found[name], max_shard_size="20KB"
        )
    return found


def train_state(modules: dict[str, ModuleType], model: Any, *more: Any) -> Any:
    settings = __import__("settings").Settings()
    optimizer = modules["optim"].build_optimizer(model, settings)
    return modules["checkpoint"].TrainState(
        model, optimizer, modules["optim"].build_scheduler(optimizer, settings), *more
    )


def exported(modules: dict[str, ModuleType], state: Any, folder: Path, monkeypatch: Patch) -> Path:
    """The checkpoint of this state, after its export to a folder `exported`."""
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "run.json").write_text("{}")
    modules["checkpoint"].Checkpointer(folder / "run", 1, -1).save(state)
    checkpoint = folder / "run" / "checkpoints" / "step_00000000"
    monkeypatch.setattr(sys, "argv", ["export.py", str(checkpoint), str(folder / "exported")])
    modules["export"].main()
    return checkpoint


def from_folder(folder: Path) -> dict[str, Any]:
    return {
        "kind": "transformers",
        "pretrained": str(folder),
        "vocabulary": 64,
        "sequence_length": 16,
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_bit_for_bit(
    tmp_path: Path, folders: dict[str, Path], name: str, monkeypatch: Patch
) -> None:
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(folders[name])
    with imported(write(tmp_path, from_folder(folders[name]), "checkpoint.export=true")) as modules:
        model = built(modules)
        held, expected = values(model), dict(original.named_parameters())
        buffers, wanted = dict(model.named_buffers()), dict(original.named_buffers())
        for mine, theirs in ((held, expected), (buffers, wanted)):
            assert mine.keys() == theirs.keys() and all(
                torch.equal(mine[key], theirs[key]) for key in mine
            )
        exported(modules, train_state(modules, model), tmp_path, monkeypatch)
        logits = model.train(False)(TOKENS, use_cache=False).logits
        assert torch.equal(logits, original.train(False)(TOKENS, use_cache=False).logits)
    opened, wanted = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict(),
        original.state_dict(),
    )
    assert opened.keys() == wanted.keys() and all(
        torch.equal(opened[key], wanted[key]) for key in wanted
    )


@pytest.mark.usefixtures("alone")
def test_adapters_are_all_that_is_saved_and_exported(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: Patch
) -> None:
    """In the form of peft; and they do not come back beside another base."""
    lora = "finetune={kind: lora, rank: 2, targets: [c_attn]}"
    project = write(tmp_path, from_folder(folders["gpt2"]), lora, "checkpoint.export=true")
    with imported(project) as modules:
        model = built(modules)
        state = train_state(modules, model, 0, base := modules["model"].fingerprint())
        model(TOKENS, use_cache=False).logits.square().mean().backward()
        state.optimizer.step()
        adapters = {
            name: whole(value) for name, value in model.named_parameters() if value.requires_grad
        }
        assert len(adapters) == 4 and state.to_dict()["model"].keys() == adapters.keys()
        checkpoint = exported(modules, state, tmp_path, monkeypatch)
        fresh = built(modules, seed=1)
        state = train_state(modules, fresh, 0, base)
        modules["checkpoint"].load_checkpoint(checkpoint, state)
        assert all(torch.equal(value, values(model)[name]) for name, value in values(fresh).items())
        state.base = "another"
        with pytest.raises(modules["distributed"].SetupError, match="other frozen weights"):
            modules["checkpoint"].load_checkpoint(checkpoint, state)
    modes = {path.stat().st_mode for path in (tmp_path / "exported").iterdir()}
    assert len(modes) == 1  # whoever reads the config reads the adapters
    stored = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert {
        name.removeprefix("base_model.model."): value.tolist() for name, value in stored.items()
    } == {name: value.tolist() for name, value in adapters.items()}
    config = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    assert (
        config["target_modules"] == ["c_attn"]
        and config["r"] == 2
        and config["fan_in_fan_out"] is True
    )


@pytest.mark.usefixtures("alone")
@cases(
    "change, message",
    (
        {"shard": ["Block"]},
        "the model has no module of class Block; its blocks are LlamaDecoderLayer",
    ),
    ({"config": {**MODELS["llama"], "hiden_size": 8}}, "model.config: hiden_size is unknown"),
    (
        {"config": {**MODELS["llama"], "hidden_size": "8"}},
        "model.config: Validation error for field 'hidden_size'",
    ),
    (
        {"config": {**MODELS["llama"], "model_type": "lama"}},
        "model.config: Unrecognized model identifier: lama",
    ),
    ({"config": {"model_type": "t5", "vocab_size": 64}}, "model.config: t5 is no language model"),
    (
        {"config": {"model_type": "gpt2", "vocab_size": 64}, "sequence_length": 1025},
        "model.sequence_length: ",
    ),
    (
        {"config": {"model_type": "opt", "vocab_size": 64}},
        "parallel.tp: transformers has no plan for it; write 1",
    ),
    (
        {"config": MIXTRAL},
        "parallel.tp: model.layers.0.mlp.experts is split moe_tp_experts; write 1",
    ),
    (
        {"config": {**MODELS["llama"], "attention_dropout": 0.1}},
        "parallel.tp: write 0.0 for the dropout of the model",
    ),
)
def test_what_a_model_cannot_be_is_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    project = write(
        tmp_path, {**LLAMA, **change}, *["parallel.tp=2"] * message.startswith("parallel.tp")
    )
    with imported(project) as modules, pytest.raises(modules["distributed"].SetupError) as error:
        built(modules)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_stored_experts_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTRAL)).save_pretrained(
        tmp_path / "experts"
    )
    with pytest.raises(UserError, match=r"model\.pretrained"):
        write(tmp_path, from_folder(tmp_path / "experts"))


@pytest.mark.usefixtures("alone")
def test_a_folder_that_does_not_fit_is_one_line(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: Patch
) -> None:
    def refused(message: str) -> None:
        with pytest.raises(modules["distributed"].SetupError, match=message):
            built(modules)

    with imported(write(tmp_path, from_folder(folders["qwen3"]))) as modules:
        (file,) = [
            path
            for path in folders["qwen3"].glob("*.safetensors")
            if "model.norm.weight" in load_file(path)
        ]
        weights = load_file(file)
        save_file({**weights, "model.norm.weight": torch.zeros(7)}, file, {"format": "pt"})
        refused(r"does not fit: model.norm.weight is \[7\] in the files, \[32\] in the model$")
        save_file({"other": torch.zeros(7)}, file, {"format": "pt"})
        refused("is not in the files")
        save_file(weights, file, {"format": "pt"})
        monkeypatch.setattr(modules["model"], "VOCABULARY", 65)
        refused(r"model\.vocabulary is 65, that of the model 64")
        monkeypatch.setattr(modules["model"], "find_spec", lambda _: None)
        refused("a package is missing: pip install transformers")


WIDE = {**MODELS["llama"], "hidden_size": 128, "intermediate_size": 256}
NF4 = "finetune={kind: lora, rank: 2, targets: [q_proj], base_dtype: nf4}"
BF16 = "precision.param_dtype=bfloat16"
torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def wide(folder: Path, width: int = 128) -> dict[str, Any]:
    """A folder with a model whose matrices have whole blocks of NF4, or not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**WIDE | {"hidden_size": width})
    ).save_pretrained(folder)
    return from_folder(folder)


@torchao
@pytest.mark.usefixtures("alone")
def test_a_base_in_four_bits_is_the_rounded_one(tmp_path: Path) -> None:
    from torchao.quantization import to_nf4

    model = wide(tmp_path / "weights")
    with imported(write(tmp_path, model, NF4, BF16)) as modules:
        found = values(built(modules))
    stored = load_file(tmp_path / "weights" / "model.safetensors")
    assert stored.keys() <= found.keys()
    for name, value in stored.items():
        rounded = (
            to_nf4(value.bfloat16()).to(torch.bfloat16) if "_proj" in name else value.bfloat16()
        )
        assert torch.equal(found[name], rounded), name
    assert {value.dtype for name, value in found.items() if "lora_" in name} == {torch.float32}
    with imported(write(tmp_path / "small", wide(tmp_path / "narrow", 64), NF4, BF16)) as modules:
        message = (
            r"_proj.weight \[64, 64\] does not divide into 1 shards of whole blocks of 16384"
            r" numbers"
        )
        with pytest.raises(modules["distributed"].SetupError, match=message):
            built(modules)


@cases(
    "model, settings, key",
    (LLAMA, [NF4, BF16], "finetune.base_dtype"),  # no files whose weights could be rounded
    ("llama", [NF4, "precision.param_dtype=float32"], "finetune.base_dtype"),
    ("gpt2", [NF4.replace("q_proj", "c_attn"), BF16], "finetune.base_dtype"),
    ("llama", [NF4, BF16, "parallel.cpu_offload=true"], "parallel.cpu_offload"),
    ("llama", [NF4, BF16, "memory.compile=true"], "memory.compile"),
)
def test_four_bits_are_refused(
    tmp_path: Path, folders: dict[str, Path], model: Any, settings: list[str], key: str
) -> None:
    with pytest.raises(SpecError) as caught:
        write(tmp_path, from_folder(folders[model]) if isinstance(model, str) else model, *settings)
    assert [problem.key for problem in caught.value.problems] == [key]


@torchao
@pytest.mark.full
@pytest.mark.launch
def test_a_base_in_four_bits_is_the_same_on_any_ranks(tmp_path: Path) -> None:
    model, losses = wide(tmp_path / "weights", 256), []
    for ranks in (1, 2):
        project = write(tmp_path / str(ranks), model, NF4, BF16)
        forked(project, ranks, "--steps", 3, "--micro-batch", 4, "--out", tmp_path / str(ranks))
        losses.append([record["loss"] for record in steps_of(tmp_path / str(ranks))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.full
@pytest.mark.launch
@pytest.mark.parametrize(("name", "settings"), [("llama", []), ("qwen3", ["parallel.tp=2"])])
def test_the_loss_does_not_depend_on_the_ranks(
    tmp_path: Path, name: str, settings: list[str]
) -> None:
    losses = []
    for ranks in (1, 2):
        project = write(tmp_path / str(ranks), {**LLAMA, "config": MODELS[name]}, *settings)
        forked(project, ranks, "--steps", 3, "--micro-batch", 4, "--out", tmp_path / str(ranks))
        losses.append([record["loss"] for record in steps_of(tmp_path / str(ranks))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
