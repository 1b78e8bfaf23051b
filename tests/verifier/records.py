"""Constructed runs, for judging without a launch: say what each rank recorded, get the Run that
`read_run` would give.
"""

import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import pytest

from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding, Hit
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Ended, Run, Trace
from verified_fsdp2.verifier.trace.events import Event, Part, Place
from verified_fsdp2.verifier.trace.typed import KINDS, conversions, default_of

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
LINE = Place(file="train.py", line=1, function="main", code="code")
NAMES = (
    "embed.weight",
    "blocks.0.up.weight",
    "blocks.1.up.weight",
    "blocks.1.down.weight",
    "head.weight",
)
DIRECTION = (1.0, -2.0, 0.5, 3.0)


def cases(names: str, *rows: Any, **more: Any) -> pytest.MarkDecorator:
    """A test for each row: its arguments, `names`, separated by commas, take the row's values."""
    return pytest.mark.parametrize(names, rows, **more)


def brief(finding: Finding | Hit) -> bool:
    """Whether a message, without the error that it quotes, has at most 3 lines of 100 columns, and
    states the limit.
    """
    text = finding.message if isinstance(finding, Hit) else finding.evidence
    states = isinstance(finding, Hit) or finding.status != "fail" or finding.limit is None
    own = re.sub(r"(raised \w+): .*? in (?=\S+:\d+ )", r"\1 in ", text.partition("\n")[0])
    return len(textwrap.wrap(own, 100)) <= 3 and (
        states or bool(re.search("allowed|expected", text))
    )


def parameter(name: str = "w", copy: int = 0, **more: Any) -> dict[str, Any]:
    whole = {
        "name": name,
        "shape": [4, 4],
        "numel": 16,
        "dtype": "float32",
        "trainable": True,
        "managed": True,
    }
    shard = {
        "group": "",
        "local_numel": 8,
        "sketch": [1.0, 1.0, 0.0, 0.0, 0.0],
        "unset": 0,
        "copy": copy,
    }
    mesh = {"sharded": True, "placements": ["S(0)"], "mesh": [2], "mesh_names": [], "ranks": [0, 1]}
    return {**whole, **shard, **mesh, **more}


