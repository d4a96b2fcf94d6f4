"""Entropy of the policy before any training, by format and by noise (Fig. 5 and 14 of the paper).

    python bench.py entropy                                      the small policy
    python bench.py entropy --model FOLDER --data FOLDER         a real model

The paper's first claim: quantisation raises the entropy, and noise raises it further. Each format
answers the same questions, without noise and with more and more of it; a draw of noise serves one
rollout, so several are taken. Written to entropy.json, and a picture of it.
"""
import json
import os
from statistics import fmean

import torch

import methods
import qerl
import train_gsm8k
from harness.figures import save_figure
from harness.flags import Parser, check_device, full_name, require_flag
from harness.instruments import command_line, environment
from harness.run_folder import atomic_write, creating
from studies.study import data_in_rows, name_in_rows, standard_error

SIGMAS = [0.0, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2]
COLORS = {"nvfp4": "tab:green", "mxfp4": "tab:red", "nf4": "tab:orange", "bf16": "tab:blue"}


def measure(model, tokenizer, questions, settings, sigma, draw):
    """One rollout under one draw of noise: means over its tokens, and over its completions.

    The entropies of completions to one question are alike, so the standard error is that of the
    questions' means.
    """
    sampling = torch.Generator(model.device).manual_seed(draw)
    noise = torch.Generator().manual_seed(1000 + draw)
    with qerl.adaptive_quantization_noise(model, sigma, noise):
        rollout = qerl.generate(
            model, [q["prompt"] for q in questions], settings.max_new_tokens, settings.group,
            eos=tokenizer.eos, slots=settings.slots, generator=sampling,
        )
    texts = train_gsm8k.decode_all(tokenizer, rollout)
    samples = train_gsm8k.score(questions, rollout, texts, settings.reward)
    batch = train_gsm8k.make_batch(samples, samples.rewards.flatten(), qerl.OBJECTIVES["grpo"])
    scored = batch.logprobs_under(model, settings.micro_tokens)
    kl, _ = qerl.mismatch(scored, rollout.logprobs, rollout.mask)
    entropy = (rollout.entropy * rollout.mask).view(len(questions), -1).sum(1)
    tokens = rollout.mask.view(len(questions), -1).sum(1)
    by_question = entropy / tokens
    return {
        "sigma": sigma,
        "draw": draw,
        "entropy": (entropy.sum() / tokens.sum()).item(),
        "standard_error": standard_error(by_question.tolist()),          # None of one question
        "accuracy": samples.correct.mean().item(),
        "length": rollout.length.float().mean().item(),
        "mismatch_kl": kl,
    }


def measure_formats(args):
    """The rows of all formats, growing: a list after each format."""
    asked = {
        "model": name_in_rows(args.model),
        "data": data_in_rows(args.model, args.data),
        "prompts": args.prompts,
    }
    rows = []
    for weights in args.weights:
        given = [] if args.model is None else ["--model", args.model]
        given += ["--data", args.data] if args.data else []
        given += ["--weights", weights, "--quantizer", "rtn", "--device", args.device]
        settings = train_gsm8k.arguments(given)
        settings.slots = args.slots
        model, tokenizer, questions, _ = train_gsm8k.load_all(settings, methods.Method(settings))
        require_flag(args.prompts <= len(questions), "prompts", args.prompts,
                     f"there are {len(questions)} questions; lower it")
        for sigma in args.sigmas:
            for draw in range(args.draws):
                row = measure(model, tokenizer, questions[:args.prompts], settings, sigma, draw)
                rows.append({**asked, "weights": weights, **row})
            means = {k: fmean(r[k] for r in rows[-args.draws:]) for k in ("entropy", "accuracy")}
            print("{} sigma {:g}: entropy {entropy:.4f} nats, accuracy {accuracy:.1%}".format(
                weights, sigma, **means), flush=True)
        del model
        yield rows


