"""Training that starts with the weights of another run: the model alone, whole or not at all."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_scaffold_launch import assert_close, finish, run, start, steps_of

from checkpoint_project import flip
from model_project import built, imported, values, write
from records import Capsys, cases
from trees import DECODER

LORA = "finetune={kind: lora, rank: 2, targets: [query]}"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
LLAMA |= {"num_attention_heads": 2, "max_position_embeddings": 32}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
}
alone = pytest.mark.usefixtures("alone")


def of(config: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "transformers", "config": config, "vocabulary": 64, "sequence_length": 16}


def saved(modules: dict[str, ModuleType], model: Any, out: Path) -> Path:
    settings = modules["settings"].Settings()
    optimizer = modules["optim"].build_optimizer(model, settings)
    scheduler = modules["optim"].build_scheduler(optimizer, settings)
    state = modules["checkpoint"].TrainState(model, optimizer, scheduler, 10)
    state.step = 1
    (out / "checkpoints").mkdir(parents=True)
    (out / "run.json").write_text("{}")
    modules["checkpoint"].Checkpointer(out, 9, 0).save(state)
    return out / "checkpoints" / "step_00000001"


def trained(
    folder: Path, model: dict[str, Any] = DECODER, *settings: str
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a project of this model, and the weights in it."""
    with imported(write(folder, model, *settings)) as modules:
        found = built(modules, seed=3)
        return saved(modules, found, folder / "run"), values(found)


def project(folder: Path, origin: Path, model: dict[str, Any] = DECODER, *settings: str) -> Path:
    return write(folder, model, *settings, f"train.init_from={origin}")


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in found
    )


@alone
@pytest.mark.parametrize("model", [DECODER, of(LLAMA), of(GPT2)], ids=["decoder", "llama", "gpt2"])
def test_the_weights_are_those_of_the_checkpoint(
    tmp_path: Path, model: dict[str, Any], capsys: Capsys
) -> None:
    origin, wanted = trained(tmp_path / "first", model)
    with imported(project(tmp_path / "second", origin, model)) as modules:
        found = built(modules)
        fresh = values(found)
        assert not equal(fresh, wanted)
        modules["starting"].start_from(str(origin), tmp_path / "step_00000007", found)
        assert equal(values(found), fresh)
        assert "--init-from is ignored: this run continues from" in capsys.readouterr().out
        modules["starting"].start_from("", None, found)
        assert equal(values(found), fresh)
        modules["starting"].start_from(modules["settings"].Settings().init_from, None, found)
        assert equal(values(found), wanted)


@alone
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2, tied"])
def test_a_folder_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    original.save_pretrained(tmp_path / "whole")
    original.base_model.save_pretrained(tmp_path / "headless")
    wanted = {name: value.detach() for name, value in original.named_parameters()}
    with imported(project(tmp_path / "second", tmp_path / "whole", of(config))) as modules:
        found = built(modules)
        modules["starting"].start_from(str(tmp_path / "whole"), None, found)
        assert equal(values(found), wanted)
        again = built(modules)
        if config is GPT2:  # the head is the embedding
            modules["starting"].start_from(str(tmp_path / "headless"), None, again)
            assert equal(values(again), wanted)
        else:
            with pytest.raises(
                modules["distributed"].SetupError, match=r"lm_head\.weight is not in the files$"
            ):
                modules["starting"].start_from(str(tmp_path / "headless"), None, again)


@alone
def test_adapters_are_new_beside_loaded_weights(tmp_path: Path) -> None:
    origin, base = trained(tmp_path / "first")
    with imported(project(tmp_path / "second", origin, DECODER, LORA)) as modules:
        model = built(modules)
        adapters = {name: value for name, value in values(model).items() if ".lora_" in name}
        modules["starting"].start_from(str(origin), None, model)
        assert adapters and equal(values(model), base | adapters)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        tuned = saved(modules, model, tmp_path / "tuned")
    with imported(project(tmp_path / "third", tuned)) as modules:
        model = built(modules)
        error = modules["distributed"].SetupError
        with pytest.raises(error, match=r"embedding\.weight is not in the files"):
            modules["starting"].start_from(str(tuned), None, model)


@alone
@cases(
    "change, message",
    ({"tied_embeddings": False}, r"head\.weight is not in the files$"),
    ({"layers": 1}, r"blocks\.1\..* is not in the model"),
    ({"vocabulary": 96}, r"embedding\.weight is \[64, 32\] in the files, \[96, 32\] in the model$"),
    ({"layers": 9}, r"blocks\.2\..* is not in the files; .*; and \d\d more$"),
)
def test_what_differs_is_named_and_nothing_is_loaded(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    origin, _ = trained(tmp_path / "first")
    with imported(project(tmp_path / "second", origin, {**DECODER, **change})) as modules:
        model = built(modules)
        before = values(model)
        with pytest.raises(modules["distributed"].SetupError, match=message):
            modules["starting"].start_from(str(origin), None, model)
        assert equal(values(model), before)


@alone
def test_a_folder_that_is_no_whole_checkpoint(tmp_path: Path) -> None:
    origin, _ = trained(tmp_path / "first")
    with imported(project(tmp_path / "second", origin)) as modules:
        model, error = built(modules), modules["distributed"].SetupError
        with pytest.raises(
            error,
            match=r"nowhere cannot be read: it has no SHA256SUMS, and no \*\.safetensors$",
        ):
            modules["starting"].start_from(str(tmp_path / "nowhere"), None, model)
        flip(origin / "__0_0.distcp")
        with pytest.raises(error, match=r"is damaged: __0_0\.distcp$"):
            modules["starting"].start_from(str(origin), None, model)


@pytest.mark.full
@pytest.mark.launch
def test_pretrain_then_adapters_stopped_and_started_by_the_same_command(tmp_path: Path) -> None:
    first = write(tmp_path / "first", DECODER)
    run(first, 2, tmp_path / "out", 4)
    origin = tmp_path / "out/run-001/checkpoints/step_00000004"
    tune = project(tmp_path / "tune", origin, DECODER, LORA)
    straight = run(tune, 1, tmp_path / "straight", 4)
    shown = finish(start(tune, 2, tmp_path / "parts", "--steps", "2", "--checkpoint-interval", "2"))
    assert f"started with the weights of {origin}" in shown
    shown = finish(start(tune, 2, tmp_path / "parts", "--steps", "4", "--resume"))
    assert f"continues with the weights of {origin}" in shown
    assert_close(steps_of(tmp_path / "parts"), straight, 1e-5)
    assert straight[0]["loss"] < steps_of(tmp_path / "out")[0]["loss"]
