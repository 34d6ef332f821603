"""The reward of against_verl.py for veRL: random, like that of Trinity's rows. veRL loads this file by its path."""

import random
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return float(random.random() < 0.5)
