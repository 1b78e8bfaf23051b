"""What is rendered: for every combination of options valid, formatted, lint-clean and without traces of what is off."""

from __future__ import annotations

import ast
import itertools
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from trees import build_file_tree
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.verifier.errors import UserError

DECODER = {
    "version": 1,
    "name": "sample",
    "model": {"kind": "decoder", "layers": 2, "width": 64, "heads": 4, "vocabulary": 256, "sequence_length": 32},
    "data": {"kind": "synthetic"},
    "train": {"steps": 20, "global_batch": 16},
    "verify": {"reshard_to": [4]},
}
OWN_MODEL = {"kind": "import", "import": "package.module:build", "shard": ["Block"]}
IMPORTED = {
    **DECODER,
    "model": {**OWN_MODEL, "vocabulary": 256, "sequence_length": 32},
}
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64}
TRANSFORMERS = {**DECODER, "model": {"kind": "transformers", "config": LLAMA, "vocabulary": 256, "sequence_length": 32}}
IMAGES = {
    **DECODER,
    "model": {**OWN_MODEL, "vocabulary": 2},
    "data": {"kind": "images", "folder": "images"},
}
TOKENIZER = "data.tokenizer=tokenizer.json"
JSONL = ["data.kind=jsonl", "data.files=[a.jsonl]"]
DATASET = ["data.kind=datasets", "data.folder=dataset"]
DATA: list[list[str]] = [
    [],
    ["data.kind=text", "data.files=['{stdlib}/json/*.py']"],
    ["data.kind=text", "data.files=[a.txt]"],
    ["data.kind=text", "data.files=[a.txt, '{stdlib}/abc.py']", TOKENIZER],
    ["data.kind=tokens", "data.files=[a.bin]"],
    JSONL,
    [*JSONL, TOKENIZER, "data.packing=false", "data.separator='<|end of \"text\"|>'"],
    [*JSONL, "data.packing=false"],
    [*DATASET, TOKENIZER, "data.field='it''s'"],
    ["data.kind=datasets", "data.folder=splits", "data.split=train", "data.packing=false"],
    ["data.kind=import", "data.import='mydata:load'"],
    ["data.kind=import", "data.import='mydata.loaders:Loader.load'", "data.arguments={a: 1, b: ['x', null]}"],
]
LAUNCH = (
    "launch={engines: [torchrun, slurm, kubernetes, ray, skypilot], nodes: 2, devices_per_node: 1, kubernetes_image: i, "
    "kubernetes_claim: c, skypilot_accelerator: H100, skypilot_volume: v}"
)
ON_CPU = ["launch.nodes=1", "launch.devices_per_node=2", "launch.device=cpu", "launch.skypilot_accelerator=null"]
OPTIONS: list[list[list[str]]] = [
    DATA,
    [[], ["data.workers=2"]],
    [[], ["parallel.dp_replicate=2"], ["parallel.dp_shard=2"], ["parallel.dp_shard=1", "parallel.dp_replicate=2"]],
    [
        [],
        ["parallel.reshard_after_forward=false"],
        ["parallel.reshard_after_forward=false", "parallel.prefetch.forward=1"],
        ["parallel.reshard_after_forward=2"],
        ["parallel.reshard_after_forward=2", "parallel.prefetch={forward: 2, backward: 3}"],
        ["parallel.prefetch.backward=1"],
    ],
    [[], ["parallel.cpu_offload=true"]],
    [
        [],
        ["memory.activation_checkpointing=full"],
        ["memory.activation_checkpointing=every-nth", "memory.every=3"],
        ["memory.activation_checkpointing=op-selective"],
    ],
    [[], ["memory.compile=true"]],
    [[], ["memory.gc_interval=50"]],
    [[], ["precision.param_dtype=float32"], ["precision.reduce_dtype=bfloat16"]],
    [[], ["optimizer.kind=sgd"], ["optimizer.kind=sgd", "optimizer.momentum=0"]],
    [[], ["optimizer.weight_decay=0"], ["optimizer.decay_only_matrices=false"]],
    [[], ["schedule.warmup_steps=0"]],
    [
        [],
        ["schedule.kind=constant"],
        ["schedule.kind=linear"],
        ["schedule.kind=wsd"],
        ["schedule.kind=wsd", "schedule.min_lr_ratio=0"],
    ],
    [
        [],
        ["optimizer.groups=[{match: norm, weight_decay: 0}, {match: 'x\\.y\"', lr: 1e-5}]"],
        ["optimizer.groups=[{match: w}]"],
    ],
    [[], ["train.on_nonfinite=skip"]],
    [[], ["train.dry_run=false"]],
    [[], ["operation.flight_recorder=true"]],
    [[], ["operation.progress=true"]],
    [[], ["operation.tensorboard=true"]],
    [[], ["operation.wandb=true"]],
    [[], ["operation.mfu=true"], ["operation.mfu=true", "operation.peak_tflops=0.5"]],
    [[], ["operation.plot=true"]],
    [[], ["operation.profile=true"]],
    [[], ["train.max_norm=null"]],
    [[], ["train.log_interval=5"]],
    [[], ["train.validate_interval=3"]],
    [[], ["checkpoint.mode=thread"], ["checkpoint.mode=process"]],
    [[], ["checkpoint.export=true"]],
    [[], [LAUNCH], [LAUNCH, *ON_CPU]],
    [[], ["checkpoint.grace_seconds=86399.123456789", "checkpoint.keep=1000000"]],
    [[], ["train.seed=4294967295", "train.steps=1000000000", "optimizer.lr=1.2345678901234567e-05"]],
]
# Lines of each module at most; all of them together fewer than 1,200, but for those that only measure.
LIMITS = {
    "train.py": 350,
    "model.py": 260,
    "lora.py": 50,
    "optim.py": 100,
    "data.py": 200,
    "corpus.py": 130,
    "images.py": 100,
    "checkpoint.py": 260,
    "runs.py": 190,
    "export.py": 120,
    "metrics.py": 155,
    "flops.py": 70,
    "profiling.py": 125,
    "plot.py": 85,
    "distributed.py": 170,
    "launch/ray_train.py": 85,
}
ASIDE = {"flops.py", "profiling.py", "plot.py", "export.py", "launch/ray_train.py"}  # not what trains
EXAMPLES = Path(__file__).parents[2] / "examples"
FINETUNE = [
    [],
    ["finetune={kind: freeze, train: ['norm']}"],
    ["finetune={kind: lora, rank: 4, targets: [query]}"],
    ["finetune={kind: lora, alpha: 32, dropout: 0.1, targets: [key, attention.value]}"],
]
DECODER_OPTIONS = [[[], ["model.tied_embeddings=false"]], [[], ["model.kv_heads=2"]]]
GPT2 = "{model_type: gpt2, vocab_size: 256}"
TRANSFORMERS_OPTIONS = [
    FINETUNE,
    [[], [f"model.config={GPT2}"], ["model.config=weights"], ["model.config=null", "model.pretrained=weights"]],
    [[], ["model.shard=[Block]"]],
    [[], ["precision.param_dtype=float32"]],
    [[], ["parallel.reshard_after_forward=2"], ["parallel.prefetch={forward: 1, backward: 1}"]],
    [[], ["parallel.cpu_offload=true"]],
    [[], ["memory.activation_checkpointing=full"], ["memory.activation_checkpointing=op-selective"]],
    [[], ["memory.compile=true"]],
    [[], ["optimizer.decay_only_matrices=false"]],
    [[], ["checkpoint.mode=thread"], ["checkpoint.mode=process"]],
    [[], ["checkpoint.export=true"]],
    [[], ["operation.mfu=true", "train.dry_run=false"]],
]
IMAGE_OPTIONS = [
    [[], ["data={kind: import, import: 'mydata:load', workers: 1}"]],
    [[], ["data.workers=2"]],
    [[], ["train.dry_run=false"]],
    [[], ["precision.param_dtype=float32"]],
    [[], ["operation.tensorboard=true", "operation.wandb=true", "operation.progress=true", "train.log_interval=2"]],
    [[], ["operation.plot=true", "operation.profile=true"]],
]
SPLIT = {**DECODER, "parallel": {"tp": 2}, "verify": {"nproc": 4, "reshard_to": [8]}}
SPLIT_OPTIONS = [
    DATA,
    *DECODER_OPTIONS,
    [[], ["data.workers=2"]],
    [[], ["parallel.dp_replicate=2"], ["parallel.dp_shard=2"], ["parallel.dp_shard=1", "parallel.dp_replicate=2"]],
    [[], ["precision.param_dtype=float32"]],
    [[], ["parallel.prefetch={forward: 2, backward: 3}"], ["parallel.cpu_offload=true"]],
    [[], ["memory.activation_checkpointing=op-selective"]],
    [[], ["train.on_nonfinite=skip"]],
    [[], ["operation.mfu=true"]],
    [[], ["checkpoint.mode=thread"]],
    [[], ["train.dry_run=false"]],
]
FLOAT8 = {**DECODER, "precision": {"fp8": True}}
FLOAT8_OPTIONS = [*DECODER_OPTIONS, [[], ["parallel.reshard_after_forward=2"]], [[], ["memory.compile=true"]]]
IMPORT_OPTIONS = [
    FINETUNE,
    [[], ["model.initialize=rank-0"]],
    [[], ["model.arguments={layers: 2, name: 'it''s \"so\"', deep: {a: [1, 2.5, null, true]}}"]],
]


