from ...trace.events import Ties, Untied
from ..base import Evidence, Finding, Rule


class WeightsNoLongerTied(Rule):
    """Weights that are tied when the model is built are tied when it is trained.

    Why: `to_empty` gives each place of a tied weight a tensor of its own. The head is then trained
    apart from the embedding: another model, with more parameters, whose loss falls as usual on any
    number of ranks.
    Wrong:
        with torch.device("meta"):
            model = nn.ModuleDict(
                {"tokens": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)}
            )
            model.head.weight = model.tokens.weight
        model.to_empty(device="cpu")  # two weights from here on
    Right:
        with torch.device("meta"):
            model = nn.ModuleDict(
                {"tokens": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)}
            )
        model.to_empty(device="cpu")
        model.head.weight = model.tokens.weight
    Fix: Tie the weights again after `to_empty`, before the optimizer is built.
    Source: law L3: the places that hold one parameter before `fully_shard` or `to_empty` are
    compared with those at the first forward. huggingface/transformers calls `tie_weights` after
    each load for this reason.
    """

    wants = "models"
    simulated = True

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        return (
            ""
            if run.all(Untied) or any(r.ties for r in run.all(Ties))
            else "no two modules share a parameter"
        )

    def judge(self, evidence: Evidence) -> Finding:
        if untied := evidence.trained.places(Untied):
            lost = untied[0]
            names = f"{' and '.join(lost.names)} were one parameter"
            return self.failed(
                f"{names} before `{lost.by}` and are {len(lost.names)} in training", lost.at_line
            )
        return self.passed("weights that were tied before sharding are tied in training")
