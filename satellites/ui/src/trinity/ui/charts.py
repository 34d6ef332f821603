"""Small pictures as SVG, made on the server: they need no script and no inline style."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from markupsafe import Markup

_WIDTH, _HEIGHT = 160.0, 36.0
_PAUSE, _SHORT = 4, 0.04  # of an axis: the least length of a pause, and how long it is drawn


def sparkline(values: Sequence[float], label: str) -> Markup:
    """Returns a line through values, lowest at the bottom; empty for fewer than two."""
    if len(values) < 2:
        return Markup()
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    wide = _WIDTH / (len(values) - 1)
    points = " ".join(
        f"{number * wide:.1f},{2 + (_HEIGHT - 4) * (1 - (value - low) / span):.1f}"
        for number, value in enumerate(values)
    )
    title = f"{label}: {len(values)} steps, {low:.4g} to {high:.4g}, now {values[-1]:.4g}"
    return Markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img"><title>{title}</title>'
        '<polyline points="{points}"/></svg>'
    ).format(w=f"{_WIDTH:g}", h=f"{_HEIGHT:g}", title=title, points=points)


@dataclass(frozen=True)
class Span:
    """A part of a lane, in Unix times. `css` is the class of its activity."""

    css: str
    begin: float
    end: float


class Axis:
    """The time axis of several lanes, from 0 to 100. A pause between two moments is drawn short.

    A pause is longer than a minute and _PAUSE times as long as all shorter intervals together, such as the days before
    a run was continued. No `busy` span overlaps it.
    """

    def __init__(self, whole: Sequence[Span], busy: Sequence[Span] = ()) -> None:
        self._moments = sorted({t for span in whole for t in (span.begin, span.end) if math.isfinite(t)})
        intervals = list(pairwise(self._moments))
        quiet = [not any(span.begin < end and span.end > begin for span in busy) for begin, end in intervals]
        lengths = [end - begin for begin, end in intervals]
        self.seconds = sum(length for length, is_quiet in zip(lengths, quiet, strict=True) if not is_quiet)
        self.pauses: list[float] = []  # in seconds
        for length in sorted(length for length, is_quiet in zip(lengths, quiet, strict=True) if is_quiet):
            if self.pauses or (length > 60 and length > _PAUSE * self.seconds > 0):
                self.pauses.append(length)
            else:
                self.seconds += length
        short = _SHORT * self.seconds
        drawn = (short if is_quiet and length in self.pauses else length
                 for length, is_quiet in zip(lengths, quiet, strict=True))  # fmt: skip
        self._places = [0.0, *accumulate(drawn)]

    def at(self, moment: float) -> float:
        """Returns the place of a moment between the first and the last."""
        whole = self._places[-1] or 1.0
        return 100 * float(np.interp(moment, self._moments or [0.0], self._places)) / whole


def lane(spans: Sequence[Span], axis: Axis) -> Markup:
    """Draws the spans of one lane. A span without length is a thin mark."""
    found = Markup()
    for span in spans:
        begin = axis.at(span.begin)
        width = max(0.4, axis.at(span.end) - begin)
        left = min(100 - width, begin)
        title = f"{span.css}: {span.end - span.begin:.4g} s"
        found += Markup(
            '<rect class="{css}" x="{x}" y="0" width="{width}" height="8"><title>{title}</title></rect>'
        ).format(css=span.css, x=f"{left:.3f}", width=f"{width:.3f}", title=title)
    return Markup('<svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(found)


def stacked(parts: Mapping[str, float], unit: str = "", colours: int = 3) -> Markup:
    """Draws one horizontal bar.

    Each part has the class `part-<its place>`, modulo `colours`; parts that are not positive are left out.
    """
    total = sum(value for value in parts.values() if value > 0)
    if total <= 0:
        return Markup()
    left, found = 0.0, Markup()
    for place, (name, value) in enumerate(parts.items()):
        if value > 0:
            width = 100 * value / total
            found += Markup(
                '<rect class="part-{place}" x="{x}" y="0" width="{width}" height="10"><title>{title}</title></rect>'
            ).format(place=place % colours, x=f"{left:.3f}", width=f"{width:.3f}", title=f"{name}: {value:.4g}{unit}")
            left += width
    return Markup(
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    ).format(found)
