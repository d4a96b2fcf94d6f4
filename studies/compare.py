"""The methods of methods/ side by side: what each quantises, costs and reaches.

    python bench.py methods                                     the small policy, on this machine
    python bench.py methods --model FOLDER --data FOLDER        a real model, one run a GPU
    python bench.py methods --tables                            only the table

How runs are made, stopped and resumed: studies/study.py. Beside the runs stands table.md,
made of them; flags that are not named here go to train_gsm8k.py.
"""
from dataclasses import replace
from statistics import fmean as mean

from harness.command import require_flag
from methods.parts.quantizers import QUANTIZERS
from studies.study import NO_NOISE, arguments, grouped, run_study, table, with_error, write_lines

METHODS = [
    "qerl", "no noise", "bf16", "rollout_correction:token-tis", "rollout_correction:sequence-mis",
    "rollout_correction:bypass", "flashrl:int8", "flashrl:fp8", "qurl:acr", "qurl:int8",
    "jetrl:unified", "jetrl:training", "fp16", "rilq", "qat:distil", "four_over_six", "awq", "gptq",
    "noise_control:divergence", "noise_control:entropy", "pooled_noise", "deep_grpo", "maspo",
]
TITLES = ["model", "method", "memory, GB", "seconds a step", "mismatch K3", "pass@1 before", "after",
          "gain over qerl, points", "greedy after", "seeds"]


def flags_of(small):
    """{method: flags of train_gsm8k.py} for the small policy or a real model.

    Training all weights wants a lower learning rate than LoRA.
    """
    flags = {arm: f"--method {arm}" for arm in METHODS}
    for name in QUANTIZERS:                     # the others round to the nearest code
        flags[name.replace("-", "_")] += f" --quantizer {name}"
    flags["qurl:int8"] += f" --weights bf16 --lora-rank 0 --beta 0 --lr {'1e-4' if small else '1e-6'}"
    return flags | {"qerl": "", "no noise": NO_NOISE, "bf16": f"--weights bf16 {NO_NOISE}"}


def methods_table(rows):
    """A line for each model and method: means and standard errors over the seeds.

    The gain is over QeRL's run of the same seed, in brackets how many seeds both have.
    """
    groups = grouped(rows, "model", "arm")
    lines = []
    for model, arm in sorted(groups, key=lambda group: (group[0], METHODS.index(group[1]))):
        same = groups[model, arm]
        qerl = {row["seed"]: row["accuracy_after"] for row in groups.get((model, "qerl"), [])}
        gains = [row["accuracy_after"] - qerl[row["seed"]] for row in same if row["seed"] in qerl]
        before, after, greedy = (with_error([row[measure] for row in same]) for measure in (
            "accuracy_before", "accuracy_after", "greedy_after"))
        lines.append([
            model,
            arm,
            f"{max(row['peak_memory_gb'] for row in same):.1f}",
            f"{mean(row['seconds_a_step'] for row in same):.2f}",
            f"{max(0.0, mean(row['mismatch_kl'] for row in same)):.1e}",     # 0 but for rounding
            before,
            after,
            f"{with_error(gains)} ({len(gains)})" if gains and arm != "qerl" else "-",
            greedy,
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
    args = arguments(argv, __doc__, METHODS, METHODS, seeds=(5, 2), out="runs/methods")
    require_flag(len(args.lrs) == 1, "lrs", args.lrs, "methods are compared at one learning rate; give "
                 "each an --out of its own")
    args.settings = replace(args.settings, lr=args.lrs[0])
    return run_study(flags_of(not args.model), args, make_tables)
