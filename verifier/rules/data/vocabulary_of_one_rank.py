import re
from collections import defaultdict
from collections.abc import Iterable

from ...analysis.state import states
from ...tolerances import LEAST_TEXTS
from ...trace.events import Held, State
from ..base import Evidence, Finding, Rule, some

_ENTRY = re.compile(r"(.+)\[(['\"].*['\"])\]$")  # of a dict whose keys are texts


class VocabularyOfOneRank(Rule):
    """Ranks that number words or categories number them alike.

    Why: a vocabulary in order of first appearance that each rank builds from its own part of the
    data gives the same word another number on each rank. All ranks train one embedding table, each
    for another meaning of its rows; the saved vocabulary fits one rank.
    Wrong:
        vocabulary = {}
        for word in words[rank::world_size]:
            vocabulary.setdefault(word, len(vocabulary))
    Right:
        # of all words
        vocabulary = {word: number for number, word in enumerate(sorted(set(words)))}
    Fix: Build it from the whole data set in a fixed order, or on rank 0 and
    `broadcast_object_list`.
    Source: facebookresearch/pytext PR#554 (label vocabularies of sharded data); law L5: dicts from
    texts to consecutive whole numbers that the training loop can reach, on every rank at the first
    forward, where the samples of the first step are others than those of one process.
    """

    needs = frozenset({"train", "single"})
    one_rank = "all data are its own"

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.trained, evidence.single
        ranks = [_vocabularies(next(iter(states(trace).values()), {})) for trace in run.traces]
        known = set(ranks[0]).intersection(*ranks[1:])
        if not known:
            return self.not_applicable(
                "the training loop reaches no dict from texts to consecutive numbers"
            )
        found = {
            path: apart
            for path in sorted(known)
            if (apart := _apart([rank[path] for rank in ranks]))
        }
        if not found:
            return self.passed(f"all ranks number the texts of {some(sorted(known))} alike")
        if single is None or not single.steps():
            return self.unknown(evidence.missing.get("single", "no run of one process was made"))
        # If the model is given the samples of one process, the vocabulary was not used for them (or
        # only for a log).
        if run.same_batch(1, single):
            return self.passed(
                f"ranks number the texts of {some(found)} otherwise, and train on the samples of"
                " one process"
            )
        path, (text, numbers) = next(iter(found.items()))
        others = f"; so do {len(found) - 1} more" if len(found) > 1 else ""
        what = (
            f"`{path}` gives {text} the numbers {', '.join(map(str, numbers))} on ranks 0 to"
            f" {len(ranks) - 1}{others}"
        )
        place = run.data_line() or run.places(State)[0].at_line
        return self.failed(f"{what}; the samples of step 1 are not those of one process", place)


def _vocabularies(values: dict[str, Held]) -> dict[str, dict[str, int]]:
    """{path of a dict: {text: number}} of those that number texts consecutively."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for path, held in values.items():
        if held.dtype == "int" and held.value is not None and (entry := _ENTRY.match(path)):
            found[entry[1]][entry[2]] = int(held.value)
    return {path: entries for path, entries in found.items() if _consecutive(entries.values())}


def _consecutive(numbers: Iterable[int]) -> bool:
    ordered = sorted(numbers)
    # Consecutive numbers are indices into a table of embeddings; other numbers by text are counts.
    return len(ordered) >= LEAST_TEXTS and ordered == list(
        range(ordered[0], ordered[0] + len(ordered))
    )


def _apart(ranks: list[dict[str, int]]) -> tuple[str, list[int]] | None:
    """The first text that all ranks number, and not alike, with their numbers; None if there is
    none or they share too few.
    """
    shared = [text for text in ranks[0] if all(text in other for other in ranks)]
    apart = (
        (text, [rank[text] for rank in ranks])
        for text in shared
        if len({rank[text] for rank in ranks}) > 1
    )
    return next(apart, None) if len(shared) >= LEAST_TEXTS else None
