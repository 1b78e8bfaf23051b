"""`fsdp2 convert`: what it replaces, what it marks, that it accounts for every construct and keeps
everything else.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

from records import Patch, cases
from scripts import Command, written
from verified_fsdp2.skill.convert import Converted, convert
from verified_fsdp2.verifier.source.migration import migrate

ROOT = Path(__file__).parents[2]
CATALOGUES = [
    ROOT / "tests" / "migrate" / f"{name}.py"
    for name in ("ddp_class", "ddp_functions", "fsdp1_trainer", "fsdp1_by_hand")
]
TASKS = [
    ROOT / "evals" / "tasks" / name / "start" / "train.py"
    for name in ("ddp-sft", "ddp-trainer", "ddp-accumulation", "fsdp1-export", "fsdp1-hybrid")
]
CLEAN = [*TASKS, ROOT / "tests" / "hosts" / "converted" / "before.py"]
HEAD = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
HEAD += "from torch.nn.parallel import DistributedDataParallel as DDP\n"
HEAD += "dist.init_process_group('gloo')\ntorch.manual_seed(0)\nrank = dist.get_rank()\n"
MODEL = "model = DDP(nn.Linear(2, 2))\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
STEP = "model(torch.ones(2)).sum().backward()\nopt.step()\n"


def converted(folder: Path, text: str) -> Converted:
    return convert(written(folder, text))


def comments(text: str) -> list[str]:
    return [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]


@pytest.mark.parametrize(
    "script", [*CATALOGUES, *CLEAN], ids=lambda p: f"{p.parents[1].name}-{p.stem}"
)
def test_every_construct_is_converted_or_marked(script: Path) -> None:
    made = convert(script)
    ast.parse(made.text)
    listed = {
        (place["line"], item.construct)
        for item in migrate([script]).items
        for place in item.places
        if place["file"] == str(script)
    }
    marked = {(one.line, one.construct) for one in made.todo}
    assert listed <= {*made.done, *marked} and not set(made.done) & marked
    assert all(
        f"# fsdp2: todo[{one.rule}] {one.construct}: " in made.text
        for one in made.todo
        if one.file == str(script)
    )


@pytest.mark.parametrize("script", CLEAN, ids=lambda p: p.parents[1].name)
def test_a_script_without_marks_is_fsdp2_and_keeps_its_comments(
    script: Path, tmp_path: Path
) -> None:
    made = convert(script)
    assert made.todo == ()
    found = migrate([written(tmp_path, made.text)])
    assert found.kinds == ("fsdp2",) and found.items == ()
    assert set(comments(script.read_text(encoding="utf-8"))) <= set(comments(made.text))
    assert (
        "DistributedDataParallel(" not in made.text and "FullyShardedDataParallel" not in made.text
    )


@cases(
    "before, after",
    (
        "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nprint(norm)\n",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()",
    ),
    (
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
    ),
    (
        "with model.no_sync():  # quiet\n    model(torch.ones(2)).sum().backward()\n",
        (
            "# quiet\nmodel.set_requires_gradient_sync(False)\n"
            "model(torch.ones(2)).sum().backward()\nmodel.set_requires_gradient_sync(True)\n"
        ),
    ),
    (
        "model.require_backward_grad_sync = rank == 0\n",
        "model.set_requires_gradient_sync(rank == 0)\n",
    ),
    ("print(isinstance(model, DDP))\n", "isinstance(model, FSDPModule)"),
    (
        "if rank == 0:\n    torch.save(model.module.state_dict(), 'a')\n",
        (
            "model_state = get_model_state_dict(model, options=whole)\nif rank == 0:\n   "
            " torch.save(model_state, 'a')\n"
        ),
    ),
    (
        "if rank == 0 and opt:\n    torch.save(model.module.state_dict(), 'a')\n",
        "if opt:\n    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)",
    ),
    (
        "model.load_state_dict(torch.load('a'))\n",
        (
            "set_model_state_dict(model, torch.load('a'),"
            " options=StateDictOptions(full_state_dict=True))"
        ),
    ),
)
def test_what_has_one_right_answer(before: str, after: str, tmp_path: Path) -> None:
    made = converted(tmp_path, HEAD + MODEL + before + STEP)
    assert after in made.text and made.todo == ()


@cases(
    "before, construct",
    ("for _ in range(2):\n    with model.no_sync():\n        break\n", "with no_sync()"),
    ("quiet = model.no_sync()\nwith quiet:\n    pass\n", "with no_sync()"),
    ("with model.no_sync(), torch.no_grad():\n    pass\n", "with no_sync()"),
    ("model.load_state_dict({}, strict=False)\n", "model.load_state_dict(...)"),
    (
        "if rank == 0 and print():\n    torch.save(model.module.state_dict(), 'a')\n",
        "model.state_dict()",
    ),
    ("model.scale = nn.Parameter(torch.tensor(2.0))\n", "a scalar parameter"),
    ("fast = torch.compile(model)\n", "torch.compile of the model"),
)
def test_what_has_none_is_left_as_it_is_and_marked(
    before: str, construct: str, tmp_path: Path
) -> None:
    made = converted(tmp_path, HEAD + MODEL + before + STEP)
    assert construct in [one.construct for one in made.todo]
    kept = [line for line in before.replace(".module", "").splitlines() if line]
    assert all(line in made.text for line in kept)


def test_unpacked_arguments_are_not_guessed(tmp_path: Path) -> None:
    made = converted(
        tmp_path,
        HEAD + "given = {'device_ids': None}\n" + MODEL.replace("2))", "2), **given)") + STEP,
    )
    assert "DDP(nn.Linear(2, 2), **given)" in made.text and "DistributedDataParallel" in [
        one.construct for one in made.todo
    ]


def test_unequal_weights_are_broadcast_as_ddp_did(tmp_path: Path) -> None:
    text = HEAD.replace("manual_seed(0)", "manual_seed(dist.get_rank())") + MODEL + STEP
    made = converted(tmp_path, text)
    assert "dist.broadcast(tensor, src=0)" in made.text and made.todo == ()
    assert "broadcast" not in converted(tmp_path, HEAD + MODEL + STEP).text


def test_an_optimizer_moves_below_the_wrapper(tmp_path: Path) -> None:
    body = (
        "model = nn.Linear(2, 2)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n{}model ="
        " DDP(model)\n"
    )
    made = converted(tmp_path, HEAD + body.format("print(rank)\n") + STEP)
    assert (
        made.text.index("opt = torch") > made.text.index("model = shard_model(model)")
        and made.todo == ()
    )
    kept = converted(tmp_path, HEAD + body.format("print(opt)\n") + STEP)
    assert kept.text.index("opt = torch") < kept.text.index("model = shard_model(model)")
    assert [one.construct for one in kept.todo] == ["optimizer before the wrapper"]


def test_names_that_the_script_has_are_not_taken(tmp_path: Path) -> None:
    text = (
        HEAD
        + MODEL
        + "model_state = whole = 1\nif rank == 0:\n    torch.save(model.module.state_dict(), 'a')\n"
        + STEP
    )
    made = converted(tmp_path, text)
    assert "whole_model_state = get_model_state_dict(model, options=whole_on_rank_0)" in made.text


def test_the_command(command: Command, tmp_path: Path, monkeypatch: Patch) -> None:
    script = written(tmp_path, HEAD + MODEL + STEP)
    out = tmp_path / "new.py"
    assert command("convert", script, "-o", out, "--no-verify", "--json").data["todo"] == []
    text = out.read_text(encoding="utf-8")
    assert (
        "exists; choose another file, or --force"
        in command("convert", script, "-o", out, "--no-verify", code=2).err
    )
    command("convert", script, "-o", out, "--no-verify", "--force")
    assert (
        out.read_text(encoding="utf-8") == text
        and script.read_text(encoding="utf-8") == HEAD + MODEL + STEP
    )
    command("convert", script, "-o", script, "--no-verify", "--force", code=2)
    script.write_text(HEAD + MODEL + "fast = torch.compile(model)\n" + STEP, encoding="utf-8")
    command("convert", script, "-o", out, "--no-verify", "--force", code=1)


@cases(
    "text, message",
    (
        (
            "import torch\nm = torch.nn.Linear(2, 2)\no ="
            " torch.optim.SGD(m.parameters())\nm(torch.ones(2)).sum().backward()\no.step()\n"
        ),
        "one of a single process",
    ),
    ("print(1)\n", "found no training in this one"),
)
def test_other_scripts_are_refused(
    text: str, message: str, command: Command, tmp_path: Path
) -> None:
    error = command("convert", written(tmp_path, text), "-o", tmp_path / "new.py", code=2).err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "new.py").exists()


def test_without_libcst_it_says_what_to_install(
    command: Command, tmp_path: Path, monkeypatch: Patch
) -> None:
    script = written(tmp_path, HEAD + MODEL + STEP)
    for name in [
        name for name in sys.modules if name.startswith(("libcst", "verified_fsdp2.skill.convert"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    error = command("convert", script, "-o", tmp_path / "new.py", code=2).err
    assert "this Python has no libcst" in error and "pip install libcst" in error
