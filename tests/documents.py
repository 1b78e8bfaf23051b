"""The documents, cut into code blocks; and the claims of claims.md, each with the sentences that it
shows.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verified_fsdp2.verifier.report.rule_page import markdown
from verified_fsdp2.verifier.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
REFERENCES = sorted((ROOT / "references").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SKILL.md", *REFERENCES]
# The blocks of the other documents run on two ranks.
ONE_RANK = {
    "README.md",
    "CONTRIBUTING.md",
    "SKILL.md",
    "contract.md",
    "verify.md",
    "verify-project.md",
    "reliability.md",
    "explain",
    "review.md",
}
# that a copy of the pack may have, and what each rule adds
BYTES, BYTES_OF_A_RULE = 2_600_000, 6_000


def bytes_of_a_copy() -> int:
    """How large a copy of the pack may be: a new rule, with its record and its pages, raises no
    limit.
    """
    return BYTES + BYTES_OF_A_RULE * len(RULES)


WRITTEN = [path for path in REFERENCES if path.name not in ONE_RANK]
CLAIMS = Path(__file__).parent / "claims.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
CLAIM = re.compile(r"((?:^> [^\n]*\n\n)+)```python\n(.*?)^```", re.M | re.S)
WITH = re.compile(r"^# with: (\S+) (\w+)\n", re.M)
LIBRARY = re.compile(r"^(?:from|import) (accelerate|lightning|peft|transformers)\b", re.M)


@dataclass(frozen=True)
class Block:
    name: str  # that of a file
    where: str
    text: str
    ranks: int
    quotes: tuple[str, ...] = ()

    @property
    def library(self) -> str | None:
        """The package beside torch that it needs."""
        found = LIBRARY.search(self.text)
        return found[1] if found else None


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, text) of every block in a language, those of the rules' pages included."""
    found = []
    texts = {document.name: document.read_text(encoding="utf-8") for document in DOCUMENTS}
    texts |= {f"explain {name}": markdown(rule) for name, rule in RULES.items()}
    for name, text in texts.items():
        for match in BLOCK.finditer(text):
            if match[1] == language:
                found.append((f"{name}:{line_of(text, match.start())}", match[2]))
    return found


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def python_blocks() -> Iterator[Block]:
    """Every Python block; before it what it calls of the blocks before it in its document."""
    defined: dict[tuple[str, str], str] = {}  # the block that defines a name in a document
    for number, (where, block) in enumerate(blocks("python")):
        document = where.rsplit(":", 1)[0]
        ranks = 1 if document.split(" ")[0] in ONE_RANK else 2
        own = re.findall(r"^(?:def|class) (\w+)", block, re.M)
        called = set(re.findall(r"(?<![\w.])(\w+)\(", block)).difference(own)
        text = "".join(
            dict.fromkeys(
                defined[document, name] for name in sorted(called) if (document, name) in defined
            )
        )
        defined |= {(document, name): block for name in own}
        yield Block(f"block{number:03}", where, text + block, on_ranks(block, ranks))


def claims() -> Iterator[Block]:
    """Every claim, with the blocks of the documents that it names put in."""
    text = CLAIMS.read_text(encoding="utf-8")
    for number, match in enumerate(CLAIM.finditer(text)):
        code = WITH.sub(lambda found: defining(found[1], found[2]), match[2])
        quotes = tuple(re.findall(r"^> (.*)$", match[1], re.M))
        where = f"{CLAIMS.name}:{line_of(text, match.start(2))}"
        yield Block(f"claim{number:03}", where, code, on_ranks(match[2], 2), quotes)


def on_ranks(text: str, ranks: int) -> int:
    found = re.search(r"^# on (\d+) ranks$", text, re.M)
    return int(found[1]) if found else ranks


def defining(document: str, name: str) -> str:
    """The one Python block of a reference that defines `name`."""
    text = (ROOT / "references" / document).read_text(encoding="utf-8")
    (found,) = (
        m[2] for m in BLOCK.finditer(text) if re.search(rf"^(?:def|class) {name}\b", m[2], re.M)
    )
    return found


def words(text: str) -> str:
    """The text on one line, so that a sentence is found however it is broken."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Row:
    """A row of the diagnosis: texts of errors (none for a symptom), what the rest of the first cell
    says, the rules.
    """

    texts: tuple[str, ...]
    seen: str
    rules: tuple[str, ...]

    def fits(self, message: str) -> bool:
        """Whether a part of an error's message is one of the texts; `...` stands for anything."""
        return any(
            re.search(".*".join(map(re.escape, text.split("..."))), message, re.S)
            for text in self.texts
        )


def diagnosis() -> list[Row]:
    """The rows of the diagnosis, and what the docs of rules themselves say is seen."""
    text = (ROOT / "references" / "diagnosis.md").read_text(encoding="utf-8")
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if (
            line.startswith("| ")
            and len(cells) == 3
            and cells[0] not in ("text", "what is seen", "what the ranks do", "entry")
        ):
            texts = tuple(re.findall(r"`([^`]+)`", cells[0]))
            named = re.findall(
                "`([a-z0-9]+(?:-[a-z0-9]+)+)`", line
            )  # beside the rules: names of the catalog
            if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+(, [a-z0-9-]+)*", cells[1]):
                named += cells[1].split(", ")
            rules = tuple(named)
            rows.append(Row(texts, cells[0], rules))
    seen = {rule.name: rule.page().get("Seen", "") for rule in RULES.values()}
    return rows + [
        Row(tuple(re.findall(r"`([^`]+)`", text)), text, (name,))
        for name, text in seen.items()
        if text
    ]
