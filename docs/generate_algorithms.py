"""Write the measured tables of docs/algorithms_measured.md: `make docs`. A test compares them with what this writes.

Compares each loss and advantage with a loop in plain floats (tests/support), and with what the code of other frameworks
gave or loops written from it.
"""

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.checks.losses import peer_advantages, peer_algorithms, plain_advantages, plain_losses, recorded  # noqa: E402
from support.checks.losses.loss_cases import case_of, gradient_of, modes_of, slopes, with_peers  # noqa: E402
from support.checks.losses.plain_advantages import rollouts_of  # noqa: E402
from trinity.plugins.declarations import ADVANTAGES  # noqa: E402
from trinity.trainer.algorithms.advantages import compute  # noqa: E402
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES  # noqa: E402

TARGET = ROOT / "docs/algorithms_measured.md"
BEGIN, END = "<!-- measured tables: written by `make docs` -->", "<!-- end of the measured tables -->"
BATCHES = 24
NOTHING = 1e-13
# Of loops' gradients, which are differences of values, of means with 1e-8 in the divisor, and of single precision.
EQUAL = 1e-6
Pair = tuple[float, float]


def document() -> str:
    """Returns the page with tables measured again."""
    before, rest = TARGET.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(_tables()) + f"\n{END}{rest.split(END)[1]}"


def _tables() -> Iterator[str]:
    yield from header(
        "", "policy loss, to a loop", "value, float64", "gradient, float64", "value, float32", "gradient, float32"
    )
    for name in sorted(POLICY_LOSSES):
        measured = [number for dtype in (torch.float64, torch.float32) for number in of_loss(name, dtype)]
        yield f"| `{name}` | {' | '.join(map(power, measured))} |"
    yield from header("", "advantages, to a loop", "largest difference of a value, float64")
    own = sorted(name for name, one in ADVANTAGES.items() if not one.alias_of)
    yield f"| {', '.join(f'`{name}`' for name in own)} | {power(max(map(of_advantage, own)))} |"
    yield from _to_peers("policy loss", peer_algorithms.LOSSES, _to_loss)
    yield from _to_peers("advantage", peer_advantages.ADVANTAGES, _to_advantage)
    alone = sorted(set(POLICY_LOSSES) - {peer.name for peer in peer_algorithms.LOSSES})
    yield from ["", f"Compared with none of them: {', '.join(f'`{name}`' for name in alone)}."]


def _to_loss(peer: peer_algorithms.Peer) -> float:
    if isinstance(peer.theirs, str):
        return recorded.of_loss(peer.theirs, peer.name, peer.mode, peer.settings)
    return _against(peer.name, peer.theirs, peer.settings, [peer.mode], torch.float64)[1]


def _to_advantage(peer: peer_algorithms.Peer) -> float:
    if isinstance(peer.theirs, str):
        return recorded.of_advantage(peer.theirs, peer.name, peer.settings)
    return _advantage(peer.name, peer.theirs, peer.settings)


def _to_peers(
    kind: str, peers: Iterable[peer_algorithms.Peer], measure: Callable[[peer_algorithms.Peer], float]
) -> Iterator[str]:
    """Returns one row for the names that agree with the defaults, and a row for each other name."""
    equal: dict[str, list[str]] = defaultdict(list)
    largest: dict[str, float] = defaultdict(float)
    rest = []
    for peer in peers:
        difference = measure(peer)
        if peer.settings or peer.why or difference > EQUAL:
            rest.append(_row(peer, difference))
        else:
            equal[peer.source].append(f"`{peer.name}`")
            largest[peer.source] = max(largest[peer.source], difference)
    yield from header("", kind, "whose", "settings here", "largest difference", "without these settings, and why")
    for whose, names in equal.items():
        yield f"| {', '.join(names)} | {whose} | defaults | {power(largest[whose])} | the same |"
    yield from rest


