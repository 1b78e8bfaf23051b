"""What is rendered: for every combination of options valid, formatted, lint-clean and without
traces of what is off.
"""

import ast
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import python, written
from trees import build_file_tree
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.verifier.errors import UserError

GIVEN = yaml.safe_load(
    Path(__file__).with_name("scaffold_options.yaml").read_text(encoding="utf-8")
)
DECODER, IMPORTED = GIVEN["specs"]["decoder"], GIVEN["specs"]["imported"]
LIMITS: dict[str, int] = GIVEN["limits"]
ASIDE = {
    "prepare.py",
    "remote.py",
    "chat.py",
    "flops.py",
    "devices.py",
    "profiling.py",
    "record.py",
    "export.py",
    "huggingface.py",
    "generate.py",
    "launch/ray_train.py",
}  # not what trains
TEMPLATES = Path(__file__).parents[2] / "templates"
EXAMPLES = Path(__file__).parents[2] / "examples"


def load(
    tmp_path: Path,
    data: dict[str, object] = DECODER,
    settings: Sequence[str] = (),
    inputs: bool = True,
) -> spec.Spec:
    if inputs:
        write_inputs(tmp_path)
    path = written(tmp_path, yaml.safe_dump(data), "spec.yaml")
    return spec.load(path, settings)


def write_inputs(tmp_path: Path) -> None:
    files = {
        "a.txt": "some text\n" * 10,
        "a.jsonl": '{"text": "some text"}\n' * 10,
        "a.bin": b"\1\0" * 100,
    }
    files |= {"a.parquet": "PAR1" * 3, "chats.jsonl": '{"prompt": "a", "completion": "b"}\n'}
    files |= {"chat/tokenizer_config.json": '{"chat_template": "x"}'}
    files["tokenizer.json"] = '{"model": {"type": "WordLevel", "vocab": {"some": 0}}}'
    files["splits/dataset_dict.json"] = '{"splits": ["train"]}'
    folders = (
        "checkpoint/.metadata",
        "images/cat/a",
        "images/dog/a",
        "dataset/state.json",
        "splits/train/state.json",
    )
    build_file_tree(tmp_path, files | dict.fromkeys(folders, "content"))
    config = '{"model_type": "gpt2", "vocab_size": 256}'
    weights = b"\2" + bytes(7) + b"{}"
    build_file_tree(tmp_path / "weights", {"config.json": config, "model.safetensors": weights})
    config = '{"model_type": "llama", "vocab_size": 256}'
    build_file_tree(tmp_path / "llama", {"config.json": config, "model.safetensors": weights})


