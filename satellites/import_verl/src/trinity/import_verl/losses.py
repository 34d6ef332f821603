"""Arguments of veRL's policy losses, their aggregation, and its rollout correction."""

from typing import Any

import yaml

from trinity.compat_rft.correction import MEANINGS, translated
from trinity.import_verl.expand import default_of
from trinity.import_verl.run import Run
from trinity.import_verl.tables import ACTOR, BY_SEQUENCE, CLIPPED, CORRECTION, LOSS_ARGS, LOSSES
from trinity.import_verl.values import NUMBER, Leaf, Node, is_null, is_true, node_of, text_of

_CLIP = "0.2"  # veRL's own, of clip_ratio, clip_ratio_low and clip_ratio_high
_OLD_CAP = f"{ACTOR}.tis_imp_ratio_cap"
_MODE = f"{ACTOR}.policy_loss.loss_mode"


def loss(run: Run) -> Node | None:
    """The policy loss. With bypass_mode veRL takes clipped PPO instead of the named loss."""
    given = run.take(_MODE)
    if given is not None and _loss(run) != text_of(given):
        run.unneeded.append(f"{_MODE}={given}: with {CORRECTION}.bypass_mode veRL's loss is vanilla")
        return Leaf(LOSSES["vanilla"], f"{CORRECTION}.bypass_mode")
    return None if given is None else run.named(_MODE, "vanilla", LOSSES)


def _loss(run: Run) -> str:
    if is_true(run.take(f"{CORRECTION}.bypass_mode") or "False"):
        return "vanilla"
    return text_of(run.take(_MODE) or "vanilla")


def arguments(run: Run) -> Node | None:
    """Sets veRL's clip range of 0.2 wherever the loss has another default here."""
    loss = _loss(run)
    args: dict[str, Node] = {}
    if loss in CLIPPED:
        args = {f"clip_range_{side}": _bound(run, side) for side in ("low", "high")}
        given = [run.take(f"{ACTOR}.{name}") for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
        if loss == "vanilla" and all(value is None for value in given):
            args = {}  # ours are the same
        if given[0] is not None and not any(value is not None and is_null(value) for value in given[1:]):
            why = "in veRL clip_ratio_low and clip_ratio_high decide, 0.2 unless given; null leaves it to clip_ratio"
            run.unneeded.append(f"{ACTOR}.clip_ratio={given[0]}: {why}")
    if loss == "gpg":
        args["tau"] = Leaf("0", "veRL's gpg is -A log p")
    if loss in ("dppo_tv", "dppo_kl"):
        args["clip_ratio_c"] = Leaf("3.0", f"{ACTOR}.clip_ratio_c, veRL's default")
    if loss == "kl_cov":
        args["ppo_kl_coef"] = Leaf("0.1", f"{ACTOR}.policy_loss.ppo_kl_coef, veRL's default")
    return {**args, **run.picked(ACTOR, LOSS_ARGS.get(loss, {}))} or None


def _bound(run: Run, side: str) -> Node:
    option = f"{ACTOR}.clip_ratio_{side}"
    given, both = run.take(option), run.take(f"{ACTOR}.clip_ratio")
    if given is None:
        return Leaf(_CLIP, f"{option}, veRL's default")
    return node_of(both or _CLIP, f"{ACTOR}.clip_ratio") if is_null(given) else node_of(given, option)


def aggregation(run: Run) -> Node | None:
    """sapo always averages over sequences in veRL, gspo up to 0.8: the option has no effect there."""
    option, loss = f"{ACTOR}.loss_agg_mode", _loss(run)
    given = run.take(option)
    if loss == "geo_mean":
        return None  # one value for a sequence, and their mean, there and here
    if loss not in BY_SEQUENCE:
        return None if given is None else node_of(given, option)
    if given is not None and given != "seq-mean-token-mean":
        why = f"veRL's {loss}has it only for its KL and entropy terms; all terms have the loss's aggregation here"
        newer = "; since veRL 0.9 gspo's own term has it too: then write it into algorithm.loss_agg_mode"
        run.unmapped.append(f"{option}={given}: {why}{newer if loss == 'gspo' else ''}")
    newer = "up to 0.8; since 0.9 as loss_agg_mode, token-mean unless given"
    return Leaf("seq-mean-token-mean", f"veRL's {loss}, {newer if loss == 'gspo' else 'always'}")


def correction(run: Run) -> Node | None:
    """Translates the section; an older option for a cap on tokens counts where the section has none."""
    options = {key: f"{CORRECTION}.{key}" for key in MEANINGS}
    theirs = {key: value for key, option in options.items() if (value := _read(run, option)) is not None}
    cap = _read(run, _OLD_CAP)
    if cap is not None and not isinstance(cap, float):
        run.unmapped.append(f"{_OLD_CAP}={run.take(_OLD_CAP)}: is not known to be a number here")
    elif cap is not None and "rollout_is" not in theirs and cap > 0:
        theirs |= {"rollout_is": "token", "rollout_is_threshold": cap}
        options["rollout_is_threshold"] = _OLD_CAP
    found = translated(theirs)
    said = {key: f"{option}={run.take(option)}" for key, option in options.items()}
    run.unmapped += [f"{said[key]}: {why}" for key, why in found.refused.items()]
    quiet = [key for key in theirs if found.taken.get(key, "").startswith("has no effect")]
    run.unneeded += [f"{said[key]}: {found.taken[key]}" for key in quiet]
    if "decoupled" in found.values and "bypass_mode" not in theirs:
        run.notes.append(
            "veRL's caps and ranges weigh what the trainer's weights were before a batch against the engine; here each "
            "mini-batch is a step, and they weigh the weights before each step"
        )
    texts = {
        ours: str(value).lower() if isinstance(value, bool) else str(value) for ours, value in found.values.items()
    }
    if "rollout_is_threshold" in theirs:  # a cap stays as it was written: it may be a variable
        written = run.take(options["rollout_is_threshold"]) or ""
        texts |= dict.fromkeys(texts.keys() & {"token_cap", "sequence_cap"}, written)
    return {ours: node_of(text, CORRECTION) for ours, text in texts.items()} or None


def _read(run: Run, option: str) -> Any:
    """Returns an option's value; for a reference to the environment its default, with a note. Returns None for an
    option that sets nothing, and with a note for a value that cannot be read."""
    text = run.take(option)
    if text is None or is_null(used := default_of(text.strip())):
        return None
    if used != text.strip():
        run.notes.append(f"{option}: derived keys are made with {used} of {text}")
    try:
        return float(used) if NUMBER.fullmatch(used) else yaml.safe_load(used)
    except (yaml.YAMLError, ValueError):
        run.unmapped.append(f"{option}={text}: cannot be read")
        return None
