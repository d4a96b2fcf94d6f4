"""What measurements are shown as: tables, and pictures of lines and of stacked bars."""
import math
from statistics import fmean, stdev

import numpy as np


def grouped(rows, *keys):
    """{values of the keys: the rows, dicts, that have them}."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def table(titles, rows):
    """The lines of a Markdown table. rows: lists of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (titles, *rows)]
    return [lines[0], "|" + "---|" * len(titles), *lines[1:]]


def with_error(values, scale, digits):
    """"mean ± standard error" of the values times scale.

    Without ± if they are all the same, or one.
    """
    values = list(values)
    text = f"{round(scale * fmean(values), digits) + 0.0:.{digits}f}"            # never -0.0
    spread = stdev(values) if len(values) > 1 else 0
    return text + (f" ± {scale * spread / len(values) ** 0.5:.{digits}f}" if spread else "")


def panels(figure, contents, width):
    """(axis, content) of each panel. contents: {title: content}."""
    columns = min(3, len(contents))
    rows = math.ceil(len(contents) / columns)
    figure.set_size_inches(width * columns, 4.4 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, title in zip(axes.flat, contents):
        axis.set_title(title)
    return zip(axes.flat, contents.values())


def plot_lines(figure, points, xlabel, ylabel, **axes_options):
    """points: (title of a panel, label of a line, x, y) each.

    The x of a panel stand equally far apart, in the order of the points.
    """
    contents = {}
    for title, label, x, y in points:
        contents.setdefault(title, {}).setdefault(label, {})[str(x)] = y
    for axis, lines in panels(figure, contents, 4.8):
        for label, line in lines.items():
            axis.plot(list(line), list(line.values()), "o-", label=label)
        axis.set(xlabel=xlabel, ylabel=ylabel, **axes_options)
        axis.tick_params("x", labelsize=8)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)


def plot_bars(figure, contents, ylabel):
    """contents: {title of a panel: {name of a bar: {part: its height}}}, the first part at the bottom."""
    for axis, bars in panels(figure, contents, 6.5):
        bottom = np.zeros(len(bars))
        for part in dict.fromkeys(part for bar in bars.values() for part in bar):
            heights = np.array([bar.get(part, 0.0) for bar in bars.values()])
            axis.bar(list(bars), heights, bottom=bottom, label=part)
            bottom += heights
        axis.set_ylabel(ylabel)
        axis.tick_params("x", labelsize=8)
        axis.legend(frameon=False, fontsize=8)