def combinations() -> Iterator[tuple[dict[str, object], list[str]]]:
    """Each option alone, and a fixed random sample of all together."""
    chance = random.Random(0)
    specs, own, data, finetune = GIVEN["specs"], GIVEN["own"], GIVEN["data"], GIVEN["finetune"]
    for base, options in (
        (DECODER, [data, *GIVEN["common"], *own["decoder"], finetune]),
        (IMPORTED, [data, *GIVEN["common"], finetune, *own["imported"]]),
        (specs["transformers"], [finetune, *own["transformers"]]),
        (specs["images"], own["images"]),
        (specs["split"], [data, *own["decoder"], *own["split"]]),
        (specs["float8"], [*own["decoder"], *own["float8"]]),
        ({**IMPORTED, "precision": {"fp8": True}}, own["float8"]),
    ):
        singles = [[], *(choice for choices in options for choice in choices if choice)]
        count = 24 if len(options) > 20 else 12
        mixed = [
            list(itertools.chain(*(chance.choice(choices) for choices in options)))
            for _ in range(count)
        ]
        yield from ((base, settings) for settings in singles + mixed)
    yield from (
        (DECODER, settings)
        for kind in (
            "documents",
            "experts",
            "windows",
            "schedule_free",
            "long_run",
            "context_parallel",
            "copies",
            "shape_flags",
            "reshard",
            "adamw8bit",
            "urls",
        )
        for settings in GIVEN[kind]
    )
    yield (IMPORTED, GIVEN["reshard"][0])
    yield from ((IMPORTED, settings) for settings in GIVEN["long_run"])
    yield (specs["images"], ["data.augment=true"])
    yield from ((DECODER, [*settings, "model.kv_heads=2"]) for settings in GIVEN["documents"])
    yield from (
        (specs["transformers"], settings)
        for settings in GIVEN["documents"]
        if "model.vocabulary=300" not in settings
    )
    for base in (DECODER, IMPORTED, specs["transformers"]):
        yield from ((base, settings) for settings in GIVEN["base_dtype"])
    yield from ((specs["transformers"], settings) for settings in GIVEN["four_bits"])
    yield (DECODER, [*GIVEN["base_dtype"][0], "checkpoint.generate=true"])
    yield (IMPORTED, [*GIVEN["base_dtype"][0], "model.initialize=rank-0"])
    yield from ((DECODER, [f"verify.ci={where}"]) for where in ("gitlab", "none"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, once: Any) -> dict[str, Any]:
    """The files of every combination, and the templates that they are made from."""

    def make() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("specs")
        write_inputs(folder)
        specs = [load(folder, base, settings, inputs=False) for base, settings in combinations()]
        used = {template for one in specs for template in scaffold.files(one).values()}
        return {"files": [scaffold.render(one) for one in specs], "templates": sorted(used)}

    return once("combinations", make)


@pytest.fixture(scope="module")
def rendered(made: dict[str, Any]) -> list[dict[str, str]]:
    return made["files"]


@pytest.fixture(scope="module")
def different(rendered: list[dict[str, str]]) -> set[tuple[str, str]]:
    """Each different file once: path and text."""
    return {item for files in rendered for item in files.items()}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def test_every_combination_is_formatted_and_lint_clean(
    different: set[tuple[str, str]], tmp_path: Path
) -> None:
    for number, (path, text) in enumerate(sorted(different)):
        build_file_tree(tmp_path / str(number), {path: text})
    modules = [path.removesuffix(".py") for path in LIMITS]
    check = ("check", "--config", f"lint.isort.known-first-party = {modules}")
    strict = ("--select", "E,F,I,B,UP,SIM,RUF", "--line-length", "120")
    for words in (("format", "--diff"), check, (*check, *strict)):
        python("-m", "ruff", *words, "--no-cache", ".", cwd=tmp_path)


def test_every_combination_is_ascii_and_parses(different: set[tuple[str, str]]) -> None:
    for path, text in different:
        assert text.isascii() and text.endswith("\n") and "\t" not in text, path
        if path.endswith(".py"):
            parsed(text)
        if path.endswith(".yaml"):
            yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def lines_that_train(files: dict[str, str]) -> int:
    return sum(text.count("\n") for path, text in files.items() if path in LIMITS.keys() - ASIDE)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_size_of_an_example(path: Path) -> None:
    assert lines_that_train(scaffold.render(spec.load(path))) <= {
        "quickstart": 1130,
        "llama-8b": 1425,
        "expert-parallel": 1410,
        "moe-64": 1670,
    }.get(path.stem, 1305)


def test_a_run_of_a_day_can_be_written() -> None:
    """Its tokenizer and its first weights are made on the way; both parts have the same model."""
    first, second = (
        spec.load(EXAMPLES / "day" / f"{name}.yaml", offline=True) for name in ("pretrain", "chat")
    )
    assert first["model"] == second["model"]
    assert {"export.py", "generate.py", "prepare.py", "experts.py"} <= scaffold.render(first).keys()
    assert {"lora.py", "chat.py", "starting.py"} <= scaffold.render(second).keys()


def test_sizes(rendered: list[dict[str, str]], different: set[tuple[str, str]]) -> None:
    assert max(map(lines_that_train, rendered)) < 1770  # whatever is on together
    for path, text in different:
        if not path.endswith(".py") or path.startswith("tests/"):
            continue
        assert text.count("\n") <= LIMITS[path], path
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 100, f"{path}: {node.name}"


def test_no_constant_or_function_without_use(rendered: list[dict[str, str]]) -> None:
    """Ruff finds unused imports; this finds what nothing in the project names."""
    for files in rendered:
        code = "\n".join(text for path, text in files.items() if path.endswith(".py"))
        uses = Counter(re.findall(r"\w+", code))
        for path in (path for path in files if path in LIMITS):
            for node in parsed(files[path]).body:
                names: list[str] = []
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names = [node.name]
                elif isinstance(node, ast.Assign):
                    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                for name in names:
                    assert uses[name] > 1, f"{path}: {name}"


@pytest.mark.parametrize(
    "trace", GIVEN["traces"], ids=lambda trace: " ".join([trace["file"], *trace["settings"]])
)
def test_what_is_on_is_there_and_what_is_off_leaves_no_trace(
    tmp_path: Path, trace: dict[str, Any]
) -> None:
    text = scaffold.render(load(tmp_path, settings=trace["settings"]))[trace["file"]]
    assert [word for word in trace.get("absent", ()) if word in text] == []
    assert [word for word in trace.get("present", ()) if word not in text] == []


def test_verify_yaml_is_the_contract(tmp_path: Path) -> None:
    files = scaffold.render(load(tmp_path, settings=["verify.reshard_to=[1, 4]", "verify.steps=5"]))
    arguments = {
        "args": "--out {checkpoint}",
        "save_args": "--checkpoint-interval 3",
        "resume_args": "--resume",
    }
    ranks = {
        "script": "train.py",
        "nproc": 2,
        "reshard_to": [1, 4],
        "steps": 5,
        "single_args": "--micro-batch 16",
        "require": ["checkpoint", "resume", "reshard", "accumulation", "bf16"],
    }
    assert yaml.safe_load(files["verify.yaml"]) == arguments | ranks


def test_verify_yaml_names_the_ranks_that_a_fixed_mesh_leaves_out(tmp_path: Path) -> None:
    text = scaffold.render(
        load(tmp_path, settings=["verify.reshard_to=[1, 4]", "parallel.dp_shard=2"])
    )["verify.yaml"]
    assert yaml.safe_load(text)["reshard_to"] == [1]
    assert "# Not on [4] ranks" in text


def test_spec_yaml_is_the_whole_spec_with_absolute_files(tmp_path: Path) -> None:
    settings = ["data.kind=text", "data.files=['a.txt', '{stdlib}/json/*.py']"]
    loaded = load(tmp_path, settings=settings)
    (tmp_path / "again.yaml").write_text(scaffold.render(loaded)["spec.yaml"])
    again = spec.load(tmp_path / "again.yaml")
    assert again == loaded
    assert again.to_dict()["data"]["files"] == [str(tmp_path / "a.txt"), "{stdlib}/json/*.py"]


def test_a_module_of_the_scaffold_cannot_be_imported_as_the_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has a module 'model' of its own"):
        scaffold.render(load(tmp_path, IMPORTED, ["model.import='model:Net'"]))


def test_every_expression_of_a_template_goes_through_a_filter() -> None:
    names = "py|path|text|yaml|md|sh|dtype|document|signature|own_import|factory_call"
    filters = rf"\| ({names})(\(.*\))? $"
    for path in TEMPLATES.glob("*.j2"):
        text = re.sub(r"\{% raw %\}.*?\{% endraw %\}", "", path.read_text())
        for expression in re.findall(r"\{\{-?(.*?)-?\}\}", text, flags=re.DOTALL):
            assert re.search(filters, expression), expression


def test_every_template_belongs_to_a_file(made: dict[str, Any]) -> None:
    parts = {
        name
        for path in TEMPLATES.iterdir()
        for name in re.findall(r'include "(.+?)"', path.read_text())
    }
    assert {path.name for path in TEMPLATES.iterdir()} == set(made["templates"]) | parts


def test_the_readme_names_only_files_that_are_there(rendered: list[dict[str, str]]) -> None:
    for files in rendered:
        named = set(re.findall(r"^\| `([\w/]+\.\w+)` \|", files["README.md"], re.M))
        assert named <= files.keys() and "train.py" in named
