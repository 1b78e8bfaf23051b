"""fsdp2 spec: check a spec, print its schema, show it with its defaults, explain its keys."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.errors import PASS, USAGE, UserError
from ..output import (
    Help,
    add_command,
    add_no_plan,
    add_offline,
    add_set,
    emit_json,
    say,
    say_not_looked_at,
)

if TYPE_CHECKING:
    from ..spec import Problem, Spec

EXAMPLES = """\
examples:
  fsdp2 spec check spec.yaml
  fsdp2 spec check spec.yaml --set optimizer.lr=1e-3 --json
  fsdp2 spec show examples/quickstart.yaml
  fsdp2 spec explain optimizer.lr
  fsdp2 spec schema > fsdp2.schema.json

exit codes: 0 the spec is valid, 2 it is not (every problem is listed)
"""
CHECK_EXAMPLES = """\
examples:
  fsdp2 spec check spec.yaml
  fsdp2 spec check spec.yaml --set train.steps=100 --set 'verify.reshard_to=[1, 8]'
  fsdp2 spec check spec.yaml --json
  fsdp2 spec check examples/*.yaml
  fsdp2 spec check spec.yaml --offline       where data, tokenizer and weights are not
  fsdp2 spec check spec.yaml --no-plan       without the least memory of a step

--json prints {"ok": bool, "offline": bool, "problems": [{"file", "line", "column", "message",
"key"}]}
"""
SHOW_EXAMPLES = """\
examples:
  fsdp2 spec show spec.yaml
  fsdp2 spec show spec.yaml --set parallel.dp_replicate=2 --json

The output is itself a valid spec. --json prints {"spec": {...}, "derived": {...}}.
"""
SCHEMA_EXAMPLES = """\
examples:
  fsdp2 spec schema > fsdp2.schema.json
  fsdp2 spec schema --verify > verify.schema.json

An editor with a YAML language server completes and checks a file whose first line is
  # yaml-language-server: $schema=fsdp2.schema.json
"""
EXPLAIN_EXAMPLES = """\
examples:
  fsdp2 spec explain                 a table of all keys
  fsdp2 spec explain optimizer       one section
  fsdp2 spec explain optimizer.lr    one key
"""


def add_parser(commands: Any) -> None:
    """Add `fsdp2 spec` and its four commands."""
    spec = commands.add_parser(
        "spec",
        help="check, show and explain a spec",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    own = spec.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str) -> Any:
        return add_command(own, name, run, text, text, epilog)

    check = add("check", _check, "report every problem of a spec", CHECK_EXAMPLES)
    show = add(
        "show", _show, "print a spec with its defaults and derived values filled in", SHOW_EXAMPLES
    )
    schema = add("schema", _schema, "print the JSON Schema (draft-07) of the spec", SCHEMA_EXAMPLES)
    explain = add(
        "explain",
        _explain,
        "print what a key means, its type, default and examples",
        EXPLAIN_EXAMPLES,
    )
    check.add_argument("specs", metavar="SPEC", type=Path, nargs="+", help="the spec file (YAML)")
    show.add_argument("spec", metavar="SPEC", type=Path, help="the spec file (YAML)")
    for parser in (check, show):
        add_set(parser, "set one key before the spec is checked (repeatable)")
        add_offline(parser)
    add_no_plan(check)
    explain.add_argument(
        "key", metavar="KEY", nargs="?", help="a key such as optimizer.lr; all keys if left out"
    )
    schema.add_argument("--verify", action="store_true", help="the schema of verify.yaml instead")


def _check(args: argparse.Namespace) -> int:
    from ..capacity import lower_bound
    from ..spec import SpecError, load

    errors: list[SpecError] = []
    for path in args.specs:
        try:
            spec = load(path, args.set, args.offline)
            if args.plan and (why := lower_bound.refusal(spec)):
                raise SpecError([_too_small(path, args.set, spec, why)])
        except SpecError as error:
            errors.append(error)
            continue
        if not args.json:
            say(f"{path}: ok: {_summary(spec)}")
            for line in _memory(path, spec) if args.plan else ():
                say(f"  {line}")
            say_not_looked_at(args.offline, spec.urls)
    if args.json:
        problems = [problem.to_dict() for error in errors for problem in error.problems]
        emit_json({"ok": not errors, "offline": args.offline, "problems": problems})
        return USAGE if errors else PASS
    if errors:
        raise UserError("\n".join(map(str, errors)))
    return PASS


def _memory(path: Path, spec: Spec) -> list[str]:
    """What is known of the memory of the device that the spec names: that a plan is to be made."""
    from ..capacity import lower_bound
    from ..spec.crosschecks_size import device_memory

    memory, found = device_memory(spec["launch"]), lower_bound.of_launch(spec)
    if memory is None:
        return []
    plan = f"whether it fits says `fsdp2 plan {shlex.quote(str(path))}`"
    if found is None:
        return [f"memory: not estimated for this model; {plan}"]
    return [f"memory: a step needs at least {found}, a device has {memory:.4g}; {plan}"]


def _too_small(path: Path, changes: Sequence[str], spec: Spec, why: str) -> Problem:
    """What is said of a spec that cannot fit, at the key that names the device."""
    from ..capacity.made_up_data import KEYS
    from ..spec import Problem
    from ..spec.loading import place

    key = next(key for key in KEYS if spec["launch"][key.partition(".")[2]])
    message = f"{key} {spec['launch'][key.partition('.')[2]]}: {why}"
    advice = f"`fsdp2 plan {shlex.quote(str(path))} --explore` looks for settings that fit"
    return Problem(place(path, changes, key), f"{message}; {advice}", key)


def _show(args: argparse.Namespace) -> int:
    from ..spec import load

    spec = load(args.spec, args.set, args.offline)
    if args.json:
        emit_json({"spec": spec.to_dict(), "derived": _derived(spec)})
    else:
        derived = "".join(f"#   {key}: {value}\n" for key, value in _derived(spec).items())
        say(f"{spec.to_yaml()}# derived:\n{derived}".rstrip())
    return PASS


def _schema(args: argparse.Namespace) -> int:
    from ...verifier.config import verify_file as config
    from ..spec import schema

    form = config.FORM if args.verify else schema.FORM
    say(form.text.rstrip())
    return PASS


def _explain(args: argparse.Namespace) -> int:
    from ..spec import explain

    found = explain.find(args.key) if args.key else explain.entries()
    if args.json:
        emit_json(found)
    else:
        say(explain.page(found) if isinstance(found, dict) else explain.table(found))
    return PASS


def _derived(spec: Spec) -> dict[str, Any]:
    mesh = spec.verification_mesh
    return {
        "parameters": spec.parameters,
        "tokens_per_step": spec.tokens_per_step,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps(),
        "mesh": list(mesh[: 2 + (mesh.tp > 1)]),
    }


def _summary(spec: Spec) -> str:
    count, accumulation = spec.parameters, spec.gradient_accumulation_steps()
    parameters = f"{count:,} parameters" if count is not None else "model from elsewhere"
    steps = "step" if accumulation == 1 else "steps"
    tokens, batch, ranks = (
        spec.tokens_per_step,
        spec["train"]["global_batch"],
        spec["verify"]["nproc"],
    )
    per_step = f"{batch:,} samples" if tokens is None else f"{tokens:,} tokens"
    on = f"{ranks} ranks" + (
        f" ({spec.verification_mesh}, the mesh of the verification)" if spec.scaled else ""
    )
    return f"{parameters}, {per_step} per step, {accumulation} accumulation {steps} on {on}"
