"""Translates veRL's `rollout_correction`, which Trinity-RFT passes on to veRL, into our keys.

rho is the ratio of the trainer's probability to the engine's, in veRL's terms exp(old_log_prob - rollout_log_prob).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# key -> its counterpart here
MEANINGS = {
    "bypass_mode": "`decoupled`: false for true, and true for false",
    "rollout_is": "`token_cap` or `sequence_cap`, for token or sequence",
    "rollout_is_threshold": "the cap, 2.0 unless given",
    "rollout_rs": "`token_range` for token_k1, `geometric_range` for seq_mean_k1; other statistics are refused",
    "rollout_rs_threshold": "the range: [1 / upper, 1 / lower], since veRL's bounds are of 1 / rho",
    "rollout_is_batch_normalize": "refused unless false: weights are not normalized",
    "rollout_token_veto_threshold": "refused unless null: token_range leaves out tokens, and not their sequences",
    "loss_type": "refused unless ppo_clip: REINFORCE with weights is `policy_loss_fn: opmd` with `tau: 0` and a cap",
}
_CAPS = {"token": "token_cap", "sequence": "sequence_cap"}
_RANGES = {"token_k1": "token_range", "seq_mean_k1": "geometric_range"}


@dataclass
class Translated:
    """`values`: our keys. `taken`: the use of each of veRL's keys in MEANINGS. `refused`: reasons, by veRL's key."""

    values: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def set(self, theirs: str, ours: str, value: Any) -> None:
        self.values[ours] = value
        self.taken[theirs] = f"becomes {ours}: {value if not isinstance(value, bool) else str(value).lower()}"


def translated(theirs: Mapping[str, Any]) -> Translated:
    """Translates the keys of MEANINGS in a YAML; null counts as absent."""
    given = {key: value for key, value in theirs.items() if value is not None}
    result = Translated(taken=dict.fromkeys(theirs.keys() - given.keys(), "asks for nothing"))
    bypass = given.get("bypass_mode")
    if bypass is not None and not isinstance(bypass, bool):
        result.refused["bypass_mode"] = "must be true or false"
    elif bypass is not None or "rollout_is" in given or "rollout_rs" in given:
        result.set("bypass_mode", "decoupled", not bypass)
        if bypass is None:
            result.taken["bypass_mode"] = f"is false unless given, and {result.taken['bypass_mode']}"
    if given.get("loss_type", "ppo_clip") != "ppo_clip":
        result.refused["loss_type"] = "REINFORCE with weights is policy_loss_fn: opmd with tau: 0, and a cap"
    for key, why in (
        ("rollout_is_batch_normalize", "weights are not normalized"),
        ("rollout_token_veto_threshold", "token_range leaves out tokens, and not their sequences"),
    ):
        if given.get(key, False) is not False:
            result.refused[key] = why
    _cap(given, bool(bypass), result)
    _ranges(given, result)
    for key in given.keys() - result.refused.keys():
        result.taken.setdefault(key, "says nothing more")
    return result


def _cap(given: Mapping[str, Any], bypass: bool, result: Translated) -> None:
    level, threshold = given.get("rollout_is"), given.get("rollout_is_threshold", 2.0)
    if level is None:
        return
    if not isinstance(level, str) or level not in _CAPS:
        result.refused["rollout_is"] = f"must be one of {', '.join(_CAPS)}, or null"
    elif not _is_positive(threshold):
        result.refused["rollout_is_threshold"] = "must be a number above 0"
    elif bypass:
        result.taken["rollout_is"] = "has no effect, as in veRL: with bypass_mode the loss has the ratio itself"
    else:
        result.set("rollout_is", _CAPS[level], threshold)


def _ranges(given: Mapping[str, Any], result: Translated) -> None:
    names = [name.strip() for name in str(given.get("rollout_rs", "")).split(",") if name.strip()]
    if not names:
        return
    if unknown := [name for name in names if name not in _RANGES]:
        result.refused["rollout_rs"] = f"{', '.join(unknown)} is not there; {' and '.join(_RANGES)} are"
        return
    bounds = [text.strip() for text in str(given.get("rollout_rs_threshold", "")).split(",") if text.strip()]
    ranges = [_range(text) for text in (bounds * len(names) if len(bounds) == 1 else bounds)]
    if len(ranges) != len(names) or None in ranges:
        what = "must be lower_upper (or upper, which stands for 1/upper_upper), one for each of rollout_rs"
        result.refused["rollout_rs_threshold"] = what
        return
    for name, limits in zip(names, ranges, strict=True):
        result.set("rollout_rs", _RANGES[name], limits)


def _range(text: str) -> list[float] | None:
    """[1 / upper, 1 / lower] of `lower_upper`."""
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        return None
    lower, upper = (1 / numbers[0], numbers[0]) if len(numbers) == 1 and numbers[0] > 0 else (*numbers, 0.0)[:2]
    return [1 / upper, 1 / lower] if 0 < lower < upper else None


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
