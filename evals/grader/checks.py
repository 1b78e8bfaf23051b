"""The checks.

Each is a function of the grading and of its parameters in task.yaml; it returns whether it holds,
and the evidence.
"""

from __future__ import annotations

import ast
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from .oracle import FLOOR, MULTIPLE, Oracle, distance
from .record import Broken, Record, renamed
from .tasks import Task

Result = tuple[bool, str]
PLAIN = 0.01  # the part of a model that may stay unsharded, such as one scale
SLACK = 1.1
WHOLE = 0.25


@dataclass
class Grading:
    """What was run, and with what result."""

    task: Task
    code: Path
    out: Path
    oracle_out: Path
    oracle: Oracle
    runs: dict[str, Record] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A kind of check: its name, what it expects in words, and how it is found out."""

    sentence: str
    holds: Callable[..., Result]


CHECKS: dict[str, Check] = {}


def check(name: str, sentence: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register a check; `sentence` may name its parameters and {run}, the command line."""

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        CHECKS[name] = Check(sentence, function)
        return function

    return register


def numel(shape: list[int]) -> int:
    return math.prod(shape)


@check(
    "sharded",
    "{run}: every rank holds about 1/{over} of the parameters and of the optimizer state,"
    " as shards of DTensors",
)
def sharded(grading: Grading, run: str, over: int) -> Result:
    record = grading.runs[run]
    share = []
    for rank, pieces in enumerate(record.parameters(record.steps)):
        unique = {
            name: p
            for name, p in pieces.items()
            if not any(name in tied[1:] for tied in record.reported[rank]["tied"])
        }
        total = sum(numel(p["shape"]) for p in unique.values())
        plain = [
            name
            for name, p in unique.items()
            if not any(isinstance(dim[0], int) for dim in p["placements"])
        ]
        left = sum(numel(unique[name]["shape"]) for name in plain)
        if left > PLAIN * total:
            return (
                False,
                f"{len(plain)} of {len(unique)} parameters are no shards on rank {rank},"
                f" such as {plain[0]}",
            )
        even = sum(
            math.ceil(p["shape"][0] / over) * numel(p["shape"][1:])
            for p in unique.values()
            if p["shape"]
        )
        stored = sum(p["stored"] for p in unique.values())
        if stored > SLACK * even + left:
            return (
                False,
                f"rank {rank} stores {stored} of {total} elements; 1/{over} would be {even}",
            )
        trained = sum(p["local"].numel() for p in unique.values() if p["trainable"])
        state = record.reported[rank]["state"].get("here", 0)
        if state > 2 * SLACK * trained + 2 * len(unique):
            return (
                False,
                f"rank {rank} holds {state} elements of optimizer state for {trained} trained ones",
            )
        share.append(stored / total)
    return True, f"the ranks hold {min(share):.3f} to {max(share):.3f} of the parameters"


@check(
    "no-full-copy",
    "{run}: after a step no more than one rank holds a whole copy of the model besides its shards",
)
def no_full_copy(grading: Grading, run: str) -> Result:
    held = [reported["held"] for reported in grading.runs[run].reported]
    share = [reported["whole"] / reported["all"] for reported in held]
    many = [rank for rank, part in enumerate(share) if part > WHOLE]
    shown = [round(part, 2) for part in share]
    return len(
        many
    ) <= 1, f"whole tensors of the model's shapes, as a part of it, on each rank: {shown}"


@check("built-on-meta", "{run}: the parameters are on the meta device when fully_shard gets them")
def built_on_meta(grading: Grading, run: str) -> Result:
    found = sorted(
        {device for reported in grading.runs[run].reported for device in reported["sharded_on"]}
    )
    return found == ["meta"], f"devices of the parameters before sharding: {found}"


@check("gathers", "{run}: the model is gathered in pieces, none larger than {most} of it")
def gathers(grading: Grading, run: str, most: float = 0.6) -> Result:
    reported = grading.runs[run].reported[0]
    sizes = [size for _, size, _ in reported["gathers"]]
    if not sizes:
        return False, "no parameter was gathered"
    part = max(sizes) / reported["held"]["all"]
    return (
        part <= most,
        f"{len(sizes)} gathers in {reported['steps']} steps, the largest {part:.2f} of the model",
    )


@check(
    "shares-batch",
    "{run}: the ranks share the work of each step: together they are fed what one process is fed",
)
def shares_batch(grading: Grading, run: str) -> Result:
    right = grading.oracle.run.reported[0]["fed"]
    own = [reported["fed"] for reported in grading.runs[run].reported]
    parts = [
        round(sum(fed.get(step, 0) for fed in own) / count, 2) for step, count in right.items()
    ]
    return bool(parts) and set(parts) == {1.0}, f"fed at each step, as a part of the batch: {parts}"


