"""Draw the plots of docs/lecture.md from qerl.py itself into docs/figures/.

    python docs/figures.py             all of them, in seconds
    python docs/figures.py FOLDER      into another folder
"""
import os
import sys

import torch
from matplotlib.figure import Figure

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))              # where qerl.py is

import qerl

# The block of exercise 1 of the course; the tensor's other block holds a 6.
BLOCK = [0.9, -0.31, 0.05, 0.62, -1.2, 0.4, 0.0, 0.17,
         0.75, -0.08, 0.29, 1.05, -0.55, 0.33, -0.21, 0.12]
ONE = torch.ones(1, 1)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def rounding_error(format, weight):
    """Ŵ - W of a format."""
    format = qerl.FORMATS[format]
    return format.dequantize(*format.quantize(weight), torch.float32) - weight


# Each function below fills a figure, and its name is that of the file.

def rounding(figure):
    """Where a block's weights lie between the values that its codes can have."""
    packed, scale, global_scale = qerl.quantize_nvfp4(torch.tensor([BLOCK + [6.0] * 16]))
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten()[:16]
    scale, global_scale = scale[0, 0].item(), global_scale.item()
    axis = figure.subplots()
    axis.vlines(qerl.E2M1, -1, 16, color="lightgray", zorder=0)
    for row, (weight, code) in enumerate(zip(BLOCK, codes.tolist())):
        place = weight * global_scale / scale
        axis.plot(place, row, ".", color="tab:blue")
        axis.annotate("", (qerl.E2M1[code], row), (place, row),
                      arrowprops={"arrowstyle": "-", "color": "tab:red", "shrinkA": 0, "shrinkB": 0})
        axis.text(6.6, row, f"{code:04b}", va="center", family="monospace")
    axis.set_xticks([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6])
    axis.set(yticks=range(16), yticklabels=BLOCK, xlim=(-6.6, 8), ylabel="weight",
             xlabel=f"weight / unit; unit = block scale {scale:g} / global scale {global_scale:g}",
             title="weights (dots), the way to their codes' values, the 4 bits")


def formats(figure):
    """Rounding error by format and distribution."""
    gaussian = torch.randn(512, 1024, generator=seeded(0))
    rare = torch.rand(512, 1024, generator=seeded(1))
    weights = {
        "Gaussian": gaussian,
        "uniform": 2 * rare - 1,
        "Laplace": gaussian.sign() * rare.log(),
        "Gaussian with\noutliers": gaussian * torch.where(rare < 1 / 256, 10, 1),      # 1 of 256
    }
    axis = figure.subplots()
    for i, format in enumerate(["nvfp4", "mxfp4", "nf4"]):
        errors = [rounding_error(format, w).norm() / w.norm() for w in weights.values()]
        bars = axis.bar([place + i / 4 for place in range(4)], errors, 0.23, label=format)
        axis.bar_label(bars, fmt="%.3f", fontsize="small")
    axis.set_xticks([place + 1 / 4 for place in range(4)], weights)
    axis.set(ylabel="‖Ŵ - W‖ / ‖W‖", ylim=(0, 0.18))
    axis.legend(ncols=3, loc="upper left")


def staircase(figure):
    """σ by step."""
    axis = figure.subplots()
    axis.plot([qerl.noise_sigma(step, 300) for step in range(300)], linewidth=3)
    axis.set(xlabel="step of 300", ylabel="σ")
    axis.grid()


def columns(figure):
    """Noise in the norm and rounding, as changes of a weight."""
    weight = torch.randn(32, 64, generator=seeded(0))
    norm = qerl.RMSNorm("a norm", torch.ones(64), 1e-6)
    with qerl.adaptive_quantization_noise(norm, 0.1, seeded(1)):
        noise = weight * (norm.noisy_weight - 1)
    axes = figure.subplots(2, sharex=True)
    changes = {"noise in the norm, σ = 0.1: each column times one factor": noise,
               "rounding to NVFP4: an error for each weight": rounding_error("nvfp4", weight)}
    for axis, (title, change) in zip(axes, changes.items()):
        picture = axis.imshow(change, cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
        axis.set(title=title, yticks=[])
    axis.set_xlabel("input channel (column of W)")
    figure.colorbar(picture, ax=axes, label="change of the weight", ticks=[-0.3, 0, 0.3])


def clip(figure):
    """A token's gain by its ratio."""
    ratios = torch.linspace(0.4, 1.8, 281)
    for axis, A in zip(figure.subplots(1, 2), [1, -1]):
        gain = [-qerl.policy_loss(ratio.log() * ONE, 0 * ONE, A * ONE, ONE)[0] for ratio in ratios]
        axis.plot(ratios, A * ratios, ":", label="ρ A")
        axis.plot(ratios, gain, linewidth=3, label="min(ρ A, clip(ρ) A)")
        axis.set(xlabel="ρ = π_θ / π_old", ylabel="gain", title=f"advantage {A}",
                 xticks=[0.8, 1.28])
        axis.grid(axis="x")
        axis.legend()


def k3(figure):
    """Estimates of the KL divergence by a token's log-ratio."""
    x = torch.linspace(-2, 2, 201)
    kl = [qerl.policy_loss(0 * ONE, 0 * ONE, ONE, ONE, ref_logprobs=value * ONE)[1] for value in x]
    axis = figure.subplots()
    axis.plot(x, -x, label="K1 = -x: of either sign")
    axis.plot(x, kl, linewidth=3, label="K3 = eˣ - x - 1: never negative")
    axis.set(xlabel="x = log π_ref - log π_θ of a token that π_θ sampled",
             ylabel="estimate of KL(π_θ || π_ref)")
    axis.grid()
    axis.legend()


def main(folder=f"{HERE}/figures"):
    os.makedirs(folder, exist_ok=True)
    for draw in (rounding, formats, staircase, columns, clip, k3):
        figure = Figure(figsize=(6.4, 3), layout="constrained")    # small, so that its type is large
        draw(figure)
        figure.savefig(f"{folder}/{draw.__name__}.png", dpi=200)


if __name__ == "__main__":
    main(*sys.argv[1:])
