"""Squarified treemaps: Bruls, Huizing and van Wijk, "Squarified Treemaps", Data Visualization 2000."""

from __future__ import annotations

from collections.abc import Sequence

Tile = tuple[float, float, float, float]


def squarify(sizes: Sequence[float], width: float, height: float) -> list[Tile]:
    """Return (x, y, width, height) of one tile for each size, filling `width` × `height`, close to squares.

    `sizes` are positive and descending.
    """
    scale = width * height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    found: list[Tile] = []
    x = y = 0.0
    while len(found) < len(areas):
        left, top = width - x, height - y
        side = min(left, top)
        row = [areas[len(found)]]
        for area in areas[len(found) + 1 :]:
            if _worst([*row, area], side) > _worst(row, side):
                break
            row.append(area)
        # A row stands along the shorter side; rounding must not make the rest negative.
        thick = min(sum(row) / side if side else 0.0, max(left, top))
        along = 0.0
        for area in row:
            length = area / thick if thick else 0.0
            found.append((x, y + along, thick, length) if left >= top else (x + along, y, length, thick))
            along += length
        x, y = (x + thick, y) if left >= top else (x, y + thick)
    return found


def _worst(row: Sequence[float], side: float) -> float:
    """Return the highest aspect ratio in a row of areas along `side`."""
    total = sum(row)
    if not total or not side or not min(row):
        return float("inf")
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * min(row)))
