"""Small pictures as SVG, made on the server: they need no script and no inline style."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

_WIDTH, _HEIGHT = 160.0, 36.0


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


def duration(spans: Sequence[Span]) -> float:
    """Returns the seconds from the first begin to the last end; 0 without spans."""
    return max(span.end for span in spans) - min(span.begin for span in spans) if spans else 0.0


def lane(spans: Sequence[Span], whole: Sequence[Span]) -> Markup:
    """Draws the spans of one lane on the time axis of `whole`. A span without length is a thin mark."""
    seconds = duration(whole) or 1.0
    begin = min((span.begin for span in whole), default=0.0)
    found = Markup()
    for span in spans:
        width = max(0.4, 100 * (span.end - span.begin) / seconds)
        left = min(100 - width, 100 * (span.begin - begin) / seconds)
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