@check(
    "reductions",
    "{run}: each optimizer step reduces the gradient of each parameter once, not at every"
    " micro-batch",
)
def reductions(grading: Grading, run: str) -> Result:
    reported = grading.runs[run].reported[0]
    parts = [
        sum(size for step, size, _ in reported["reduces"] if step == number)
        for number in range(reported["steps"])
    ]
    shares = [round(part / reported["held"]["all"], 2) for part in parts]
    once = all(1 <= share <= SLACK for share in shares)
    return once, f"elements reduced at each step, as a part of the model: {shares}"


@check("same-start", "{run}: the initial weights are those of the original script")
def same_start(grading: Grading, run: str) -> Result:
    right = grading.oracle.run.weights(0)
    own = renamed(grading.runs[run].weights(0), list(right))
    apart = {name: distance(own[name], right[name]) for name in right}
    worst = max(apart, key=lambda name: apart[name])
    return apart[worst] < FLOOR, f"{worst} off by {apart[worst]:.1e}"


@check("buffers", "{run}: on every rank the buffers hold what the original script computes")
def buffers(grading: Grading, run: str) -> Result:
    record = grading.runs[run]
    right = grading.oracle.run.buffers(record.steps)
    for rank, kept in enumerate(record.pieces("weights", record.steps)):
        own = renamed({name: p["local"] for name, p in kept["buffers"].items()}, list(right))
        for name, tensor in right.items():
            if not torch.allclose(
                own[name].double(), tensor.double(), rtol=1e-5, atol=1e-6, equal_nan=True
            ):
                here, there = own[name].flatten()[:3].tolist(), tensor.flatten()[:3].tolist()
                return False, f"{name} on rank {rank}: {here} for {there}"
    return bool(right), f"{len(right)} buffers alike"


@check("tied", "{run}: weights that were tied are still one parameter")
def tied(grading: Grading, run: str) -> Result:
    right, own = grading.oracle.run.reported[0]["tied"], grading.runs[run].reported[0]["tied"]
    same = bool(right) and [len(names) for names in own] == [len(names) for names in right]
    return same, f"tied: {own}, expected {right}"


@check(
    "trajectory",
    "{run}: gradients and weights of every step are those of one process on the same"
    " global batches, within rounding",
)
def trajectory(grading: Grading, run: str, at: int = 0) -> Result:
    record, oracle = grading.runs[run], grading.oracle
    if record.steps != oracle.steps - at:
        return False, f"{record.steps} optimizer steps, expected {oracle.steps - at}"
    worst = oracle.deviation(record, at)
    return worst.ratio <= 1, str(worst)


@check(
    "follows",
    "{run}: all steps together change the weights as they do in fp32, within {within} of"
    " that change",
)
def follows(grading: Grading, run: str, within: float) -> Result:
    """For low precision, where the limits of rounding in fp32 say nothing; `within` is chosen, and
    reported in the task.
    """
    record, oracle = grading.runs[run], grading.oracle
    if record.steps != oracle.steps:
        return False, f"{record.steps} optimizer steps, expected {oracle.steps}"
    right, begin = oracle.update(oracle.steps), record.weights(0)
    own = renamed(record.weights(record.steps), list(right))
    moved = torch.cat([(own[name].double() - begin[name].double()).flatten() for name in right])
    apart = distance(moved, torch.cat([right[name].double().flatten() for name in right]))
    return apart <= within, f"off by {apart:.2f} of the change"


@check(
    "resumes",
    "{run}: goes on from step {at} as the run that was not interrupted, bitwise on as many ranks",
)
def resumes(grading: Grading, run: str, of: str, at: int) -> Result:
    again, before = grading.runs[run], grading.runs[of]
    begin, kept = again.weights(0), before.weights(at)
    apart = [name for name in kept if not torch.equal(begin[name], kept[name])]
    if apart:
        steps = range(before.steps + 1)
        earlier = [
            s for s in steps if all(torch.equal(begin[n], w) for n, w in before.weights(s).items())
        ]
        return (
            False,
            f"does not begin with the weights of step {at} but of {earlier or 'no step'};"
            f" {apart[0]} differs",
        )
    if again.ranks != before.ranks:
        return trajectory(grading, run, at)
    if again.steps != before.steps - at:
        return False, f"{again.steps} further steps, expected {before.steps - at}"
    for step in range(1, again.steps + 1):
        for what, own, right in (
            ("gradient", again.grads(step), before.grads(step + at)),
            ("weight", again.weights(step), before.weights(step + at)),
        ):
            wrong = [name for name in right if not torch.equal(own[name], right[name])]
            if wrong:
                part = distance(own[wrong[0]], right[wrong[0]])
                return False, f"{what} {wrong[0]} differs by {part:.1e} at step {step + at}"
    return True, f"bitwise from step {at} to {before.steps}"


