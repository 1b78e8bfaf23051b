from ...analysis.divergence import location, place
from ...analysis.rank_guards import loop_is_plain
from ...evidence import Sources
from ..base import Finding, Run
from ._named import HangRule


class UnevenBatchesHang(HangRule):
    """Every rank runs the same number of forwards and backwards.

    Why: each forward and backward of a sharded model gathers and reduces over all ranks. A rank
    with one batch more than the others hangs in it: a dataset that the ranks do not divide evenly,
    packing, `drop_last=False`.
    Wrong:
        shard_of_rank = dataset[dist.get_rank() :: dist.get_world_size()]
        for batch in torch.utils.data.DataLoader(shard_of_rank, batch_size=batch_size):
            loss_of(model, batch).backward()
    Right:
        count = len(dataset) // dist.get_world_size()
        shard_of_rank = dataset[dist.get_rank() :: dist.get_world_size()][:count]
        for batch in torch.utils.data.DataLoader(shard_of_rank, batch_size=batch_size):
            loss_of(model, batch).backward()
    Fix: Give all ranks the same number of batches: use a DistributedSampler, cut each rank's share
    to the smallest (all-reduce the length with MIN), or feed batches of weight zero until the end.
    Source: PrimeIntellect-ai/prime-rl#2515; verl-project/verl#6176; huggingface/transformers
    PR#33483.
    """

    def foreseen(self, sources: Sources, run: Run) -> Finding:
        """Loaders of different lengths whose loop takes all of them: the end of the epoch would
        hang.
        """
        loaders = [[e for e in events if e.op == "data"] for events in run.progress.values()]
        for made in zip(*loaders, strict=False):
            lengths = [e.value for e in made]
            if (
                None in lengths
                or len(set(lengths)) == 1
                # Loaders of other lines on other ranks are other loaders.
                or any(e.frames != made[0].frames for e in made)
            ):
                continue
            what = (
                f"the ranks' loaders at {place(made[0])} have {', '.join(map(str, lengths[:8]))}"
                " batches"
            )
            for frame in made[0].frames[:1]:
                loop = loop_is_plain(sources, frame[0], frame[1])
                # Uneven loaders hang only where a plain loop takes all batches to the model; one
                # that stops at a fixed step, or runs no collective, is right
                # (zoo/evaluation_loop.py, zoo/uneven_shards.py).
                if loop is not None and _runs_model(run, frame[0], loop):
                    end = (
                        "and its loop runs the model on all of them: some ranks will hang at"
                        " its end"
                    )
                    return self.failed(f"{what}, {end}", location(frame))
            return self.passed(
                f"no run was stopped by this cause; {what}, but no loop takes all of them to the"
                " model"
            )
        return super().foreseen(sources, run)


def _runs_model(run: Run, file: str, loop: tuple[int, int]) -> bool:
    """Whether a model is run within the lines of a loop."""
    events = (
        e for events in run.progress.values() for e in events if e.op in ("forward", "backward")
    )
    return any(f[0] == file and loop[0] < f[1] <= loop[1] for e in events for f in e.frames)
