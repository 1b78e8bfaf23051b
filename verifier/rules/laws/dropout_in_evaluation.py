from ...analysis.applicability import no_evaluation
from ...trace.events import DroppedInEvaluation, State
from ..base import Evidence, Finding, Rule


class DropoutInEvaluation(Rule):
    """A model that evaluates drops nothing.

    Why: `F.dropout` and `scaled_dot_product_attention` know nothing of a module's eval mode: with a
    rate and no `self.training` beside it they drop in evaluation, too. Scores are those of a model
    that is thinned at random, early stopping follows their noise, and each evaluation takes random
    numbers from the training.
    Wrong:
        thinned = F.dropout(inputs, 0.1)  # in a forward: in eval mode, too
    Right:
        thinned = F.dropout(inputs, 0.1, model.training)
    Fix: Give the rate only while `self.training`: `F.dropout(x, rate, self.training)`, or
    `dropout_p=rate if self.training else 0.0`.
    Source: law L8: the probe records a functional dropout with a rate in a forward without
    gradients whose module is in eval mode; that of an `nn.Dropout` in training mode is meant (Monte
    Carlo dropout). huggingface/transformers#33844.
    """

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        seen = run.all(DroppedInEvaluation) or any(r.evaluations for r in run.places(State))
        reason = "no model evaluated within the steps that were run"
        return "" if seen else no_evaluation(evidence, reason)

    def judge(self, evidence: Evidence) -> Finding:
        found = evidence.trained.all(DroppedInEvaluation)
        if not found:
            return self.passed("no dropout was active while a model evaluated")
        first = found[0]
        return self.failed(
            f"before step {first.step} this dropout is active in a forward without gradients of a"
            " model in eval mode",
            first.at_line,
        )
