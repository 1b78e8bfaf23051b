from ...trace.events import Shard
from ..base import Evidence, Finding, Rule, count, some
from ._replicas import NO_REPLICAS, replicas_apart, replicas_at_start


class HsdpReplicasDivergeAtInit(Rule):
    """With a hybrid mesh all replicas start from the same weights.

    Why: `fully_shard` neither broadcasts nor compares over the replicate dim. Replicas with
    different initial weights get equal gradients and stay different. A resume hides it, since a
    checkpoint keeps one replica.
    Wrong:
        replica = mesh["dp_replicate"].get_local_rank()
        torch.manual_seed(seed + replica)  # different weights in every replica
        model = shard(Decoder(), mesh=mesh)
    Right:
        torch.manual_seed(seed)
        model = shard(Decoder(), mesh=mesh)
    Fix: Use one seed on all ranks before the model is built, or broadcast rank 0's weights
    (`set_model_state_dict` with `broadcast_from_rank0=True`).
    Source: allenai/OLMo-core PR#319; mosaicml/llm-foundry PR#830.
    """

    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        return "" if replicas_at_start(evidence.trained) else NO_REPLICAS

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        replicas = replicas_at_start(run)
        if apart := replicas_apart(replicas):
            which = f"{count(len(apart), 'parameter')} of {len(replicas)} ({some(apart)})"
            number = max(len(r) for r in replicas.values())
            what = f"{which} differ between the {number} replicas at the first forward"
            return self.failed(what, run.line_of(Shard))
        return self.passed(
            f"{count(len(replicas), 'parameter')} equal in all replicas at the first forward"
        )