def load(
    tmp_path: Path, data: dict[str, object] = DECODER, settings: Sequence[str] = (), inputs: bool = True
) -> spec.Spec:
    if inputs:
        write_inputs(tmp_path)
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(data))
    return spec.load(path, settings)


def write_inputs(tmp_path: Path) -> None:
    """The files that specs name."""
    files = {"a.txt": "some text\n" * 10, "a.jsonl": '{"text": "some text"}\n' * 10, "a.bin": b"\1\0" * 100}
    files["tokenizer.json"] = '{"model": {"type": "WordLevel", "vocab": {"some": 0}}}'
    files["splits/dataset_dict.json"] = '{"splits": ["train"]}'
    folders = ("images/cat/a", "images/dog/a", "dataset/state.json", "splits/train/state.json")
    build_file_tree(tmp_path, files | dict.fromkeys(folders, "content"))
    weights = {
        "config.json": '{"model_type": "gpt2", "vocab_size": 256}',
        "model.safetensors": b"\2" + bytes(7) + b"{}",
    }
    build_file_tree(tmp_path / "weights", weights)


def combinations() -> Iterator[tuple[dict[str, object], list[str]]]:
    """Each option alone, and a fixed random sample of all together."""
    chance = random.Random(0)
    for base, options in (
        (DECODER, [*OPTIONS, *DECODER_OPTIONS, FINETUNE]),
        (IMPORTED, OPTIONS + IMPORT_OPTIONS),
        (TRANSFORMERS, TRANSFORMERS_OPTIONS),
        (IMAGES, IMAGE_OPTIONS),
        (SPLIT, SPLIT_OPTIONS),
        (FLOAT8, FLOAT8_OPTIONS),
        ({**IMPORTED, "precision": {"fp8": True}}, FLOAT8_OPTIONS[2:]),
    ):
        singles = [choice for choices in options for choice in choices]
        count = 40 if len(options) > 20 else 12
        mixed = [list(itertools.chain(*(chance.choice(choices) for choices in options))) for _ in range(count)]
        yield from ((base, settings) for settings in singles + mixed)
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

    found: dict[str, Any] = once("combinations", make)
    return found


