"""The two kinds of pictures that measurements have: lines and stacked bars."""
import math
from statistics import fmean as mean


def panels(plt, titles, width):
    """(figure, {title: its axis}), three side by side."""
    columns = min(3, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, 4.4 * rows),
                                layout="constrained", squeeze=False)
    for axis, title in zip(axes.flat, titles):
        axis.set_title(title)
    return figure, dict(zip(titles, axes.flat))


def plot_lines(plt, points, xlabel, ylabel, **axes_options):
    """points: (title of a panel, label of a line, x, y) each.

    The x of a panel stand equally far apart. Where a line has several points of an x it goes through
    their mean.
    """
    contents = {}
    for title, label, x, y in points:
        contents.setdefault(title, {}).setdefault(label, []).append((x, y))
    figure, axes = panels(plt, contents, 4.8)
    for title, axis in axes.items():
        lines = contents[title]
        places = sorted({x for points in lines.values() for x, _ in points})
        for label, points in lines.items():
            own = sorted({x for x, _ in points})
            middle = [mean(y for at, y in points if at == x) for x in own]
            line, = axis.plot([places.index(x) for x in own], middle, "o-", label=label)
            axis.plot([places.index(x) for x, _ in points], [y for _, y in points], "_",
                      color=line.get_color(), alpha=0.5)
        axis.set(xlabel=xlabel, ylabel=ylabel, **axes_options)
        axis.set_xticks(range(len(places)), places, fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    return figure


def plot_bars(plt, contents, ylabel):
    """contents: {title of a panel: {name of a bar: {part: its height}}}, the first part at the bottom."""
    figure, axes = panels(plt, contents, 6.5)
    for title, axis in axes.items():
        bars = contents[title]
        bottom = [0.0] * len(bars)
        for part in dict.fromkeys(part for bar in bars.values() for part in bar):
            heights = [bar.get(part, 0.0) for bar in bars.values()]
            axis.bar(range(len(bars)), heights, bottom=bottom, label=part)
            bottom = [b + height for b, height in zip(bottom, heights)]
        axis.set_xticks(range(len(bars)), list(bars), fontsize=8)
        axis.set_ylabel(ylabel)
        axis.legend(frameon=False, fontsize=8)
    return figure
