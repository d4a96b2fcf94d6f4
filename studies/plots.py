"""The two kinds of pictures that measurements of speed and memory have: lines and stacked bars."""


def panels(plt, count, width, **options):
    """A figure and its axes, side by side."""
    figure, axes = plt.subplots(1, count, figsize=(width * count, 4.4), layout="constrained",
                                squeeze=False, **options)
    return figure, axes[0]


def plot_lines(plt, contents, xlabel, ylabel, **axes_options):
    """contents: {title of a panel: {label of a line: its points (x, y)}}; x is logarithmic."""
    figure, axes = panels(plt, len(contents), 4.8, sharey=True)
    for axis, (title, lines) in zip(axes, contents.items()):
        for label, points in lines.items():
            if points:
                axis.plot(*zip(*sorted(points)), "o-", label=label)
        places = sorted({x for points in lines.values() for x, _ in points})
        axis.set(title=title, xlabel=xlabel, xscale="log", **axes_options)
        axis.set_xticks(places, places, fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(ylabel)
    axes[0].legend(frameon=False)
    return figure


def plot_bars(plt, contents, ylabel):
    """contents: {title of a panel: {name of a bar: {part: its height}}}, the first part at the bottom."""
    figure, axes = panels(plt, len(contents), 6.5)
    for axis, (title, bars) in zip(axes, contents.items()):
        parts = dict.fromkeys(part for bar in bars.values() for part in bar)
        bottom = [0.0] * len(bars)
        for part in parts:
            heights = [bar.get(part, 0.0) for bar in bars.values()]
            axis.bar(range(len(bars)), heights, bottom=bottom, label=part)
            bottom = [b + height for b, height in zip(bottom, heights)]
        axis.set_xticks(range(len(bars)), list(bars), fontsize=8)
        axis.set(title=title, ylabel=ylabel)
        axis.legend(frameon=False, fontsize=8)
    return figure
