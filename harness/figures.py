"""Pictures: a run's learning curve, and how any picture is written."""
import io
import math
import os
import sys

from harness.run_folder import atomic_write
from qerl import reason

# Of each panel: the metric, its title, its unit; and whether the noise is drawn into it.
PANELS = [
    ("accuracy", "Accuracy (training, temperature 1)", "fraction right", False),
    ("reward", "Reward", "mean", False),
    ("entropy", "Entropy", "nats a token", True),
    ("length", "Completion length", "mean tokens", False),
    ("mismatch_kl", "Mismatch: KL of sampled to trained policy", "nats a token", True),
    ("gradient_norm", "Gradient norm, before clipping", "norm", False),
]


def picture(draw, *data):
    """A PNG in 256 colours, bytes, of the figure that draw(*data, matplotlib.pyplot) returns.

    None, with a warning, if it cannot be drawn.
    """
    os.environ["MPLBACKEND"] = "agg"        # a notebook's backend may not be installed here
    try:
        import matplotlib.pyplot as plt
        from PIL import Image               # which matplotlib brings
        drawn, png = io.BytesIO(), io.BytesIO()
        figure = draw(*data, plt)
        figure.savefig(drawn, format="png", dpi=110)
        plt.close(figure)
        colours = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        colours.save(png, format="png", optimize=True)
        return png.getvalue()
    except Exception as e:
        print(f"warning: a picture could not be drawn ({reason(e)})", file=sys.stderr)


def save_figure(path, draw, *data):
    """Write such a picture, if it can be drawn."""
    png = picture(draw, *data)
    if png:
        atomic_write(path, png)


def learning_curve(metrics, held_out, plt):
    """PANELS over the steps. held_out: {"pass@1" or "greedy": (accuracy before, after)}, each may be None."""
    steps = [m["step"] for m in metrics]
    sigmas = [m["sigma"] for m in metrics]
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for axis, (key, title, unit, noisy) in zip(axes.flat, PANELS):
        axis.plot(steps, [m.get(key, math.nan) for m in metrics], color="tab:blue", linewidth=1.2)
        axis.set(title=title, xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        if noisy:
            noise_axis = axis.twinx()
            noise_axis.plot(steps, sigmas, color="tab:red", linewidth=1.2, drawstyle="steps-post")
            noise_axis.set_ylabel("noise σ (red)", color="tab:red")
            noise_axis.set_ylim(bottom=0)
    accuracy_axis = axes[0, 0]
    accuracy_axis.set_ylim(0, 1)
    for (kind, before_and_after), marker in zip(held_out.items(), "os"):
        places = [0, max(steps, default=0)]
        values = [math.nan if value is None else value for value in before_and_after]
        accuracy_axis.plot(places, values, marker, color="tab:orange", label=f"held-out, {kind}")
    accuracy_axis.legend(loc="upper left", frameon=False)
    return figure
