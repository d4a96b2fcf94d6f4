"""The arms of the studies, the questions that pairs of them answer, and how rows answer them.

A row is what a study keeps of a finished run: row_of in studies/study.py. A setting is an arm at a
learning rate, (arm, lr).
"""
from itertools import combinations
from statistics import fmean as mean

NO_NOISE = "--sigma-start 0 --sigma-end 0"
# {arm: flags of train_gsm8k.py}
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
    # It trains all weights, which wants a lower learning rate.
    "qurl:int8": "--method qurl:int8 --weights bf16 --lora-rank 0 --beta 0",
}
# So are the neighbours.
METHODS = {method: f"--method {method}" for method in (
    "rollout_correction:token-tis", "rollout_correction:sequence-mis", "rollout_correction:bypass",
    "flashrl:int8", "flashrl:fp8", "qurl:acr", "jetrl:unified", "jetrl:training", "fp16", "rilq",
    "qat:distil", "noise_control:divergence", "noise_control:entropy", "deep_grpo", "maspo")}
METHODS["four_over_six"] = "--quantizer four-over-six"
METHODS["fp16"] = "--dtype float16"
FLAGS = {**ARMS, **ABLATIONS, **METHODS}
# By default: the arms, and how many seeds of the small policy and of a real model.
STUDIES = {
    "claims": (list(ARMS), (10, 4)),
    "methods": (["nvfp4+aqn", "nvfp4", "bf16", "gptq+aqn", "awq+aqn", "four draws", *METHODS], (5, 2)),
}
# Each question: the arms with what is asked about, and the arms without, in pairs.
QUESTIONS = {
    "noise": [("nvfp4+aqn", "nvfp4"), ("bf16+aqn", "bf16")],
    "noise in BF16": [("bf16+aqn", "bf16")],
}
for codes, by in (("nvfp4", ""), ("gptq", " by GPTQ"), ("awq", " by AWQ")):
    noisy = f"{codes}+aqn"
    QUESTIONS |= {
        f"noise in NVFP4{by}": [(noisy, codes)],
        f"4 bits{by}": [(noisy, "bf16+aqn"), (codes, "bf16")],
        f"4 bits{by}, without noise": [(codes, "bf16")],
        f"4 bits{by}, under noise": [(noisy, "bf16+aqn")],
        f"both{by}": [(noisy, "bf16")],
    }
QUESTIONS |= {
    "GPTQ for rounding": [("gptq+aqn", "nvfp4+aqn"), ("gptq", "nvfp4")],
    "AWQ for rounding": [("awq+aqn", "nvfp4+aqn"), ("awq", "nvfp4")],
    "AWQ for rounding, under noise": [("awq+aqn", "nvfp4+aqn")],
    "NF4 for NVFP4": [("nf4", "nvfp4")],
    "MXFP4 for NVFP4": [("mxfp4", "nvfp4")],
    "all weights for LoRA": [("full", "bf16")],
    "NVFP4 + AQN with LoRA for all weights": [("nvfp4+aqn", "full")],
    **{change: [(change, "nvfp4+aqn")] for change in ABLATIONS | METHODS},
}


def rate_text(lr):
    """A learning rate as one writes it: 0.00015 -> "1.5e-4"."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def by_model(rows):
    """{model: {setting: {seed: row}}}, models in the order of their names.

    The rows have "gained", too: pass@1 after minus before.
    """
    models = {}
    for row in sorted(rows, key=lambda row: row["model"]):
        of_model = models.setdefault(row["model"], {})
        gained = row["accuracy_after"] - row["accuracy_before"]
        of_model.setdefault((row["arm"], row["lr"]), {})[row["seed"]] = {**row, "gained": gained}
    return models


def rates_of(by):
    """The learning rates of {setting: ...}, from the smallest."""
    return sorted({lr for _, lr in by})


def at_rate(pairs, lr):
    """Pairs of arms as pairs of settings."""
    return [((arm, lr), (other, lr)) for arm, other in pairs]


def differences(by, pairs, measure):
    """By seed, the mean over pairs (setting, other) of setting minus other: of seeds that have all.

    by: {setting: {seed: {measure: value}}}.
    """
    seeds = set.intersection(*(set(by.get(setting, ())) for pair in pairs for setting in pair))
    return [mean(by[one][seed][measure] - by[other][seed][measure] for one, other in pairs)
            for seed in sorted(seeds)]


def best_rates(by):
    """{arm: its learning rate with the highest training accuracy at the end}.

    Training questions decide, never those of the test. Two rates are compared by the seeds that both
    have, beginning with those of most seeds.
    """
    best = {}
    for arm, lr in sorted(by, key=lambda setting: (-len(by[setting]), setting[1])):
        if arm not in best:
            best[arm] = lr
            continue
        lead = differences(by, [((arm, lr), (arm, best[arm]))], "training_accuracy")
        if lead and mean(lead) > 0:
            best[arm] = lr
    return best


def questions_of(by, asked=QUESTIONS):
    """(what, learning rates as text, pairs of settings) of what the runs of a model are asked.

    At each rate, with each arm at its own best, if these differ, and in the mean of the rates at which
    most seeds answer.
    """
    rates = rates_of(by)
    best = best_rates(by)
    for what, pairs in asked.items():
        seeds = {lr: len(differences(by, at_rate(pairs, lr), "accuracy_after")) for lr in rates}
        top = max(seeds.values())
        most = [lr for lr in rates if top > 1 and seeds[lr] == top]
        yield from ((what, rate_text(lr), at_rate(pairs, lr)) for lr in rates)
        if len({best.get(arm) for pair in pairs for arm in pair}) > 1:
            yield what, "own best", [((a, best.get(a)), (b, best.get(b))) for a, b in pairs]
        if len(most) > 1:
            yield what, ", ".join(map(rate_text, most)), [
                pair for lr in most for pair in at_rate(pairs, lr)]


def larger_rates(by):
    """As questions_of, for pairs of learning rates: each arm at the larger minus itself at the smaller.

    "both" is the paper's comparison: NVFP4 + AQN at the larger rate minus BF16 at the smaller.
    """
    for low, high in combinations(rates_of(by), 2):
        change = f"{rate_text(low)} to {rate_text(high)}"
        for arm in FLAGS:
            yield arm, change, [((arm, high), (arm, low))]
        yield "both, 16 bit at the smaller", change, [(("nvfp4+aqn", high), ("bf16", low))]
