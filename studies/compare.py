"""The methods of methods/ side by side: what each quantises, costs and reaches.

    python bench.py methods                                     the small policy, on this machine
    python bench.py methods --model FOLDER --data FOLDER        a real model, one run a GPU
    python bench.py methods --tables                            only the table

How runs are made, stopped and resumed: studies/study.py. Beside the runs stands table.md,
made of them; flags that are not named here go to train_gsm8k.py.
"""
from dataclasses import replace
from itertools import product
from statistics import fmean as mean

from harness.command import require_flag
from methods.parts.quantizers import QUANTIZERS
from studies.study import NO_NOISE, arguments, grouped, run_study, table, with_error, write_lines

LORA = "NVFP4 + LoRA"
NOISY = "NVFP4 + LoRA, noise"
# A method's weights: those that sample, those that train.
METHODS = {
    "qerl": (NOISY, LORA),
    "no noise": (LORA, LORA),
    "bf16": ("BF16 + LoRA", "BF16 + LoRA"),
    "rollout_correction:token-tis": (NOISY, LORA),
    "rollout_correction:sequence-mis": (NOISY, LORA),
    "rollout_correction:bypass": (NOISY, LORA),
    "flashrl:int8": ("INT8, activations too", "BF16 + LoRA"),
    "flashrl:fp8": ("FP8, activations too", "BF16 + LoRA"),
    "qurl:acr": (NOISY, LORA),
    "qurl:int8": ("INT8, activations too", "BF16, all weights"),
    "jetrl:unified": ("FP8, activations too", "the same in FP8, LoRA in 16 bit"),
    "jetrl:training": (NOISY, "NVFP4 as FP8, LoRA in 16 bit"),
    "fp16": ("NVFP4 + LoRA, noise, float16", "NVFP4 + LoRA, float16"),
    "rilq": (NOISY, "NVFP4 + LoRA from RILQ"),
    "qat:distil": ("QAT's NVFP4 + LoRA, noise", "QAT's NVFP4 + LoRA"),
    "four_over_six": (NOISY, LORA),
    "awq": (NOISY, LORA),
    "gptq": (NOISY, LORA),
    "noise_control:divergence": ("NVFP4 + LoRA, noise by its divergence", LORA),
    "noise_control:entropy": ("NVFP4 + LoRA, noise by the entropy", LORA),
    "pooled_noise": ("NVFP4 + LoRA, four draws of noise a group", LORA),
    "deep_grpo": ("NVFP4 + LoRA, noise, branches", LORA),
    "maspo": (NOISY, LORA),
}


def flags_of(small):
    """{method: flags of train_gsm8k.py} for the small policy or a real model.

    Training all weights wants a lower learning rate than LoRA.
    """
    flags = {arm: f"--method {arm}" for arm in METHODS}
    for name in QUANTIZERS:                     # the others round to the nearest code
        flags[name.replace("-", "_")] += f" --quantizer {name}"
    flags["qurl:int8"] += f" --weights bf16 --lora-rank 0 --beta 0 --lr {'1e-4' if small else '1e-6'}"
    return flags | {"qerl": "", "no noise": NO_NOISE, "bf16": f"--weights bf16 {NO_NOISE}"}


TITLES = ["model", "method", "sampled with", "trained", "memory, GB", "seconds a step", "mismatch K3",
          "pass@1 before", "after", "gain over qerl, points", "greedy after", "seeds"]


def methods_table(rows):
    """A line for each model and method: means and standard errors over the seeds.

    The gain is over QeRL's run of the same seed, in brackets how many seeds both have.
    """
    groups = grouped(rows, "model", "arm")
    lines = []
    for model, arm in product(sorted({row["model"] for row in rows}), METHODS):
        same = groups.get((model, arm), [])
        if not same:
            continue
        qerl = {row["seed"]: row["accuracy_after"] for row in groups.get((model, "qerl"), [])}
        gains = [row["accuracy_after"] - qerl[row["seed"]] for row in same if row["seed"] in qerl]
        lines.append([
            model,
            arm,
            *METHODS[arm],
            f"{max(row['peak_memory_gb'] for row in same):.1f}",
            f"{mean(row['seconds_a_step'] for row in same):.2f}",
            f"{max(0.0, mean(row['mismatch_kl'] for row in same)):.1e}",     # 0 but for rounding
            *(with_error([row[f"accuracy_{when}"] for row in same]) for when in ("before", "after")),
            f"{with_error(gains)} ({len(gains)})" if gains and arm != "qerl" else "-",
            with_error([row["greedy_after"] for row in same]),
            len(same),
        ])
    return table(TITLES, lines)


def make_tables(out, rows, steps):
    """table.md from the rows of a study; steps: not read here."""
    lines = ["Made by `bench.py methods` or `bench.py tables`: means ± standard errors of seeds, in "
             "percent.", "", *methods_table(rows)]
    write_lines(f"{out}/table.md", lines)
    print("\n".join(lines))


def main(argv):
    """The exit status: 1 if a run failed."""
    args = arguments(argv, __doc__, METHODS, list(METHODS), seeds=(5, 2), out="runs/methods")
    require_flag(len(args.lrs) == 1, "lrs", args.lrs, "methods are compared at one learning rate; give "
                 "each an --out of its own")
    args.settings = replace(args.settings, lr=args.lrs[0])
    return run_study(flags_of(not args.model), args, make_tables)
