from ...analysis.declared_batch import divided_batches
from ..base import Evidence, Finding, Rule


class GlobalBatchAsSet(Rule):
    """A global batch that the script divides over its ranks has the same number of samples on any
    number of them.

    Why: the batch of a rank, or its micro-batches, is computed from the devices of one node, from
    another dim of the mesh, or with a division that rounds before it multiplies. The run trains on
    another global batch than was asked for, with as many steps too few or too many, and the same
    learning rate; nothing else shows it.
    Wrong:
        micro_batches = 256 // (8 * torch.cuda.device_count())  # the devices of one node
    Right:
        micro_batches = 256 // (8 * dist.get_world_size())
    Fix: Divide by the number of data ranks (of all nodes; not of tensor or context parallelism),
    multiply before dividing, and assert that nothing remains.
    Source: Lightning-AI/litgpt (iterations of hybrid sharding); OpenRLHF (ring attention).
    """

    needs = frozenset({"train", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.trained, evidence.single
        if single is None or not (run.steps() and single.steps()):
            return self.unknown(evidence.missing.get("single", "no single run was made"))
        mine, alone = run.global_batch(1).total(), single.global_batch(1).total()
        if not mine or not alone:
            return self.unknown("no samples were seen")
        if mine == alone:
            return self.passed(f"{alone} samples a step on {run.world_size} ranks as on one")
        for batch in divided_batches(evidence.sources, run.command):
            if alone in batch.values:
                text = (
                    f"`{batch.name}` is {alone}, and one process takes {alone} samples a step;"
                    f" {run.world_size} ranks take {mine}: it is divided over them here"
                )
                return self.failed(text, batch.place)
        return self.passed(
            "the script divides no batch over its ranks that one process takes whole"
        )
