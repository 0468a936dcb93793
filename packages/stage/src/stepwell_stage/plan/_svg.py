"""Pictures of timelines as SVG, written by hand."""

from __future__ import annotations

import os
from xml.sax.saxutils import escape

from ._picture import FAINT, WAIT_COLOUR, picture
from ._require import path_of
from ._timeline import Timeline


def to_svg(*timelines: Timeline, path: str | os.PathLike[str] | None = None, width: float | None = None) -> str:
    """Timelines as one SVG picture, below one another on one scale.

    Colours tell actions apart, shades the stages of a rank; numbers are microbatches; hatched is waiting, plain background idle.
    A browser shows what a box is when the pointer rests on it.

    Example::

        to_svg(simulate(plan, costs).timeline, measured, path="step.svg")

    Args:
        timelines: what to draw.
        path: the file to write, if one is wanted.
        width: of the picture, in pixels, at least 300; by default as wide as most microbatch numbers need, 1,000 to 8,000.

    Returns:
        The text of the picture.

    Raises:
        StageUsageError: there is nothing to draw.
    """
    drawn = picture(timelines, width)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawn.width:g}" height="{drawn.height:g}"'
        f' viewBox="0 0 {drawn.width:g} {drawn.height:g}" font-family="Helvetica, Arial, sans-serif">',
        '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{WAIT_COLOUR}"/><line x1="0" y1="0" x2="0" y2="6" stroke="#ffffff" stroke-width="3"/>'
        "</pattern></defs>",
        f'<rect width="{drawn.width:g}" height="{drawn.height:g}" fill="#ffffff"/>',
    ]
    for box in drawn.boxes:
        fill = "url(#wait)" if box.hatched else box.colour
        edge = f' stroke="#ffffff" stroke-width="{box.rim:g}"' if box.rim else ""
        place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
        title = f"<title>{escape(box.title)}</title>" if box.title else ""
        lines.append(f'<rect {place} fill="{fill}"{edge}>{title}</rect>')
        if box.text:
            size = min(11.0, box.height - 2)
            x, y = box.x + box.width / 2, box.y + box.height / 2 + size * 0.36
            lines.append(
                _text(
                    x, y, box.text, f'font-size="{size:g}" text-anchor="middle" fill="{box.ink}" pointer-events="none"'
                )
            )
    for text in drawn.texts:
        weight = ' font-weight="bold"' if text.bold else ""
        style = f'font-size="{text.size:g}" text-anchor="{text.align}" fill="{text.colour or FAINT}"{weight}'
        lines.append(_text(text.x, text.y, text.words, style))
    svg = "\n".join([*lines, "</svg>"]) + "\n"
    if path is not None:
        path_of(path).write_text(svg, encoding="utf-8")
    return svg


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(words)}</text>'
