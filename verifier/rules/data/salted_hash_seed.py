import ast
from collections.abc import Iterator

from ...source.flow_queries import text
from ...source.values import Value
from ..base import Flow, Hits, SourceRule

# Only what a seed is computed from by arithmetic carries the salt; an object that was found by a
# hash does not.
_ARITHMETIC = frozenset({"abs", "int", "max", "min", "pow", "round", "sum", "hash"})
_SEEDS = (
    "torch.manual_seed",
    "random.seed",
    "random.Random",
    "numpy.random.seed",
    "numpy.random.default_rng",
)


class SaltedHashSeed(SourceRule):
    """A seed that ranks share is not made by `hash` of a string.

    Why: Python salts the hashes of strings anew in each process. Ranks that shuffle with
    `hash(name)` have different orders: some samples are seen twice, others never. A resumed run has
    another order again.
    Wrong:
        generator = torch.Generator().manual_seed(hash("train-0") % 2**31)
        order = torch.randperm(64, generator=generator)
    Right:
        import zlib
        generator = torch.Generator().manual_seed(zlib.crc32(b"train-0"))
        order = torch.randperm(64, generator=generator)
    Fix: Use a hash without salt (`zlib.crc32`, `hashlib.sha256`), or a number; PYTHONHASHSEED must
    be equal on all ranks.
    Source: uber/petastorm PR#247 (shards by the hash of a path overlap); nv-legate/cupynumeric
    PR#825; docs.python.org/3/reference/datamodel.html#object.__hash__; law L9. Forked ranks share
    one salt, torchrun's do not: only the sources, or --launcher torchrun, show it.
    """

    named_by = ("hash",)

    def detect(self, flow: Flow) -> Hits:
        for event in [*flow.ops(*_SEEDS), *flow.methods("manual_seed", "seed")]:
            made = [
                part
                for value in event.args
                for part in _computed(value)
                if part.name in ("hash", "builtins.hash")
            ]
            if any(_of_text(part.node) for part in made):
                yield (
                    f"{text(event.node)}: `hash` of a string is another number in each process",
                    event,
                )


def _computed(value: Value) -> Iterator[Value]:
    """The values from which a number is computed: not all that a file or an object was found by."""
    queue, seen = [value], {id(value)}
    while queue:
        current = queue.pop()
        yield current
        arithmetic = (
            current.kind in ("derived", "either") or current.name.rpartition(".")[2] in _ARITHMETIC
        )
        queue += [part for part in current.parts if id(part) not in seen] if arithmetic else []
        seen.update(id(part) for part in current.parts)


def _of_text(node: ast.AST | None) -> bool:
    """Whether a call of `hash` is given text, alone or in a tuple; numbers have no salt."""
    for part in ast.walk(node) if node is not None else ():
        # Python salts the hash of text (str, bytes) for each process; that of numbers and of tuples
        # of numbers is the same everywhere (fault salted_hash_seed.yaml).
        made = isinstance(part, ast.Call) and getattr(part.func, "id", "") in ("str", "repr")
        if (
            made
            or isinstance(part, ast.JoinedStr)
            or isinstance(getattr(part, "value", None), str | bytes)
        ):
            return True
    return False
