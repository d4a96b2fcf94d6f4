"""The curves of report.html as points of SVG pictures; its template draws and explains them."""
import math
from dataclasses import dataclass

# The corners of a plot in a picture of 400 x 230.
LEFT = 48
RIGHT = 352
TOP = 24
BOTTOM = 198


@dataclass
class Curve:
    """A picture: the metric `left` as a solid line; `right`, dashed, has its own scale."""
    left: str
    title: str
    unit: str
    right: str = None
    right_unit: str = ""
    top: float = None                  # of the left scale; None: by the largest value


CURVES = [
    Curve("accuracy", "Accuracy", "fraction right", top=1.0),
    Curve("reward", "Reward", "mean reward"),
    Curve("entropy", "Entropy and noise", "entropy (nats a token)", "sigma", "noise σ"),
    Curve("length", "Completion length", "mean tokens"),
    Curve("kl", "KL to the reference", "nats a token"),
    Curve("mismatch_kl", "Mismatch", "KL (nats a token)", "sigma", "noise σ"),
    Curve("gradient_norm", "Gradient norm", "norm before clipping"),
]


def curves(metrics, accuracy, settings):
    """The pictures of a run's metrics. accuracy: {kind: (before, after)}, held-out."""
    last = max((m["step"] for m in metrics), default=0)
    pictures = {c.left: draw(c, metrics, last) for c in CURVES if known(metrics, c.left)}
    if not settings.get("beta", 1.0):
        pictures.pop("kl", None)       # the reference is not asked: all zeros
    if "accuracy" in pictures:
        pictures["accuracy"]["marks"] = held_out_marks(accuracy, last)
    if "gradient_norm" in pictures and "gradient_clip" in settings:
        limit = pictures["gradient_norm"]["up"](settings["gradient_clip"])
        if limit >= TOP:               # else no gradient came near it
            pictures["gradient_norm"]["limit"] = limit
    return pictures


def known(metrics, key):
    """(step, value) where the metric is there and finite."""
    pairs = [(m["step"], m.get(key)) for m in metrics]
    return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def draw(curve, metrics, last):
    """The coordinates of one picture."""
    left = known(metrics, curve.left)
    right = known(metrics, curve.right)
    across = scale(last, LEFT, RIGHT)
    up, left_ticks = vertical(left, curve.top)
    right_up, right_ticks = vertical(right)
    steps = [step for step in ticks(last) if step == int(step) and step < 0.9 * last] + [last]
    return {
        "title": curve.title,
        "unit": curve.unit,
        "right_unit": curve.right_unit if right else "",
        "words": f"{curve.title}: {described(left[0])}, {described(left[-1])}",
        "left": [(across(step), up(value)) for step, value in left],
        "right": [(across(step), right_up(value)) for step, value in right],
        "left_ticks": left_ticks,
        "right_ticks": right_ticks if right else [],
        "step_ticks": [(across(step), f"{step:.0f}") for step in steps],
        "up": up,
    }


def described(pair):
    return f"{pair[1]:.3g} at step {pair[0]}"


def held_out_marks(accuracy, last):
    """(x, y, kind, words) of each held-out accuracy: at step 0 and at the last."""
    across = scale(last, LEFT, RIGHT)
    up = scale(1.0, BOTTOM, TOP)
    return [
        (across(step), up(value), kind, f"{kind}, {when}: {value:.1%}")
        for kind, values in accuracy.items()
        for value, step, when in zip(values, (0, last), ("before", "after"))
        if value is not None
    ]


def scale(top, start, end):
    """A function from a value to its place between start (value 0 and below) and end (`top`)."""
    return lambda value: round(start + (end - start) * max(value, 0.0) / (top or 1.0), 1)


def vertical(pairs, top=None):
    """(scale, [(place, label) of each tick]) of the values, or of 0 to `top`."""
    values = ticks(top or max((value for _, value in pairs), default=1.0))
    up = scale(values[-1], BOTTOM, TOP)
    return up, [(up(value), f"{value:.3g}") for value in values]


def ticks(top):
    """0 and up to four round numbers in equal steps, the last not below `top`."""
    top = top if top > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(power * m for m in (1, 2, 2.5, 5, 10, 20) if 4 * power * m >= top)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]
