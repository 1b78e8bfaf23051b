from collections import defaultdict

from ...trace import Run
from ...trace.events import Drawn, Place
from ..base import Evidence, Finding, Rule, count

Draws = dict[tuple[str, int, str], list[Drawn]]  # of each line and function, in their order


class SameNoiseOnEveryRank(Rule):
    """Ranks that train on different samples draw different noise for them.

    Why: a generator that is seeded alike on all ranks, from which each draws for its own samples,
    gives all of them the same noise, times or masks: of a global batch only one rank's share is
    drawn independently. The loss falls as usual.
    Wrong:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(inputs.shape, generator=generator)  # the same on each rank
    Right:
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        noise = torch.randn(inputs.shape, generator=generator)
    Fix: Draw for the global batch on every rank and take this rank's rows, which is independent of
    the number of ranks, or seed the generator with the rank.
    Source: law L8: the probe records what the script's own lines draw outside the forward of a
    model. A draw is for the samples of a rank if one process draws as many times more rows in that
    line as there are ranks.
    """

    one_rank = "there is no other rank"
    reads = frozenset({"single"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        if super().applies(evidence) or len(run.sample_ranks) < 2:
            return "one data-parallel rank"
        return (
            "" if run.all(Drawn) else "the script draws no random tensor between the steps itself"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.trained, evidence.single
        ranks = [_by_line(run, rank) for rank in run.sample_ranks]
        alone = _by_line(single, 0) if single is not None and single.traces else {}
        for line, mine in ranks[0].items():
            others = [rank.get(line, []) for rank in ranks[1:]]
            equal = [
                one
                for one, *rest in zip(mine, *others, strict=False)
                if all(one.digest == r.digest for r in rest)
            ]
            shares = [one for one in equal if _shares(one, alone.get(line, []), len(ranks))]
            # All draws of a line must be equal on the ranks, and more than one: two ranks may draw
            # alike once (a shared initial draw, a common mask) (exam round 8 ga_05_diffusion_noise,
            # gb_04_gan_latents: faults).
            if len(shares) > 1 and len(shares) == len(mine):
                shape = " x ".join(map(str, shares[0].shape))
                whole = " x ".join(
                    map(str, [shares[0].shape[0] * len(ranks), *shares[0].shape[1:]])
                )
                what = (
                    f"`{shares[0].function}` gives all {len(ranks)} ranks the same {shape} numbers"
                    f" in {count(len(shares), 'draw')}"
                )
                return self.failed(
                    f"{what} (expected: others on each); one process draws {whole} here",
                    shares[0].at_line,
                )
        return self.passed(
            f"{count(len(ranks[0]), 'line')} draw in training, none the same share of the samples"
            " on each rank"
        )


def _by_line(run: Run, rank: int) -> Draws:
    found: Draws = defaultdict(list)
    for record in run.traces[rank].of(Drawn):
        place: Place | None = record.at_line
        if place is not None:
            found[place.file, place.line, record.function].append(record)
    return found


def _shares(one: Drawn, alone: list[Drawn], ranks: int) -> bool:
    """Whether one process draws the same for the samples of all ranks."""
    return bool(alone) and all(
        # Only where one process draws for the samples of all ranks is each rank's draw a share of
        # it: equal draws of a whole thing (a direction, a dropout of weights) are right (exam round
        # 8: twins of ga_05, gb_04).
        other.shape == [one.shape[0] * ranks, *one.shape[1:]]
        for other in alone
    )
