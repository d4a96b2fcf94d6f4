"""Pictures: a run's learning curve, and how any picture is written."""
import io
import os
import sys

from harness.run_folder import atomic_write
from qerl import reason

PANELS = [
    ("accuracy", "training accuracy (temperature 1)", "fraction correct"),
    ("reward", "mean reward", "reward"),
    ("entropy", "policy entropy and AQN sigma", "nats a token"),
    ("length", "completion length", "tokens"),
]


def save_figure(path, draw, *data):
    """Write the picture that draw(*data, matplotlib.pyplot) returns; where that fails, warn."""
    os.environ["MPLBACKEND"] = "agg"        # a notebook's backend may not be installed here
    try:
        import matplotlib.pyplot as plt
        picture = io.BytesIO()
        figure = draw(*data, plt)
        figure.savefig(picture, format="png", dpi=110)
        plt.close(figure)
    except Exception as e:
        print(f"warning: {path} could not be drawn ({reason(e)})", file=sys.stderr)
    else:
        atomic_write(path, picture.getvalue())


def learning_curve(metrics, before, after, plt):
    """Accuracy, reward, entropy with the noise, and completion length over the steps.

    before, after: held-out accuracy; before is None where it was not measured.
    """
    steps = [m["step"] for m in metrics]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    for axis, (key, title, label) in zip(axes.flat, PANELS):
        axis.plot(steps, [m[key] for m in metrics], color="tab:blue", linewidth=1.2)
        axis.set(title=title, xlabel="step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    accuracy_axis = axes[0, 0]
    entropy_axis = axes[1, 0]
    accuracy_axis.set_ylim(0, 1)
    held_out = [(before, 0, "o", "before"), (after, max(steps, default=0), "s", "after")]
    for accuracy, step, marker, when in held_out:
        if accuracy is None:
            continue
        label = f"held-out (temperature 0.6) {when}: {accuracy:.1%}"
        accuracy_axis.plot(step, accuracy, marker, color="tab:orange", label=label)
    accuracy_axis.legend(loc="upper left", frameon=False)
    entropy_axis.yaxis.label.set_color("tab:blue")
    sigma_axis = entropy_axis.twinx()
    sigmas = [m["sigma"] for m in metrics]
    sigma_axis.plot(steps, sigmas, color="tab:red", linewidth=1.2, drawstyle="steps-post")
    sigma_axis.set_ylabel("sigma", color="tab:red")
    sigma_axis.set_ylim(bottom=0)
    return figure