@check(
    "distributed-checkpoint",
    "{run}: {folder} is a complete distributed checkpoint to which every rank wrote its part",
)
def distributed_checkpoint(grading: Grading, run: str, folder: str) -> Result:
    path = grading.out / folder
    parts = [part for part in path.glob("*.distcp") if part.stat().st_size]
    reported = (
        f"{len(parts)} parts, metadata {'there' if (path / '.metadata').exists() else 'missing'}"
    )
    return len(parts) >= grading.runs[run].ranks and (path / ".metadata").exists(), reported


@check("replicas", "{run}: ranks {groups} each share one copy of the model; the copies are equal")
def replicas(grading: Grading, run: str, groups: list[list[int]]) -> Result:
    ranks = grading.runs[run].parameters(grading.runs[run].steps)
    name = max(ranks[0], key=lambda n: numel(ranks[0][n]["shape"]))
    local = [rank[name]["local"] for rank in ranks]
    for group in groups:
        if any(torch.equal(local[a], local[b]) for a in group for b in group if a < b):
            return False, f"ranks {group} hold the same part of {name}"
        rows = sum(local[rank].numel() for rank in group)
        if rows != numel(ranks[0][name]["shape"]):
            return (
                False,
                f"ranks {group} hold {rows} elements of {name}, not"
                f" {numel(ranks[0][name]['shape'])}",
            )
    for other in groups[1:]:
        if any(not torch.equal(local[a], local[b]) for a, b in zip(groups[0], other, strict=True)):
            return False, f"ranks {groups[0]} and {other} do not hold the same shards of {name}"
    return True, f"groups {groups}"


@check(
    "precision",
    "{run}: parameters and optimizer state in {masters}, gathers in {gather}, gradient"
    " reduction in {reduce}",
)
def precision(grading: Grading, run: str, masters: str, gather: str, reduce: str) -> Result:
    record = grading.runs[run]
    kept = {
        str(p["local"].dtype).removeprefix("torch.")
        for p in record.parameters(record.steps)[0].values()
    }
    reported = record.reported[0]
    # not the few numbers that a script sends itself, such as its loss
    large = PLAIN * reported["held"]["all"]
    seen = {
        key: sorted(
            {dtype.removeprefix("torch.") for _, size, dtype in reported[key] if size > large}
        )
        for key in ("gathers", "reduces")
    }
    found = (sorted(kept), seen["gathers"], seen["reduces"])
    return found == (
        [masters],
        [gather],
        [reduce],
    ), f"parameters {found[0]}, gathers {found[1]}, reductions {found[2]}"


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


@check("metrics", "{run}: {file} has one line a step, with the {keys} of one process")
def metrics(grading: Grading, run: str, file: str, keys: list[str], oracle: str = "") -> Result:
    """`oracle` is the file of the oracle if it has another name."""
    path, known = grading.out / file, oracle or file
    if not path.exists():
        return False, f"no file {file}"
    own, right = rows(path), rows(grading.oracle_out / known)
    folders = [
        grading.oracle_out.with_name(f"oracle{n + 1}") for n in range(len(grading.oracle.perturbed))
    ]
    others = [rows(folder / known) for folder in folders]
    if [row.get("step") for row in own] != [row["step"] for row in right]:
        return False, f"{file} has the steps {[row.get('step') for row in own]}"
    for number, row in enumerate(right):
        for key in keys:
            value = own[number].get(key)
            noise = max(abs(other[number][key] - row[key]) for other in others)
            limit = MULTIPLE * noise + FLOOR * abs(row[key])
            if not isinstance(value, float | int) or not abs(value - row[key]) <= limit:
                said = f"{key} of step {row['step']} is {value}, in one process {row[key]:.7g}"
                return False, f"{said} (allowed {limit:.1e})"
    return True, f"{len(own)} lines"