def model(*parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {
        "kind": "model",
        "root": "",
        "cls": "M",
        "buffers": [],
        "groups": [{"module": "", "parameters": 1}],
    }
    return {
        **base,
        "blocks": [],
        "starting_point": "loaded",
        "parameters": list(parameters or [parameter()]),
        **more,
    }


def wrap(
    ranks: list[int], names: tuple[str, ...] = (), shape: tuple[int, ...] = (), **more: Any
) -> dict[str, Any]:
    mesh = {"shape": list(shape or (len(ranks),)), "names": list(names), "ranks": ranks}
    return {"kind": "wrap", "modules": ["M"], "mesh": mesh, "explicit_dims": False, **more}


def micro(
    step: int = 1, loss: float = 1.0, rows: tuple[int, ...] = (), **more: Any
) -> dict[str, Any]:
    base = {
        "kind": "micro",
        "step": step,
        "micro": 1,
        "loss": loss,
        "rows": list(rows),
        "criteria": [],
        "random": "r",
    }
    return {**base, **more}


def entropy(valid: int, gradient: float, reduction: str = "mean") -> list[dict[str, Any]]:
    return [{"reduction": reduction, "valid": valid, "gradient": gradient}]


def step(number: int = 1, grads: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    grads = {"w": [1.0, 0.5, 0.0, 0.0, 0.0]} if grads is None else grads
    base = {
        "kind": "step",
        "step": number,
        "optimizer": 0,
        "cls": "torch.optim.adamw.AdamW",
        "lr": [0.1],
    }
    lists = {
        "held": list(grads),
        "strangers": [],
        "unsynced": [],
        "grads": grads,
        "grads_at_step": grads,
    }
    return {**base, **lists, "state": {}, "weights": {"w": [1.0, 1.0, 0.0, 0.0, 0.0]}, **more}


def stepped(number: int = 1, **more: Any) -> dict[str, Any]:
    base = {
        "kind": "stepped",
        "step": number,
        "optimizer": 0,
        "weights": {"w": [1.0, 0.9, 0.0, 0.0, 0.0]},
    }
    return {**base, "moved": {"w": [0.01, -0.1, 8.0]}, **more}


def steps(*between: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank records in one step, with `between` before it."""
    return [model(), *between, micro(), step(), stepped()]


def end(error: str, message: str = "", **more: Any) -> dict[str, Any]:
    """The last record of a rank that raised."""
    return {
        "kind": "end",
        "how": "exception",
        "error": error,
        "message": message,
        "frames": [LINE],
        **more,
    }


def run(*ranks: list[dict[str, Any]], role: str = "train", **more: Any) -> Run:
    """A run; each argument is what one rank recorded, which completed if its last record is no
    end.
    """
    traces, exits = [], []
    for rank, records in enumerate(ranks):
        ended = (
            records
            if records and records[-1]["kind"] == "end"
            else [*records, {"kind": "end", "how": "stopped"}]
        )
        full = [
            {"seq": k, "at": float(k), "at_line": LINE, **record} for k, record in enumerate(ended)
        ]
        traces.append(trace(rank, full))
        exits.append(Ended(rank, int(ended[-1]["how"] == "exception"), False))
    return Run(role, len(ranks), tuple(traces), tuple(exits), **more)


def stopped(error: str, message: str, *ranks: list[dict[str, Any]]) -> Run:
    """The run of `ranks`, of which rank 0 raised."""
    return run([*ranks[0], end(error, message)], *ranks[1:])


def ended(made: Run, how: str = "exception") -> Run:
    """The run, each rank of which ended so."""
    for one in made.traces:
        object.__setattr__(one.end, "how", how)
    return made


def vector(length: float) -> list[float]:
    """The sketch of a tensor in DIRECTION."""
    return [length * length * 4.0, *(length * x for x in DIRECTION)]


def gradients(lengths: float | Mapping[str, float | None]) -> dict[str, Any]:
    """Gradients in one direction, of these lengths (1 for the rest)."""
    own = (
        dict.fromkeys(NAMES, lengths)
        if isinstance(lengths, float)
        else {**dict.fromkeys(NAMES, 1.0), **lengths}
    )
    return {name: None if length is None else vector(length) for name, length in own.items()}


def trained(
    ranks: int = 2,
    grads: float | Mapping[str, float | None] = 1.0,
    at_step: float | Mapping[str, float | None] | None = None,
    moves: Sequence[Mapping[str, float]] = (),
    losses: tuple[float, ...] = (3.0, 2.0, 1.0),
    micros: int = 1,
    along: float = -0.1,
    between: Sequence[Mapping[str, float]] = (),
    states: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> Run:
    """A run of as many steps as losses; `moves[k]` are extra lengths of weights after step k+1,
    `between[k]` before it, by parameter; `states[k]` is what it holds when step k+1 begins.
    """
    records: list[list[dict[str, Any]]] = []
    found = {
        "grads": gradients(grads),
        "grads_at_step": gradients(grads if at_step is None else at_step),
    }
    for rank in range(ranks):
        rows = [model(*(parameter(name, copy=rank) for name in NAMES))]
        for k, loss in enumerate(losses):
            extra = moves[k] if moves else {}
            before, after = (
                {
                    name: [1.0, *(x * (1.0 - 0.1 * at + more_of.get(name, 0.0)) for x in DIRECTION)]
                    for name in NAMES
                }
                for at, more_of in ((k, between[k] if between else {}), (k + 1, extra))
            )
            own = tuple(range(1, 9))[rank::ranks]
            if states:
                rows += [
                    {
                        "kind": "state",
                        "step": k + 1,
                        "values": states[k],
                        "evaluations": 0,
                        "in_eval": [],
                    }
                ]
            rows += [micro(k + 1, loss, own)] + [micro(k + 1, 0.0)] * (micros - 1)
            rows += [step(k + 1, **found, weights=before)]
            rows += [
                stepped(k + 1, weights=after, moved={key: [0.01, along, 8.0] for key in NAMES})
            ]
        records.append(rows)
    return run(*records, **more)


class Recorder:
    """Stands in for a session, or its writer and frames: it keeps what is written."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def report(self, symbol: str, error: BaseException) -> None:
        raise error

    def here(self) -> Place:
        return LINE


def judge(rule: str, *ranks: Any, **more: Any) -> Finding:
    """The finding on a run, or on what each rank recorded, `more` goes into the evidence; or on the
    evidence itself.
    """
    if isinstance(ranks[0], Evidence):
        return judge_one(RULES[rule], ranks[0])
    train = ranks[0] if isinstance(ranks[0], Run) else run(*ranks)
    return judge_one(RULES[rule], Evidence(**{"train": train, "full_precision": train, **more}))


def sources(text: str = "") -> dict[str, Sources]:
    """Evidence of a script with this text."""
    return {"sources": Sources({"train.py": text}, ("train.py",))}


def row(
    rule: str, status: str, *ranks: Any, at: Any = None, names: tuple[str, ...] = (), **more: Any
) -> Any:
    """A case of `judged_as`: what `judge` takes, and of the finding its status, its location and
    what it names.
    """
    return pytest.param(rule, status, ranks, at, names, more, id=f"{rule}-{status}")


def judged_as(*rows: Any) -> Any:
    @cases("rule, status, ranks, at, names, more", *rows)
    def test(
        rule: str, status: str, ranks: Any, at: Any, names: tuple[str, ...], more: dict[str, Any]
    ) -> None:
        found = judge(rule, *ranks, **more)
        assert (found.status, at or found.location) == (status, found.location), found.evidence
        assert [name for name in names if name not in found.evidence] == []

    return test


def trace(rank: int, records: typing.Iterable[dict[str, Any] | Event]) -> Trace:
    return Trace(
        rank, tuple(record if isinstance(record, Event) else event(record) for record in records)
    )


def event(data: dict[str, Any]) -> Event:
    """An event of a dict that a test wrote: what is missing is empty, what is unknown is left
    out.
    """
    made: Event = _made(KINDS[data["kind"]], data)
    return made


def _made(cls: type[Part], data: Any) -> Any:
    if isinstance(data, cls):
        return data
    hints, plan = typing.get_type_hints(cls), conversions(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in data:
            value = data[field.name]
            values[field.name] = _nested(hints[field.name], value) if field.name in plan else value
        elif default_of(field) is MISSING:
            values[field.name] = _empty(hints[field.name])
    return cls(**values)


def _nested(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(hint, type) and issubclass(hint, Part):
        return _made(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [_nested(arguments[0], item) for item in value]
    if origin is dict:
        return {key: _nested(arguments[1], item) for key, item in value.items()}
    return _nested(next(a for a in arguments if a is not type(None)), value)


def _empty(hint: Any) -> Any:
    if type(None) in typing.get_args(hint):
        return None
    kind = typing.get_origin(hint) or hint
    return kind() if kind in (str, int, float, bool, list, dict) else None
