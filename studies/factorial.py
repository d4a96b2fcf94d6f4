"""The arms of the claims study, the questions that pairs of them answer, and how rows answer them.

A row is what a study keeps of a finished run: row_of in studies/study.py. A setting is an arm at a
learning rate, (arm, lr).
"""
import math
from statistics import fmean as mean

from studies.study import NO_NOISE, start_of

ARMS = {}
for codes, flags in {
    "nvfp4": "--weights nvfp4",
    "bf16": "--weights bf16",
    # NVFP4 again, by calibrated codes; the other arms round to the nearest.
    "gptq": "--weights nvfp4 --quantizer gptq",
    "awq": "--weights nvfp4 --quantizer awq",                   # as the paper, section 4.1
}.items():
    ARMS[f"{codes}+aqn"] = flags
    ARMS[codes] = f"{flags} {NO_NOISE}"
ARMS |= {
    "nf4": f"--weights nf4 {NO_NOISE}",
    "mxfp4": f"--weights mxfp4 {NO_NOISE}",
    # Without LoRA there is no reference policy to stay near.
    "full": f"--weights bf16 --lora-rank 0 --beta 0 {NO_NOISE}",
}
# One change each to NVFP4 with AQN; the figures named are the paper's.
ABLATIONS = {
    "linear": "--schedule linear",                                          # Fig. 9
    "cosine": "--schedule cosine",
    "logarithmic": "--schedule logarithmic",
    "sigma x4": "--sigma-start 4e-2 --sigma-end 2e-3",
    "sigma / 4": "--sigma-start 2.5e-3 --sigma-end 1.25e-4",
    "sigma 5e-2": "--sigma-start 5e-2",          # section 4.1's, where Table 4 has 1e-2
    "four draws": "--method pooled_noise",       # of noise a group instead of one a batch
    "rank 16": "--lora-rank 16",                                            # Fig. 10
    "rank 64": "--lora-rank 64",
    "rank 128": "--lora-rank 128",
    "dapo": "--algo dapo",
    "tis": "--tis 2",
    "random reward": "--reward random",
}
FLAGS = {**ARMS, **ABLATIONS}
# Each question of the factorial: the arms with what is asked about, and the arms without, in
# pairs.
QUESTIONS = {
    "noise": [("nvfp4+aqn", "nvfp4"), ("bf16+aqn", "bf16")],
    "noise in NVFP4": [("nvfp4+aqn", "nvfp4")],
    "noise in BF16": [("bf16+aqn", "bf16")],
    "4 bits": [("nvfp4+aqn", "bf16+aqn"), ("nvfp4", "bf16")],
    "4 bits without noise": [("nvfp4", "bf16")],
    "4 bits under noise": [("nvfp4+aqn", "bf16+aqn")],
    "both": [("nvfp4+aqn", "bf16")],
}
for codes, name in (("gptq", "GPTQ"), ("awq", "AWQ")):
    noisy = f"{codes}+aqn"
    QUESTIONS |= {
        f"noise in NVFP4 by {name}": [(noisy, codes)],
        f"4 bits by {name}": [(noisy, "bf16+aqn"), (codes, "bf16")],
        f"4 bits by {name}, without noise": [(codes, "bf16")],
        f"4 bits by {name}, under noise": [(noisy, "bf16+aqn")],
        f"both, 4 bits by {name}": [(noisy, "bf16")],
        f"{name} for rounding": [(noisy, "nvfp4+aqn"), (codes, "nvfp4")],
    }
QUESTIONS |= {
    "AWQ for rounding, under noise": [("awq+aqn", "nvfp4+aqn")],
    "NF4 for NVFP4": [("nf4", "nvfp4")],
    "MXFP4 for NVFP4": [("mxfp4", "nvfp4")],
    "all weights for LoRA": [("full", "bf16")],
    "NVFP4 + AQN with LoRA for all weights": [("nvfp4+aqn", "full")],
}
CHANGES = {arm: [(arm, "nvfp4+aqn")] for arm in ABLATIONS}


def best_rates(rows):
    """{arm: the learning rate with the highest mean training accuracy at the end} of a model's rows.

    Only of arms that were tried at two rates or more. Training questions decide, never those of the
    test. Two rates are compared by the seeds that both have, beginning with those of most seeds.
    """
    accuracy = {}                                              # {arm: {lr: {seed: accuracy}}}
    for r in rows:
        of_arm = accuracy.setdefault(r["arm"], {})
        of_arm.setdefault(r["lr"], {})[r["seed"]] = r["training_accuracy"]
    best = {}
    for arm, reached in sorted(accuracy.items()):
        first, *others = sorted(reached, key=lambda lr: (-len(reached[lr]), lr))
        for lr in others:
            leader = best.get(arm, first)
            common = reached[lr].keys() & reached[leader].keys()
            lead = [reached[lr][seed] - reached[leader][seed] for seed in common]
            if lead:
                best[arm] = lr if mean(lead) > 0 else leader
    return best


def measured_starts(rows, measure):
    """{start: accuracy_before or greedy_before}, of the starts that a run measured."""
    return {start_of(r): r[measure] for r in rows if measure in r}


def by_model(rows):
    """{model: {(setting, seed): row}}, models in the order of their names.

    The rows have "gained", too: pass@1 after minus before, nan where that was not measured.
    """
    before = measured_starts(rows, "accuracy_before")
    models = {}
    for r in sorted(rows, key=lambda r: r["model"]):
        gained = r["accuracy_after"] - before.get(start_of(r), math.nan)
        by = models.setdefault(r["model"], {})
        by[(r["arm"], r["lr"]), r["seed"]] = {**r, "gained": gained}
    return models


def rates_of(by):
    """The learning rates of {(setting, seed): ...}, from the smallest."""
    return sorted({lr for (_, lr), _ in by})


def at_rate(pairs, lr):
    """Pairs of arms as pairs of settings; the second may be None."""
    return [((arm, lr), other and (other, lr)) for arm, other in pairs]


def differences(by, pairs, measure):
    """By seed, the mean over pairs (setting, other) of setting minus other: of seeds that have all.

    by: {(setting, seed): {measure: value}}. other: None for the setting's own value.
    """
    seeds = sorted({seed for _, seed in by})
    return [
        mean(by[a, seed][measure] - (by[b, seed][measure] if b else 0.0) for a, b in pairs)
        for seed in seeds
        if all((setting, seed) in by for pair in pairs for setting in pair if setting)
    ]