@check(
    "export",
    "{run}: {file} holds plain, whole tensors with the right values, under the names of"
    " the original script",
)
def export(
    grading: Grading,
    run: str,
    file: str,
    part: str = "",
    step: int = -1,
    average: bool = False,
    oracle: str = "",
) -> Result:
    """The values are the run's weights after `step` (its last one); with `average`, what the
    oracle's own file has.

    `oracle` is that file if it has another name.
    """
    path, record = grading.out / file, grading.runs[run]
    if not path.exists():
        return False, f"no file {file}"
    try:
        own = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        return False, f"{file} does not load: {str(error).splitlines()[0][:200]}"
    right = torch.load(grading.oracle_out / (oracle or file), weights_only=True)
    if part:
        own, right = own.get(part, {}), right[part]
    if set(own) != set(right):
        return False, f"{file} has the keys {sorted(set(own) ^ set(right))[:4]} too many or too few"
    known = [name for name in right if name in grading.oracle.run.weights(0) and not average]
    values = renamed(record.weights(record.steps if step < 0 else step), known)
    for name, tensor in right.items():
        if type(own[name]) is not torch.Tensor or own[name].shape != tensor.shape:
            found = f"a {type(own[name]).__name__} of {list(own[name].shape)}"
            return False, f"{name} is {found}, not a tensor of {list(tensor.shape)}"
        if name in values and not torch.equal(
            own[name].float(), values[name].reshape(tensor.shape).float()
        ):
            return False, f"{name} in {file} is not what the run had"
        if name not in values and distance(own[name], tensor) > MULTIPLE * FLOOR:
            return False, f"{name} in {file} is off by {distance(own[name], tensor):.1e}"
    return True, f"{len(right)} tensors"


@check("read-by-one", "{run}: one rank alone reads {file}")
def read_by_one(grading: Grading, run: str, file: str) -> Result:
    readers = [
        rank
        for rank, reported in enumerate(grading.runs[run].reported)
        if file in reported["opened"]
    ]
    return len(readers) == 1, f"read on ranks {readers}"


@check(
    "saves-in-background",
    "{run}: training goes on while the checkpoint of a step is written to a slow disk",
)
def saves_in_background(grading: Grading, run: str) -> Result:
    reported = [pair for rank in grading.runs[run].reported for pair in rank["completed"]]
    later = [step - int(folder.rpartition("_")[2]) for folder, step in reported]
    return any(
        more > 0 for more in later
    ), f"each checkpoint and the steps made when it was complete: {reported}"


@check("marker-last", "{run}: {file} names {named} and was written when that was complete")
def marker_last(grading: Grading, run: str, file: str, named: str) -> Result:
    path, metadata = grading.out / file, grading.out / named / ".metadata"
    if not path.exists() or not metadata.exists():
        return False, f"no {file}" if not path.exists() else f"{named} is not complete"
    if (reported := path.read_text(encoding="utf-8").strip()) != named:
        return False, f"{file} says {reported!r}"
    later = path.stat().st_mtime_ns - metadata.stat().st_ctime_ns
    return later >= 0, f"{file} was written {later / 1e6:.1f} ms after {named} was complete"


def meaning(path: Path) -> Any:
    """What a file says: a script without comments and docstrings, the values of a YAML file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return yaml.safe_load(text)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return ast.dump(tree)


@check(
    "unchanged",
    "{run} runs what was given: scripts and settings are the same but for comments and docstrings",
)
def unchanged(grading: Grading, run: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        given = grading.task.write("start", Path(folder) / "given")
        files = [
            p.relative_to(given) for p in sorted(given.rglob("*")) if p.suffix in (".py", ".yaml")
        ]
        gone = [str(file) for file in files if not (grading.code / file).is_file()]
        other = [
            str(f)
            for f in files
            if str(f) not in gone and meaning(grading.code / f) != meaning(given / f)
        ]
    if gone or other:
        return False, f"gone: {', '.join(gone) or 'none'}; changed: {', '.join(other) or 'none'}"
    return True, f"{len(files)} files"


@check("verdict", "the first line of {file} is `{says}`")
def verdict(grading: Grading, run: str, file: str, says: str) -> Result:
    path = grading.code / file
    if not path.is_file():
        return False, f"no file {file}"
    first = (path.read_text(encoding="utf-8").strip().splitlines() or [""])[0]
    return " ".join(
        first.lower().strip("#*`_ .").split()
    ) == says, f"it begins with {first[:100]!r}"


@check("killed", "{run} was killed while it saved, as planned")
def killed(grading: Grading, run: str) -> Result:
    reported = grading.failed.get(run, "")
    return (
        "ended with -9" in reported,
        reported or "it was not killed: no distributed checkpoint was completed often enough",
    )


def judge(grading: Grading, kind: str, reported: dict[str, Any]) -> Result:
    """One check; a run that leaves nothing to judge by, such as one without a step, or a file that
    is no JSON, does not pass it.
    """
    try:
        return CHECKS[kind].holds(grading, **reported)
    except Broken as error:
        return False, str(error)
    except (AttributeError, LookupError, OSError, RuntimeError, ValueError) as error:
        return False, f"nothing to judge by: {type(error).__name__} {error}"
