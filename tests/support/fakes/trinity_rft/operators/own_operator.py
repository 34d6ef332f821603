"""An experience operator in Trinity-RFT's form."""

from trinity.buffer.operators import EXPERIENCE_OPERATORS, ExperienceOperator


@EXPERIENCE_OPERATORS.register_module("near_the_best")
class NearTheBest(ExperienceOperator):
    def __init__(self, margin: float = 0.5, shift: float = 0.0):
        self.margin, self.shift = margin, shift

    def process(self, exps):
        best = max(exp.reward for exp in exps)
        kept = [exp for exp in exps if exp.reward >= best - self.margin]
        for exp in kept:
            exp.metrics["behind"] = best - exp.reward
            exp.reward += self.shift
            if exp.truncate_status == "response_truncated":
                exp.action_mask = exp.action_mask * 0
        return kept, {"best": best, "left_out": len(exps) - len(kept)}