def header(*names: str) -> Iterator[str]:
    """An empty first name puts a blank line above."""
    columns = [name for name in names if name]
    yield from [""] * (len(names) - len(columns))
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _row(peer: peer_algorithms.Peer, difference: float) -> str:
    shown = {"None": "null"}
    settings = ", ".join(f"`{key}: {shown.get(str(value), value)}`" for key, value in peer.settings.items())
    return (
        f"| `{peer.name}` | {peer.source} | {settings or 'defaults'} | {power(difference)} | {peer.why or 'the same'} |"
    )


def of_loss(name: str, dtype: torch.dtype) -> Pair:
    """Returns the largest differences of value and gradient to the loop, over batches, arguments and aggregations."""
    reference, variants = plain_losses.REFERENCES[name]
    modes = modes_of(name)
    found = [_against(name, reference, args, modes, dtype, True) for args in [{}, *variants]]
    return max(value for value, _ in found), max(gradient for _, gradient in found)


def _against(
    name: str,
    loop: Callable[..., float],
    args: Mapping[str, Any],
    modes: list[str],
    dtype: torch.dtype,
    own: bool = False,
) -> Pair:
    """own: the loop takes the arguments too."""
    values, gradients = [0.0], [0.0]
    for seed in range(BATCHES):
        case = with_peers(case_of(seed, modes[seed % len(modes)], dtype), name, dict(args))
        value, gradient = gradient_of(name, case, dict(args))
        sg, given = case.rows("logprobs"), args if own else {}
        values.append(abs(float(value) - loop(case, sg, sg, **given)))
        wanted = slopes(lambda lp: loop(case, lp, sg, **given), sg)  # noqa: B023
        for row, flags, numbers in zip(gradient, case.x.mask, wanted, strict=True):
            gradients += [abs(float(g) - w) for g, w in zip(row[flags > 0], numbers, strict=True)]
    return max(values), max(gradients)


def of_advantage(name: str) -> float:
    reference, variants = plain_advantages.REFERENCES[name]
    return max(_advantage(name, reference, args, True) for args in [{}, *variants])


def _advantage(name: str, loop: Callable[..., Any], args: Mapping[str, Any], own: bool = False) -> float:
    differences = [0.0]
    for seed in range(BATCHES):
        rollouts = rollouts_of(seed, seed % 2 > 0 and own, seed % 3 > 0 and (own or name == "ppo"))
        found = compute(name, {**ADVANTAGES[name].defaults, **args}, rollouts)
        wanted = loop(rollouts, **(args if own else {}))
        for tokens, mask, numbers, copies in zip(found.tokens, rollouts.masks, wanted, found.copies_N, strict=True):
            if numbers is None:  # an untrained sequence
                differences.append(math.inf if copies else 0.0)
            else:
                differences += [abs(float(t) - w) for t, w in zip(tokens[mask], numbers, strict=True)]
    return max(differences)


def power(value: float) -> str:
    """Rounds up to a power of ten, which seldom depends on a processor's last bits; 0 for rounding in float64."""
    if value < NOTHING:
        return "0"
    return f"{value:.2g}" if value > 0.01 else f"1e{math.ceil(math.log10(value))}"


def agree(page: str, measured: str) -> bool:
    """Returns True if the texts differ only in powers of ten, by one at most: processors round differently."""
    powers = [re.findall(r"\| (1e-\d+|0)(?= \|)", text) for text in (page, measured)]
    rest = [re.sub(r"\| (1e-\d+|0)(?= \|)", "|", text) for text in (page, measured)]
    logs = [[math.log10(float(number) or NOTHING) for number in found] for found in powers]
    return rest[0] == rest[1] and all(abs(a - b) < 1.5 for a, b in zip(*logs, strict=True))


if __name__ == "__main__":
    text = document()
    if "--check" in sys.argv:
        sys.exit(not agree(TARGET.read_text(), text) and "docs/algorithms_measured.md is old; run `make docs`")
    TARGET.write_text(text)
