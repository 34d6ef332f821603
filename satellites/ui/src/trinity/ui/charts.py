"""Small pictures as SVG, made on the server: they need no script and no inline style."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from markupsafe import Markup

from trinity.reading.render import when

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

    def ticks(self) -> list[tuple[float, str]]:
        """Returns (place, label): the local time at both ends and in the middle."""
        if len(self._moments) < 2:
            return []
        moments = [float(np.interp(place * self._places[-1], self._places, self._moments)) for place in (0, 0.5, 1)]
        texts = [when(moment) for moment in moments]
        same_day = len({text[:10] for text in texts}) == 1
        return [(50.0 * number, text[11:] if same_day else text) for number, text in enumerate(texts)]


class StepAxis(Axis):
    """The axis of several lanes in optimizer steps, from 0 to 100: all steps are equally wide, pauses within them too.

    `ends`: number of each step, ascending, and the Unix time at which its training ended. A step trained again has its
    last time. Moments after the last step have a place as wide as a step.
    """

    def __init__(self, whole: Sequence[Span], ends: Sequence[tuple[int, float]]) -> None:
        super().__init__(whole)
        times = np.maximum.accumulate([end for _, end in ends])
        begin, end = (self._moments[0], self._moments[-1]) if self._moments else (times[0], times[-1])
        self._steps = [step for step, _ in ends]
        self._moments = [min(begin, float(times[0])), *times.tolist()] + ([end] if end > times[-1] else [])
        self._places = [float(place) for place in range(len(self._moments))]
        self.pauses = []

    def ticks(self) -> list[tuple[float, str]]:
        """Returns (place, label) of at most nine steps, in the middle of each."""
        every = max(1, math.ceil(len(self._steps) / 8))
        chosen = [place for place in range(len(self._steps)) if place % every == 0]
        return [(100 * (place + 0.5) / self._places[-1], str(self._steps[place])) for place in chosen]


def scale(axis: Axis) -> Markup:
    """Draws the labels below lanes of an axis."""
    ends = {0.0: "start", 100.0: "end"}
    found = (
        Markup('<text x="{x}%" y="11" text-anchor="{anchor}">{text}</text>').format(
            x=f"{place:.3f}", anchor=ends.get(place, "middle"), text=text
        )
        for place, text in axis.ticks()
    )
    return Markup('<svg class="scale">{}</svg>').format(Markup().join(found))


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
