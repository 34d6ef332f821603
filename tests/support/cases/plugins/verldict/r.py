"""A reward brought from veRL: its dict has the score, and what is only for the log."""

from trinity.plugins import reward_function


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = solution_str.strip().split()[-1] if solution_str.strip() else ""
    right = found == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": found}


@reward_function("verldict")
def verldict(item, args):
    return compute_score("sums", item.response, item.truth)