def plot_entropy(result, plt):
    """Entropy, accuracy and mismatch against sigma, a line a format; no noise at the left edge.

    result: what entropy.json holds; each of its models has a row of panels. A point is the mean of
    the draws, and a dash each of them.
    """
    models = list(dict.fromkeys(r["model"] for r in result["rows"]))
    figure, axes = plt.subplots(len(models), 3, figsize=(13, 4 * len(models)), layout="constrained",
                                squeeze=False)
    for model, row in zip(models, axes):
        row[1].set_title(model)
        plot_model([r for r in result["rows"] if r["model"] == model], row)
    return figure


def plot_model(rows, axes):
    """plot_entropy's three panels of one model."""
    panels = [
        ("entropy", 1, "entropy, nats a token"),
        ("accuracy", 100, "accuracy (temperature 1), %"),
        ("mismatch_kl", 1, "KL of the noisy policy to the clean one,\nnats a token"),
    ]
    tried = sorted({r["sigma"] for r in rows})
    smallest = min((sigma for sigma in tried if sigma), default=1e-3)
    places = {sigma: sigma or smallest / 2 for sigma in tried}
    for axis, (key, unit, label) in zip(axes, panels):
        for weights, color in COLORS.items():
            sigmas = sorted({r["sigma"] for r in rows if r["weights"] == weights})
            if not sigmas:                 # --weights left it out
                continue
            if key == "mismatch_kl":       # without noise it is rounding, and may be below 0
                sigmas = [s for s in sigmas if s > 0]
            values = [[unit * r[key] for r in rows if (r["weights"], r["sigma"]) == (weights, s)]
                      for s in sigmas]
            axis.plot([places[s] for s in sigmas], [fmean(v) for v in values], color=color,
                      label=weights, marker="o", markersize=3, linewidth=1.2)
            for sigma, draws in zip(sigmas, values):
                axis.plot([places[sigma]] * len(draws), draws, "_", color=color, alpha=0.5)
        axis.set(xscale="log", xlabel="sigma", ylabel=label)
        names = [f"{sigma:g}" if sigma else "none" for sigma in tried]
        axis.set_xticks(list(places.values()), names, fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    if any(r["sigma"] > 0 and r["mismatch_kl"] > 0 for r in rows):
        axes[2].set_yscale("log")
    axes[0].legend(frameon=False)


def main(argv):
    p = Parser(__doc__)
    p.add_argument("--model", help="a name or folder (default: the small policy)")
    p.add_argument("--data", help="folder of train*.jsonl and test*.jsonl")
    p.add_argument("--weights", nargs="+", choices=sorted(qerl.FORMATS), default=list(COLORS))
    p.add_argument("--sigmas", nargs="+", type=float, default=SIGMAS)
    p.add_argument("--draws", type=int, default=3, help="rollouts, each with its noise (default 3)")
    p.add_argument("--prompts", type=int, default=64, help="questions (default 64)")
    p.add_argument("--slots", type=int, default=256)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", default="runs/entropy", help="folder (default runs/entropy)")
    args = p.parse_args(argv)
    check_device(args.device)
    for name in ("draws", "prompts", "slots"):
        require_flag(getattr(args, name) >= 1, name, getattr(args, name), "must be at least 1")
    for sigma in args.sigmas:
        require_flag(0 <= sigma < 1e3, "sigmas", sigma, "must be at least 0 and below 1000")
    args.model = full_name(args.model)
    args.weights = list(dict.fromkeys(args.weights))
    args.sigmas = list(dict.fromkeys(args.sigmas))
    with creating(args.out):
        os.makedirs(args.out, exist_ok=True)
    path = f"{args.out}/entropy.json"
    what = "entropy of the untrained policy, in nats; mismatch_kl: from sampling to scoring"
    for rows in measure_formats(args):
        result = {"command": command_line(), "what": what, "rows": rows, **environment(args.device)}
        atomic_write(path, json.dumps(result, indent=1))
    save_figure(f"{args.out}/entropy.png", plot_entropy, result)
    print(f"written to {path} and .png")
    return 0
