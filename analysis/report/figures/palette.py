"""Colours, markers and dashes of the figures, and the CSS names that they carry on the page.

Figures are drawn in the light colours below; in the page each colour becomes a CSS
variable, so that a figure follows the page's theme. Hues are those of Okabe and Ito
(https://jfly.uni-koeln.de/color/), told apart with any colour vision; markers and dashes
differ too, for grey prints.
"""

from __future__ import annotations

INK = "#1f2328"
MUTED = "#59636e"
GRID = "#e3e7eb"
SURFACE = "#fefefe"

BLUE = "#0072b2"
VERMILLION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
ORANGE = "#e69f00"
SKY = "#56b4e9"
GREY = "#8c959f"

#: The CSS variable of each colour that a figure is drawn in.
CSS_NAMES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    BLUE: "--blue",
    VERMILLION: "--vermillion",
    GREEN: "--green",
    PURPLE: "--purple",
    ORANGE: "--orange",
    SKY: "--sky",
    GREY: "--grey",
}

SERIES_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
SERIES_MARKERS = ("o", "s", "D", "^", "v", "P")
SERIES_DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 1.5), (8, 2.5))

#: The parts of a step, in the order they are stacked: name, words, colour, hatch.
STEP_PARTS = (
    ("data", "data loading", SKY, ""),
    ("forward", "forward", GREEN, ""),
    ("backward", "backward", BLUE, ""),
    ("optimizer", "optimizer", PURPLE, ""),
    ("other", "other", GREY, ""),
    ("transfer", "exposed communication", VERMILLION, ""),
    ("wait", "waiting for the slowest rank", ORANGE, "////"),
)

#: The factors of the efficiency, in the order they are stacked: name, colour, hatch. Colours are those
#: of what causes each in the step's time.
LOSS_PARTS = (
    ("comm_efficiency", VERMILLION, ""),
    ("load_balance", ORANGE, "////"),
    ("data_scalability", SKY, ""),
    ("compute_scalability", BLUE, ""),
)
