"""Pictures of timelines as PNG, drawn by matplotlib, which is imported only here and only when asked for."""

from __future__ import annotations

import os

from ..exceptions import StageUsageError
from ._picture import picture
from ._require import is_cost
from ._timeline import Timeline


def to_png(*timelines: Timeline, path: str | os.PathLike[str], width: float | None = None, scale: float = 2.0) -> None:
    """Timelines as one PNG picture, which looks as that of :func:`to_svg`.

    Args:
        timelines: what to draw.
        path: the file to write.
        width: of the picture, in pixels before scaling, at least 300; by default as wide as most microbatch numbers need, 1,000
            to 8,000.
        scale: pixels of the file per pixel of the picture.

    Raises:
        StageUsageError: there is nothing to draw, a size is none, or matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise StageUsageError(
            "PNG pictures are drawn by matplotlib, which is not installed: pip install 'stepwell[plot]', or use to_svg()"
        ) from None
    if not is_cost(scale) or scale == 0:
        raise StageUsageError(f"the scale of a picture is a number above 0, got {scale!r}")
    drawn = picture(timelines, width)
    figure = Figure(figsize=(drawn.width / 100, drawn.height / 100), dpi=100 * scale)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawn.width)
    axes.set_ylim(drawn.height, 0)
    axes.axis("off")
    points = 0.72  # of type, per pixel at 100 dots an inch
    for box in drawn.boxes:
        edge = "#ffffff" if box.rim or box.hatched else "none"  # hatches have its colour
        hatch, line = "////" if box.hatched else None, box.rim * points
        place = (box.x, box.y), box.width, box.height
        axes.add_patch(Rectangle(*place, facecolor=box.colour, edgecolor=edge, hatch=hatch, linewidth=line))
        if box.text:
            size = min(11.0, box.height - 2) * points
            x, y = box.x + box.width / 2, box.y + box.height / 2
            axes.text(x, y, box.text, fontsize=size, color=box.ink, ha="center", va="center_baseline")
    align = {"start": "left", "middle": "center", "end": "right"}
    for text in drawn.texts:
        words = axes.text(text.x, text.y, text.words, fontsize=text.size * points, color=text.colour)
        words.set(ha=align[text.align], va="baseline", fontweight="bold" if text.bold else "normal")
    figure.savefig(path, facecolor="#ffffff")
