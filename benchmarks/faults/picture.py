"""Training progress over time, as SVG: the steps that the weights are made of. A fault is a mark below its line."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 46, 40, 34
COLOURS = ("#0b6bb0", "#b04a0b", "#0b7a55", "#7a3fb0")

Line = tuple[Sequence[tuple[float, int]], Sequence[float]]  # (seconds, steps), moments of faults


def draw(lines: Mapping[str, Line]) -> str:
    """Returns the picture of each system's progress by its name."""
    seconds = max((points[-1][0] for points, _ in lines.values() if points), default=1.0) or 1.0
    steps = max((step for points, _ in lines.values() for _, step in points), default=1)

    def x(moment: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * moment / seconds

    def y(step: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * step / steps

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += [
            f'<path d="M{LEFT},{y(share * steps):.1f}H{WIDTH - 12}" stroke="#ddd"/>',
            _text(LEFT - 6, y(share * steps) + 4, f"{share * steps:g}", "end"),
            _text(x(share * seconds), HEIGHT - BOTTOM + 18, f"{share * seconds:.0f}", "middle"),
        ]
    parts.append(_text(WIDTH / 2, HEIGHT - 6, "seconds since the first step", "middle"))
    parts.append(_text(6, 14, "steps that the weights are made of", "start"))
    for number, (name, (points, faults)) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = "".join(
            f"{'L' if place else 'M'}{x(moment):.1f},{y(step):.1f}" for place, (moment, step) in enumerate(points)
        )
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(WIDTH - 12 - 90 * (len(lines) - 1 - number), 14, name, "end", colour))
        for fault in faults:
            reached = max((step for moment, step in points if moment <= fault), default=0)
            parts.append(f'<path d="M{x(fault):.1f},{y(reached) + 4:.1f}l-4,9h8z" fill="{colour}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