@pytest.fixture(scope="module")
def rendered(made: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = made["files"]
    return found


@pytest.fixture(scope="module")
def different(rendered: list[dict[str, str]]) -> set[tuple[str, str]]:
    """Each different file once: path and text."""
    return {item for files in rendered for item in files.items()}


def write_all(rendered: list[dict[str, str]], folder: Path) -> None:
    """Each different file once."""
    written: set[tuple[str, str]] = set()
    for number, files in enumerate(rendered):
        for path, text in files.items():
            if (path, text) not in written:
                place = folder / str(number) / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
        written.update(files.items())


def ruff(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def test_every_combination_is_formatted_and_lint_clean(rendered: list[dict[str, str]], tmp_path: Path) -> None:
    write_all(rendered, tmp_path)
    ruff(tmp_path, "format", "--diff")
    modules = [path.removesuffix(".py") for path in LIMITS]
    each_is_a_project = ["--config", f"lint.isort.known-first-party = {modules}"]
    ruff(tmp_path, "check", *each_is_a_project)
    ruff(tmp_path, "check", *each_is_a_project, "--select", "E,F,I,B,UP,SIM,RUF", "--line-length", "120")


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
    assert lines_that_train(scaffold.render(spec.load(path))) <= 1200


def test_sizes(rendered: list[dict[str, str]], different: set[tuple[str, str]]) -> None:
    assert max(map(lines_that_train, rendered)) < 1500  # whatever is on together
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


def test_same_spec_same_bytes(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert scaffold.render(loaded) == scaffold.render(loaded)


@pytest.mark.parametrize(
    ("settings", "path", "absent"),
    [
        (["precision.param_dtype=float32"], "model.py", ["MixedPrecision", "bfloat16"]),
        (["precision.param_dtype=float32"], "train.py", [".float()"]),
        (["train.max_norm=null"], "train.py", ["clip", "MAX_NORM"]),
        (["checkpoint.mode=thread"], "checkpoint.py", ["dcp.save(", "PROCESS", "writer", "import signal"]),
        ([], "checkpoint.py", ["async", "Future", "copied", "stag", "thread", "PROCESS", "writer", "close", "tied"]),
        (["checkpoint.export=true"], "checkpoint.py", ["tied"]),
        (["checkpoint.export=true"], "export.py", ["tied"]),
        ([], "train.py", ["before_update", "failed", "checkpoints.close", "__mp_main__"]),
        ([], "train.py", ["VALIDATE_INTERVAL", "skip", "faulthandler"]),
        (["train.dry_run=false"], "train.py", ["dry_run", "torch.int64"]),
        ([], "metrics.py", ["LOG_INTERVAL", "mfu", "close", "wandb", "Summary", "bar", "share", "find_spec", "Any"]),
        ([], "train.py", ["profile", "metrics.close", "check_packages", "ideal", "peak"]),
        (["operation.mfu=true", "operation.peak_tflops=7"], "flops.py", ["A100", "SetupError", "get_device_name"]),
        (["operation.mfu=true"], "flops.py", ["embedding.weight", "19.5"]),
        ([], "distributed.py", ["dp_replicate", "faulthandler", "TORCH_FR"]),
        ([], "optim.py", ["SGD", "GROUPS", "parameter_groups", "DECAY_STEPS"]),
        (["optimizer.kind=sgd"], "optim.py", ["AdamW", "BETAS", "eps="]),
        (["optimizer.kind=sgd", "optimizer.momentum=0"], "optim.py", ["momentum"]),
        (["optimizer.decay_only_matrices=false"], "optim.py", ["groups =", "ndim"]),
        (["schedule.warmup_steps=0"], "optim.py", ["arm-up", "WARMUP"]),
        (["schedule.kind=constant"], "optim.py", ["math", "MIN_LR"]),
        (["schedule.kind=linear"], "optim.py", ["math", "cosine"]),
        ([], "model.py", ["head =", "kv_", "enable_gqa"]),
        ([], "data.py", ["import glob", "stdlib", "Path", "import numpy", "DataLoader", "signal"]),
        (["data.kind=text", "data.files=[a.txt]"], "data.py", ["corpus", "out: Path", "stdlib", "vocabulary"]),
        (JSONL, "corpus.py", ["tokenizer", "glob.escape", "[0]", "itertools", "vocabulary"]),
        ([*DATASET, TOKENIZER], "corpus.py", ["FILES", "import json", "import glob", "[0]"]),
        (["data.kind=tokens", "data.files=[a.bin]"], "corpus.py", ["SEPARATOR", "def encode", "Temporary"]),
    ],
)
def test_what_is_off_leaves_no_trace(tmp_path: Path, settings: list[str], path: str, absent: list[str]) -> None:
    text = scaffold.render(load(tmp_path, settings=settings))[path]
    assert not [word for word in absent if word in text]


@pytest.mark.parametrize(
    ("settings", "path", "present"),
    [
        ([], "model.py", ["MixedPrecisionPolicy", "self.embedding.weight"]),
        (["model.tied_embeddings=false"], "model.py", ["self.head ="]),
        (["model.kv_heads=2"], "model.py", ["enable_gqa=True"]),
        ([], "train.py", ["clip_grad_norm_", "full_tensor()", "set_requires_gradient_sync"]),
        (["train.max_norm=null"], "train.py", ["get_total_norm", "full_tensor()"]),
        (["train.on_nonfinite=skip"], "train.py", ["MAX_SKIPS", "skipped"]),
        (["optimizer.groups=[{match: head, lr: 1e-4}]"], "optim.py", ['GROUPS = {"head": {"lr": 0.0001}}']),
        (["schedule.kind=wsd"], "optim.py", ["DECAY_STEPS = 2"]),
        (["data.workers=3"], "data.py", ["WORKERS = 3", "DataLoader("]),
        (["data.kind=tokens", "data.files=[a.bin]", "data.dtype=int32"], "corpus.py", ['DTYPE = "<i4"']),
        ([*JSONL, TOKENIZER, "model.vocabulary=65537"], "corpus.py", ["DTYPE = np.uint32"]),
        (["operation.mfu=true", "operation.peak_tflops=7"], "flops.py", ["PEAK_TFLOPS = 7.0  # of one device, in bf"]),
        (["train.log_interval=5"], "metrics.py", ["LOG_INTERVAL = 5", "step % LOG_INTERVAL"]),
        (["operation.progress=true"], "metrics.py", ["isatty()", 'find_spec("tqdm")']),
        (["operation.step_timeout=7"], "distributed.py", ["STEP_TIMEOUT = 7"]),
        (["parallel.dp_replicate=2"], "distributed.py", ['("dp_replicate", "dp_shard")']),
        (["checkpoint.mode=thread"], "checkpoint.py", ["dcp.async_save("]),
        (["checkpoint.mode=process"], "checkpoint.py", ["AsyncCheckpointerType.PROCESS", "end_writer"]),
        (["checkpoint.mode=process"], "train.py", ['elif __name__ == "__mp_main__":', "tend_writer()"]),
        (["checkpoint.grace_seconds=7"], "checkpoint.py", ["GRACE_SECONDS = 7.0"]),
    ],
)
def test_what_is_on_is_there(tmp_path: Path, settings: list[str], path: str, present: list[str]) -> None:
    text = scaffold.render(load(tmp_path, settings=settings))[path]
    assert not [word for word in present if word not in text]


def test_verify_yaml_is_the_contract(tmp_path: Path) -> None:
    files = scaffold.render(load(tmp_path, settings=["verify.reshard_to=[1, 4]", "verify.steps=5"]))
    assert yaml.safe_load(files["verify.yaml"]) == {
        "script": "train.py",
        "nproc": 2,
        "reshard_to": [1, 4],
        "steps": 5,
        "args": "--out {checkpoint}",
        "save_args": "--checkpoint-interval 3",
        "resume_args": "--resume",
        "single_args": "--micro-batch 16",
    }


def test_verify_yaml_names_the_ranks_that_a_fixed_mesh_leaves_out(tmp_path: Path) -> None:
    text = scaffold.render(load(tmp_path, settings=["verify.reshard_to=[1, 4]", "parallel.dp_shard=2"]))["verify.yaml"]
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
    for path in scaffold.TEMPLATES.glob("*.j2"):
        text = re.sub(r"\{% raw %\}.*?\{% endraw %\}", "", path.read_text())
        for expression in re.findall(r"\{\{(.*?)\}\}", text, flags=re.DOTALL):
            assert re.search(
                r"\| (py|text|yaml|md|sh|dtype|document|signature|own_import|factory_call)(\(.*\))? $", expression
            ), expression


def test_every_template_belongs_to_a_file(made: dict[str, Any]) -> None:
    parts = {name for path in scaffold.TEMPLATES.iterdir() for name in re.findall(r'include "(.+?)"', path.read_text())}
    assert {path.name for path in scaffold.TEMPLATES.iterdir()} == set(made["templates"]) | parts
