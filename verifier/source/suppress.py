"""`# fsdp2: ignore[rule] reason`: on the line, or on a line of its own above.

Without a reason it has no effect.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..config.policy import Checkouts
from ..errors import UserError
from ..finding import Hit, Remark, Suppression
from ..trace.events import Place
from .events import hit_at
from .project import Module, parse

RULE = "unused-suppression"
REFUSED = "does not count: the base branch has no such comment for this code"
_FORM = re.compile(r"#\s*fsdp2:\s*ignore(?:\[(?P<rules>[^\]]*)\])?(?P<reason>.*)")


def read(module: Module) -> Iterator[Suppression]:
    """The suppressions of a file, in order."""
    if "fsdp2:" not in module.source:
        return
    spans = list(_spans(module.tree))
    for line, column, comment in _comments(module):
        match = _FORM.match(comment)
        if match is None:
            continue
        rules = tuple(r.strip() for r in (match["rules"] or "").split(",") if r.strip())
        at = line if module.lines[line - 1][:column].strip() else _next_code(module, line)
        inside = [span for span in spans if at in span]
        covered = min(inside, key=len, default=range(at, at + 1))
        location = hit_at(RULE, "", module, line, "<module>").location
        yield Suppression(location, rules, match["reason"].strip(" -:"), covered)


def held_against(
    found: Sequence[Suppression], modules: Mapping[str, Module], checkouts: Checkouts
) -> Iterator[Suppression]:
    """The suppressions; one that the base branch does not have for the same code is refused."""
    allowed: dict[str, Counter[str]] = {}
    for one in found:
        file = one.location.file
        if file not in allowed:
            allowed[file] = _of_base(checkouts.before(Path(file)))
        keys = list(_keys(one, modules[file]))
        # without a reason it has no effect, and is reported as such
        counts = not one.reason or all(allowed[file][key] > 0 for key in keys)
        allowed[file].subtract(keys if counts else ())
        yield one if counts else replace(one, refused=REFUSED)


def _of_base(path: Path | None) -> Counter[str]:
    """How often it suppresses each rule, with the code that is covered."""
    try:
        module = parse(path) if path is not None and path.is_file() else None
    except UserError:
        module = None
    if module is None:
        return Counter()
    return Counter(key for one in read(module) if one.reason for key in _keys(one, module))


def _keys(one: Suppression, module: Module) -> Iterator[str]:
    """Each rule of a suppression with the code that it covers, without the comment."""
    lines = module.lines[one.lines.start - 1 : one.lines.stop - 1]
    code = " ".join(" ".join(_FORM.sub("", line).split()) for line in lines)
    for rule in one.rules:
        yield f"{rule}: {code}"


def remarks(found: Iterable[Suppression]) -> tuple[Remark, ...]:
    """What a report says of the suppressions that are refused."""
    return tuple(
        Remark(f"`# fsdp2: ignore[{', '.join(one.rules)}]` {one.refused}", one.location)
        for one in found
        if one.refused
    )


def _comments(module: Module) -> Iterator[tuple[int, int, str]]:
    """(line, column, text) of every comment that may be one of ours."""
    import io
    import tokenize

    try:
        for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
            if token.type == tokenize.COMMENT and "fsdp2" in token.string:
                yield token.start[0], token.start[1], token.string
    except (tokenize.TokenError, IndentationError):
        return


def _next_code(module: Module, line: int) -> int:
    """The next line that is neither empty nor a comment."""
    for number in range(line + 1, len(module.lines) + 1):
        text = module.lines[number - 1].strip()
        if text and not text.startswith("#"):
            return number
    return line


def _spans(tree: ast.Module) -> Iterator[range]:
    """The lines of each statement; of a compound one, its head."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            first = min(
                (d.lineno for d in getattr(node, "decorator_list", [])), default=node.lineno
            )
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            yield range(first, max(last, node.lineno) + 1)


Use = tuple[Suppression, str]


def covering(
    suppressions: Collection[Suppression], rule: str, location: Place | None
) -> Suppression | None:
    """The first suppression that covers a rule at a place."""
    return next((one for one in suppressions if one.covers(rule, location)), None)


def uses(
    suppressions: Collection[Suppression], places: Iterable[tuple[str, Place | None]]
) -> frozenset[Use]:
    """(suppression, rule) for each suppression that covers one of these (rule, location) of hits or
    failures.
    """
    found = ((covering(suppressions, rule, location), rule) for rule, location in places)
    return frozenset((one, rule) for one, rule in found if one is not None)


def problems(
    suppressions: Collection[Suppression],
    known: Collection[str],
    judged: Collection[str],
    used: Collection[Use],
) -> Iterator[Hit]:
    """What is wrong with suppressions: no rule, an unknown rule, no reason, or (of the judged
    rules) no use.
    """
    for one in (one for one in suppressions if not one.refused):
        if not one.rules:
            yield Hit(
                RULE, "the comment names no rule: `# fsdp2: ignore[rule-name] reason`", one.location
            )
        for rule in one.rules:
            if rule not in known:
                yield Hit(RULE, f"the comment names '{rule}', which is not a rule", one.location)
            elif not one.reason:
                yield Hit(
                    RULE,
                    f"the comment gives no reason for ignoring {rule}, so it has no effect",
                    one.location,
                )
            elif rule in judged and (one, rule) not in used:
                yield Hit(
                    RULE,
                    f"the comment ignores {rule}, which is not found on its line",
                    one.location,
                )
