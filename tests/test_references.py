"""The references: what they must cover, and that what they name exists."""

import inspect
import json
import re
from pathlib import Path

import pytest
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)

from documents import REFERENCES, ROOT, WRITTEN, claims, diagnosis, words
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import RaisedRule

# published failures, by name
CATALOG = (Path(__file__).parent / "catalog.txt").read_text(encoding="utf-8").split()
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in REFERENCES}
SINCE = json.loads((ROOT / "benchmarks/results/api_by_version.json").read_text(encoding="utf-8"))[
    "since"
]
LONGEST = 26_000  # characters, as one reading of an agent


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_form(path: Path) -> None:
    text = TEXTS[path.name]
    assert (
        text.isascii()
        and len(text.splitlines()) >= 100
        and len(text) <= LONGEST
        and len(REFERENCES) <= 13
    )
    assert "2.13.0" in text and "Contents:" in text
    assert not re.search(r"\beval\(|\.eval\(\)|\bexec\(", text)
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.M | re.S)
    named = re.findall(r"\[([a-z0-9-]+(?:,\s+[a-z0-9-]+)*)\](?!\()", prose)
    assert {rule for group in named for rule in re.split(r",\s+", group)} <= set(RULES), (
        "names in brackets are rules"
    )


def test_every_quoted_sentence_stands_in_a_reference() -> None:
    beside = (ROOT / "SKILL.md", ROOT / "verifier" / "source" / "migration.json")
    texts = [
        words(text)
        for text in [*TEXTS.values(), *(path.read_text(encoding="utf-8") for path in beside)]
    ]
    missing = [
        quote
        for claim in claims()
        for quote in claim.quotes
        if not any(words(quote) in text for text in texts)
    ]
    assert missing == []


def table(document: str, head: str) -> list[list[str]]:
    lines = TEXTS[document].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("| "):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_fsdp1_argument_by_argument() -> None:
    here = [row[0].strip("` ") for row in table("converting.md", "| FSDP1 | FSDP2 | note |")]
    theirs = [*inspect.signature(FullyShardedDataParallel.__init__).parameters][1:]
    assert sorted(here) == sorted(theirs)
    strategies = [row[0].strip("` ") for row in table("converting.md", "| strategy | FSDP2 |")]
    assert sorted(strategies) == sorted(strategy.name for strategy in ShardingStrategy)
    counterparts = " ".join(row[1] for row in table("converting.md", "| FSDP1 | FSDP2 | note |"))
    for name in ("mesh", "reshard_after_forward", "offload_policy", "mp_policy", "ignored_params"):
        assert name in counterparts and name in inspect.signature(fully_shard).parameters


def test_methods_of_a_sharded_module() -> None:
    rows = table("wrapping.md", "| method | use |")
    here = {name for row in rows for name in re.findall(r"`(\w+)\(", row[0])}
    deprecated = {"set_reduce_scatter_divide_factor"}
    assert here == {name for name in vars(FSDPModule) if not name.startswith("_")} - deprecated
    for row in rows:
        for name in re.findall(r"`(set_\w+)\(", row[0]):
            recurses = "recurse" in inspect.signature(getattr(FSDPModule, name)).parameters
            assert (row[2] == "yes") == recurses, name


def test_stale_names_are_run_and_dated() -> None:
    quoted = {quote for claim in claims() for quote in claim.quotes}
    rows = table("converting.md", "| stale prior |")
    assert len(rows) >= 12
    for stale, current, version, _ in rows:
        assert any(words(quote) in words(f"| {stale} |") for quote in quoted), stale
        shown = [
            date for name, date in SINCE.items() if re.search(rf"\b{re.escape(name)}\b", current)
        ]
        if stale.startswith("`reshard_after_forward"):
            shown = [SINCE["reshard_after_forward=None"]]
        if "set_requires_gradient_sync" in current:
            shown = [SINCE["FSDPModule"]]
        expected = (
            max(shown, key=lambda date: [int(part) for part in date.split(".")]) if shown else None
        )
        assert version == {None: "-", "2.5.1": "<= 2.5"}.get(
            expected, (expected or "").rpartition(".")[0]
        ), stale


def test_other_dates() -> None:
    names = {
        "ignored_params": "2.7",
        "reset_iter_state": "2.13",
        "set_reduce_scatter_unused_params": "2.13",
    }
    for name, version in names.items():
        assert SINCE[name].startswith(version)
        assert any(
            re.search(rf"{name}.{{0,40}}\(since {version}\)", words(text))
            for text in TEXTS.values()
        ), name


def test_every_published_failure_is_reached_from_a_text_or_a_symptom() -> None:
    reached = {rule for row in diagnosis() for rule in row.rules}
    assert sorted(set(CATALOG) - reached) == []
    assert reached - set(RULES) <= set(CATALOG)


def test_texts_and_patterns_agree() -> None:
    """Every row for a rule that knows an error by its text has a text it knows."""
    raised = {name: rule for name, rule in RULES.items() if isinstance(rule, RaisedRule)}
    for row in diagnosis():
        known = [raised[name] for name in row.rules if name in raised]
        if row.texts and known and not row.seen.startswith("`CUDA error"):
            text = f"SomeError: {row.texts[0].replace('...', 'x')}"
            assert any(re.search(rule.pattern, text) for rule in known), row


def test_fixed_errors_of_what_circulates() -> None:
    """Each of these was published wrongly in a place that agents read; tests/claims.md runs
    others.
    """
    everything = words(" ".join(TEXTS[path.name] for path in WRITTEN))
    for fact in (
        "bf16 weights and float32 reduction are the default to teach",
        "`nn.Module` has no `reset_parameters`",
        "so all ranks train on one batch",
        "Parity with DDP alone proves too little",
        *(
            "There is no `no_sync`",
            "over PCIe",
            "an export, not a checkpoint",
            "it is True for all but the root",
        ),
        *("`.metadata` is a pickle", "`to_empty` leaves them as garbage"),
    ):
        assert fact in everything, fact
