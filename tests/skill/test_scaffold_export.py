"""The decoder after training: as a folder of transformers with the same logits, and continuing a
prompt.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from checkpoint_project import flip
from model_project import built, imported, write
from records import Capsys
from trees import DECODER, code_of

EXPORT = "checkpoint.export=huggingface"
TOKENS = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))
MODELS: dict[str, dict[str, Any]] = {
    "tied": {**DECODER, "rope_theta": 500.0},
    "grouped": {**DECODER, "heads": 4, "kv_heads": 2, "tied_embeddings": False},
    "normed": {**DECODER, "qk_norm": True},
    "normed near": {**DECODER, "qk_norm": True, "window": 5},
    "normed near and far": {**DECODER, "qk_norm": True, "window": 5, "full_attention_every": 2},
    "experts": {**DECODER, "kv_heads": 1, "experts": {"number": 5, "first_dense": 1, "scale": 2.5}},
    "normed experts": {
        **DECODER,
        "qk_norm": True,
        "experts": {"number": 4, "top_k": 1, "shared": 2, "ffn": 24},
    },
    "near": {**DECODER, "window": 5},
    "near and far": {**DECODER, "kv_heads": 1, "layers": 5, "window": 5, "full_attention_every": 2},
}
NEEDED = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


def saved(modules: dict[str, ModuleType], model: Any, run: Path) -> Path:
    settings = __import__("settings").Settings()
    optimizer = modules["optim"].build_optimizer(model, settings)
    state = modules["checkpoint"].TrainState(
        model, optimizer, modules["optim"].build_scheduler(optimizer, settings)
    )
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    modules["checkpoint"].Checkpointer(run, 1, -1).save(state)
    return run / "checkpoints" / "step_00000000"


@NEEDED
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("limit", [None, 9e-6], ids=["one file", "several"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(
    tmp_path: Path, name: str, limit: float | None
) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "exported"
    with imported(write(tmp_path, MODELS[name], EXPORT)) as modules:
        model = built(modules)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                buffer.add_(torch.randn_like(buffer) if name.endswith("experts.bias") else 0)
        checkpoint = saved(modules, model, tmp_path / "run")
        shards = ["--shard-size", limit] if limit else []
        assert code_of(modules["export"], checkpoint, out, *shards) == 0
        with torch.no_grad():
            wanted = model(TOKENS)
    opened = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(opened(TOKENS).logits, wanted, rtol=1e-5, atol=1e-5)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    if limit is None:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files


@NEEDED
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("base", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grouped", "experts"])
def test_adapters_are_merged(tmp_path: Path, name: str, base: str) -> None:
    from transformers import AutoModelForCausalLM

    lora = (
        f"{{kind: lora, rank: 2, alpha: 6, dropout: 0.1, targets: [query, up], base_dtype: {base}}}"
    )
    settings = (EXPORT, f"finetune={lora}", f"precision.param_dtype={base}")
    out = tmp_path / "exported"
    with imported(write(tmp_path, MODELS[name], *settings)) as modules:
        model = built(modules)
        for part, parameter in model.named_parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter) if ".lora_" in part else 0.0)
        checkpoint = saved(modules, model, tmp_path / "run")
        assert code_of(modules["export"], checkpoint, out, "--shard-size", 9e-6) == 0
        weights = {part: value.full_tensor().float() for part, value in model.named_parameters()}
    opened = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    layer = weights["blocks.1.attention.query.weight"]
    added = (
        weights["blocks.1.attention.query.lora_B.weight"]
        @ weights["blocks.1.attention.query.lora_A.weight"]
    )
    torch.testing.assert_close(
        opened.model.layers[1].self_attn.q_proj.weight.data, layer + 3 * added
    )
    assert not [key for key in opened.state_dict() if "lora" in key]
    if base == "float32":
        with torch.no_grad():
            torch.testing.assert_close(
                opened(TOKENS).logits, model.train(False)(TOKENS), rtol=1e-5, atol=1e-5
            )


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The folder of a transformers tokenizer, with a chat template: bytes, and two marks."""
    from shutil import copytree

    return copytree(
        Path(__file__).parents[2] / "examples" / "chat-tokenizer", tmp_path / "tokenizer"
    )


CHAT = "{kind: chat, files: [chats.jsonl], tokenizer: tokenizer, packing: "
TEXT = (
    "{kind: text, files: ['{stdlib}/abc.py'], tokenizer: tokenizer/tokenizer.json, separator:"
    " <|end|>}"
)


