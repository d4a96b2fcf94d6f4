"""The methods of methods/ side by side: what each quantises, costs and reaches.

    python bench.py methods                                     the small policy, on this machine
    python bench.py methods --model FOLDER --data FOLDER        a real model, one run a GPU
    python bench.py methods --tables                            only the table

How runs are made, stopped and resumed: studies/study.py. Beside the runs stands table.md,
made of them; flags that are not named here go to train_gsm8k.py.
"""
from itertools import product
from statistics import fmean as mean
from typing import NamedTuple

from harness.command import require_flag
from methods.parts.quantizers import QUANTIZERS
from studies.study import NO_NOISE, arguments, run_study, table, with_error, write_lines


class Row(NamedTuple):
    """A method as the table has it: the weights that sample, those that train, and its flags."""
    rollout: str
    training: str
    flags: list


FULL = ["--weights", "bf16", "--lora-rank", "0", "--beta", "0"]
NVFP4 = "NVFP4 + LoRA"
ROWS = {
    "qerl": Row(f"{NVFP4}, noise", NVFP4, []),
    "no noise": Row(NVFP4, NVFP4, NO_NOISE),
    "bf16": Row("BF16 + LoRA", "BF16 + LoRA", ["--weights", "bf16", *NO_NOISE]),
    "rollout_correction:token-tis": Row(f"{NVFP4}, noise", NVFP4, []),
    "rollout_correction:sequence-mis": Row(f"{NVFP4}, noise", NVFP4, []),
    "rollout_correction:bypass": Row(f"{NVFP4}, noise", NVFP4, []),
    "flashrl:int8": Row("INT8, activations too", "BF16 + LoRA", []),
    "flashrl:fp8": Row("FP8, activations too", "BF16 + LoRA", []),
    "qurl:acr": Row(f"{NVFP4}, noise", NVFP4, []),
    "qurl:int8": Row("INT8, activations too", "BF16, all weights", FULL),
    "jetrl:unified": Row("FP8, activations too", "the same in FP8, LoRA in 16 bit", []),
    "jetrl:training": Row(f"{NVFP4}, noise", "NVFP4 as FP8, LoRA in 16 bit", []),
    "fp16": Row("NVFP4 + LoRA, noise, float16", "NVFP4 + LoRA, float16", []),
    "rilq": Row(f"{NVFP4}, noise", f"{NVFP4} from RILQ", []),
    "qat:distil": Row("QAT's NVFP4 + LoRA, noise", "QAT's NVFP4 + LoRA", []),
    "four_over_six": Row(f"{NVFP4}, noise", NVFP4, []),
    "awq": Row(f"{NVFP4}, noise", NVFP4, []),
    "gptq": Row(f"{NVFP4}, noise", NVFP4, []),
    "noise_control:divergence": Row(f"{NVFP4}, noise by its divergence", NVFP4, []),
    "noise_control:entropy": Row(f"{NVFP4}, noise by the entropy", NVFP4, []),
    "pooled_noise": Row(f"{NVFP4}, four draws of noise a group", NVFP4, []),
    "deep_grpo": Row(f"{NVFP4}, noise, branches", NVFP4, []),
    "maspo": Row(f"{NVFP4}, noise", NVFP4, []),
}
WITHOUT_FILE = ("qerl", "no noise", "bf16")
# The files that choose codes, and their names in --quantizer; the others round to nearest.
CODES = {name.replace("-", "_"): name for name in QUANTIZERS}


def flags_of(small):
    """{method: flags of train_gsm8k.py} for the small policy or a real model.

    Training all weights wants a lower learning rate than LoRA.
    """
    found = {}
    for arm, row in ROWS.items():
        method = [] if arm in WITHOUT_FILE else ["--method", arm]
        if arm in CODES:
            method += ["--quantizer", CODES[arm]]
        rate = ["--lr", "1e-4" if small else "1e-6"] if row.flags == FULL else []
        found[arm] = [*method, *row.flags, *rate]
    return found


TITLES = ["model", "method", "sampled with", "trained", "memory, GB", "seconds a step", "mismatch K3",
          "pass@1 before", "after", "gain over qerl, points", "greedy after", "seeds"]


def methods_table(rows):
    """A line for each model and method: means and standard errors over the seeds.

    The gain is over QeRL's run of the same seed, in brackets how many seeds both have.
    """
    lines = []
    models = sorted({r["model"] for r in rows})
    for model, arm in product(models, ROWS):
        same = [r for r in rows if (r["model"], r["arm"]) == (model, arm)]
        if not same:
            continue
        qerl = {r["seed"]: r["accuracy_after"] for r in rows
                if (r["model"], r["arm"]) == (model, "qerl")}
        before = [r["accuracy_before"] for r in same if "accuracy_before" in r]
        gains = [r["accuracy_after"] - qerl[r["seed"]] for r in same if r["seed"] in qerl]
        lines.append([
            model,
            arm,
            ROWS[arm].rollout,
            ROWS[arm].training,
            f"{max(r['peak_memory_gb'] for r in same):.1f}",
            f"{mean(r['seconds_a_step'] for r in same):.2f}",
            f"{max(0.0, mean(r['mismatch_kl'] for r in same)):.1e}",      # 0 but for rounding
            with_error(before) if before else "-",
            with_error([r["accuracy_after"] for r in same]),
            f"{with_error(gains)} ({len(gains)})" if gains and arm != "qerl" else "-",
            with_error([r["greedy_after"] for r in same]),
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
    args = arguments(argv, __doc__, list(ROWS), list(ROWS), seeds=(5, 2), out="runs/methods")
    require_flag(len(args.lrs) == 1, "lrs", args.lrs, "methods are compared at one learning rate; give "
                 "each an --out of its own")
    flags = flags_of(small=args.model == [None])
    return run_study(flags, args, make_tables, same=["--lr", str(args.lrs[0])])
