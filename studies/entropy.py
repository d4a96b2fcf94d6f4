"""The noise that raises the entropy before training as much as rounding does: sigma*.

    python -m studies.entropy RUNS/1               of a folder with runs of `studies/decide.sh entropy`
"""
import math
from pathlib import Path

import numpy as np

from harness.command import Parser, one_line
from harness.errors import require
from harness.folders import read_jsonl
from studies.plots import table


def matching_sigma(folder):
    """Print the entropy before training by format and sigma, and sigma*.

    The steps after the first have sigma, and ask the same questions in each run: differences are by
    step. sigma* is where BF16's rise reaches that of NVFP4 by GPTQ or, if this is not two standard
    errors above 0, by rounding. Between neighbours the rise is taken as linear in sigma squared.
    """
    steps = {}
    for path in Path(folder).glob("entropy-*/metrics.jsonl"):
        _, format, sigma = path.parent.name.split("-")
        steps[format, float(sigma)] = np.array([step["entropy"] for step in read_jsonl(path)[1:]])
    require(("bf16", 0) in steps, f"{folder}: no entropy here; see studies/decide.sh entropy")
    rises = {}
    lines = []
    for (format, sigma), entropy in sorted(steps.items()):
        difference = entropy - steps["bf16", 0]
        rise, error = difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5
        rises[format, sigma] = rise, error
        lines.append([format, f"{sigma:g}", f"{entropy.mean():.4f}", f"{rise:.4f} ± {error:.4f}"])
    print("\n".join(table(["format", "sigma", "entropy, nats a token", "rise over BF16's"], lines)))
    rise, error = rises["gptq", 0]
    wanted = rise if rise > 2 * error else rises["rtn", 0][0]
    sigmas = sorted(sigma for format, sigma in rises if format == "bf16")
    heights = np.maximum.accumulate([rises["bf16", sigma][0] for sigma in sigmas])
    star = math.sqrt(np.interp(wanted, heights, np.square(sigmas)))
    print(f"\nsigma* = {star:.2g}: there the rise is {wanted:.4f}")
    if wanted > heights[-1]:
        print("That is beyond what was measured: measure larger ones")


if __name__ == "__main__":
    with one_line():
        p = Parser(__doc__)
        p.add_argument("folder")
        matching_sigma(p.parse_args().folder)