@NEEDED
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize(
    "data", [TEXT, CHAT + "false}", CHAT + "documents}"], ids=["text", "chat", "packed"]
)
def test_the_tokenizer_goes_along_and_a_chat_is_answered(
    tmp_path: Path, tokenizer: Path, data: str, capsys: Capsys
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    settings = (EXPORT, "checkpoint.generate=true", f"data={data}", "model.vocabulary=258")
    with imported(write(tmp_path, {**DECODER, "sequence_length": 64}, *settings)) as modules:
        model = built(modules)
        checkpoint = saved(modules, model, tmp_path / "run")
        assert code_of(modules["export"], checkpoint, tmp_path / "exported") == 0
        opened = AutoTokenizer.from_pretrained(tmp_path / "exported")
        config = json.loads((tmp_path / "exported" / "config.json").read_text())
        assert opened("def").input_ids == [*b"def"]
        assert (opened.eos_token_id, config["eos_token_id"]) == (257, 257)
        asked = "<|start|>user\ndef<|end|>\n<|start|>assistant\n" if data != TEXT else "def"
        assert (opened.chat_template is None) == (data == TEXT)
        prompt = opened(asked, add_special_tokens=False).input_ids
        inputs = torch.tensor([prompt])
        extra = (torch.arange(len(prompt))[None],) if "documents" in data else ()
        with torch.no_grad():
            first = int(model(inputs, *extra)[0, -1].argmax())
        capsys.readouterr()
        assert (
            code_of(modules["generate"], checkpoint, "def", "--tokens", 1, "--temperature", 0) == 0
        )
    wanted = opened.decode(
        [first] if data != TEXT else [*prompt, first], skip_special_tokens=data != TEXT
    )
    assert capsys.readouterr().out == f"{wanted}\n"


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_exported(tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "exported"
    with imported(write(tmp_path, DECODER, EXPORT)) as modules:
        checkpoint = saved(modules, built(modules), tmp_path / "run")
        assert code_of(modules["export"], checkpoint, tmp_path / "nowhere" / "exported") == 2
        assert code_of(modules["export"], tmp_path / "run", out) == 2
        assert code_of(modules["export"], checkpoint, tmp_path / "run") == 2
        flip(checkpoint / ".metadata")
        assert code_of(modules["export"], checkpoint, out) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error"] * 4
    words = ("cannot be written", "no SHA256SUMS", "is there already", "is damaged: .metadata")
    assert [word for word, line in zip(words, lines, strict=True) if word not in line] == []
    assert not out.exists()


def greedy(model: Any, tokens: Sequence[int], number: int) -> list[int]:
    found = [*tokens]
    for _ in range(number):
        logits = model(torch.tensor([found[-16:]]))
        found.append(int(logits[0, -1].argmax()))
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("settings", [[], ["memory.chunked_loss=true"]], ids=["plain", "chunked"])
def test_the_most_probable_continuation(
    tmp_path: Path, settings: list[str], capsys: Capsys
) -> None:
    """Longer than the sequence length: then the model sees the last tokens."""
    with imported(write(tmp_path, DECODER, "checkpoint.generate=true", *settings)) as modules:
        model = built(modules)
        checkpoint = saved(modules, model, tmp_path / "run")
        wanted = greedy(model, [3, 1, 4], 20)
        capsys.readouterr()
        assert (
            code_of(modules["generate"], checkpoint, "3 1 4", "--tokens", 20, "--temperature", 0)
            == 0
        )
        assert capsys.readouterr().out.split() == list(map(str, wanted))
        drawn = []
        for seed in (0, 0, 1):
            assert (
                code_of(modules["generate"], checkpoint, "3 1 4", "--top-k", 5, "--seed", seed) == 0
            )
            drawn.append(capsys.readouterr().out)
        assert drawn[0] == drawn[1] != drawn[2]
        assert code_of(modules["generate"], checkpoint, "3 64") == 2
        assert code_of(modules["generate"], checkpoint, "") == 2
        assert code_of(modules["generate"], tmp_path, "3") == 2
    lines = capsys.readouterr().err.splitlines()
    words = ("'64' is no token id of 0 to 63", "no token", "no SHA256SUMS")
    assert [word for word, line in zip(words, lines, strict=True) if word not in line] == []


@pytest.mark.usefixtures("alone")
def test_text_is_continued_with_adapters(tmp_path: Path, capsys: Capsys) -> None:
    text = ["data={kind: text, files: ['{stdlib}/abc.py']}", "model.vocabulary=256"]
    lora = "finetune={kind: lora, rank: 2, targets: [query]}"
    with imported(write(tmp_path, DECODER, "checkpoint.generate=true", lora, *text)) as modules:
        model = built(modules)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.1 if "lora_" in name else 0.0)
        checkpoint = saved(modules, model, tmp_path / "run")
        wanted = bytes(greedy(model, b"def", 9)).decode(errors="replace")
        capsys.readouterr()
        assert (
            code_of(modules["generate"], checkpoint, "def", "--tokens", 9, "--temperature", 0) == 0
        )
    assert capsys.readouterr().out == f"{wanted}\n"


@NEEDED
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("name", ["grouped", "experts"])
def test_in_bfloat16(tmp_path: Path, name: str) -> None:
    """The same model with its weights rounded, but for what chooses the experts."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = tmp_path / "exported"
    with imported(write(tmp_path, MODELS[name], EXPORT)) as modules:
        model = built(modules)
        checkpoint = saved(modules, model, tmp_path / "run")
        assert code_of(modules["export"], checkpoint, out, "--dtype", "bfloat16") == 0
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.bfloat16())
        with torch.no_grad():
            wanted = model(TOKENS)
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # whoever reads one, reads all
    stored = load_file(out / "model.safetensors")
    wide = {key for key, tensor in stored.items() if tensor.dtype == torch.float32}
    assert wide == {key for key in stored if key.endswith("e_score_correction_bias")}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    opened = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(opened(TOKENS).logits, wanted, rtol=1e-5, atol=1e-5)
