"""The noise that raises the entropy before training as much as rounding does: sigma*.

    python -m studies.entropy RUNS/1               of a folder with runs of `studies/decide.sh entropy`
"""
from pathlib import Path

import numpy as np

from harness.command import Parser, one_line
from harness.errors import require
from harness.folders import read_jsonl
from studies.plots import table


def matching_sigma(folder):
    """Print the entropy before training by format and sigma, and sigma* of noise and of temperature.

    The steps after the first have sigma, and ask the same questions in each run: differences are by
    step. sigma* is where BF16's rise reaches that of NVFP4 by GPTQ. Between neighbours the rise is taken
    as linear in sigma squared, that of a temperature as linear in its own rise.
    """
    steps = {}
    for path in Path(folder).glob("entropy-*/metrics.jsonl"):
        _, format, sigma = path.parent.name.split("-")
        steps[format, float(sigma)] = np.array([step["entropy"] for step in read_jsonl(path)[1:]])
    for needed in ("bf16", "gptq"):
        require((needed, 0) in steps, f"{folder}: has no entropy of {needed}; see studies/decide.sh entropy")
    rises = {}
    lines = []
    for (format, sigma), entropy in sorted(steps.items()):
        difference = entropy - steps["bf16", 0]
        rise, error = difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5
        rises.setdefault(format, {})[sigma] = rise
        lines.append([format, f"{sigma:g}", f"{entropy.mean():.4f}", f"{rise:.4f} ± {error:.4f}"])
    print("\n".join(table(["format", "sigma", "entropy, nats a token", "rise over BF16's"], lines)))
    wanted = rises["gptq"][0]
    for format, power in (("bf16", 2), ("temperature", 1)):
        measured = {0.0: 0.0} | rises.get(format, {})
        sigmas = np.array(sorted(measured))
        heights = np.maximum.accumulate([measured[sigma] for sigma in sigmas])
        star = np.interp(wanted, heights, sigmas ** power) ** (1 / power)
        beyond = "; that is beyond what was measured" if wanted > heights[-1] else ""
        print(f"\n{format}: sigma* = {star:.2g}, where the rise is {wanted:.4f}{beyond}")


if __name__ == "__main__":
    with one_line():
        p = Parser(__doc__)
        p.add_argument("folder")
        matching_sigma(p.parse_args().folder)
