"""A matplotlib figure that notebooks show by themselves; needs matplotlib."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """Shown as a picture wherever it is a cell's value, whichever backend pyplot has or has not."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=72)
        return picture.getvalue()
