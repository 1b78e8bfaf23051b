from ...analysis.branches import loop_is_plain
from ...analysis.divergence import location, place
from ...evidence import Sources
from ...finding import Finding
from ...trace import Run
from ._named import HangRule


class UnevenBatchesHang(HangRule):
    """Every rank runs the same number of forwards and backwards.

    Why: each forward and backward of a sharded model gathers and reduces over all ranks. A rank with a batch more than
    the others waits in it for ever: a data set that the ranks do not divide, packing, `drop_last=False`.
    Wrong:
        shard_of_rank = dataset[dist.get_rank() :: dist.get_world_size()]
        for batch in torch.utils.data.DataLoader(shard_of_rank, batch_size=batch_size):
            loss_of(model, batch).backward()
    Right:
        count = len(dataset) // dist.get_world_size()
        shard_of_rank = dataset[dist.get_rank() :: dist.get_world_size()][:count]
        for batch in torch.utils.data.DataLoader(shard_of_rank, batch_size=batch_size):
            loss_of(model, batch).backward()
    Fix: Give all ranks the same number of batches: a DistributedSampler, or cut each rank's share to the smallest
    (all-reduce the length with MIN), or feed empty-weight batches to the end.
    Source: PrimeIntellect-ai/prime-rl#2515; verl-project/verl#6176; huggingface/transformers PR#33483.
    """

    def foreseen(self, sources: Sources, run: Run) -> Finding:
        """Loaders of different lengths whose loop takes all of them: the end of the epoch would hang."""
        loaders = {rank: [e for e in events if e.op == "data"] for rank, events in run.progress.items()}
        for made in zip(*loaders.values(), strict=False):
            lengths = [e.value for e in made]
            if None in lengths or len(set(lengths)) == 1 or any(e.frames != made[0].frames for e in made):
                continue
            told = f"the loader at {place(made[0])} has {', '.join(map(str, lengths[:8]))} batches on the ranks"
            frame = made[0].frames[0] if made[0].frames else None
            loop = loop_is_plain(sources, frame[0], frame[1]) if frame is not None else None
            if frame is not None and loop is not None and _meets_in(run, frame[0], loop):
                end = "and its loop runs the model for every one: some ranks will wait for the others at its end"
                return self.failed(f"{told}, {end}", location(frame))
            return self.passed(
                f"no run was stopped by it; but {told}: nothing here may run the model to the loader's end"
            )
        return self.passed("no run was stopped by it")


def _meets_in(run: Run, file: str, loop: tuple[int, int]) -> bool:
    """Whether a model is run within the lines of a loop."""
    return any(
        event.op in ("forward", "backward") and any(f[0] == file and loop[0] < f[1] <= loop[1] for f in event.frames)
        for events in run.progress.values()
        for event in events
    )
