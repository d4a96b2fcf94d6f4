"""Entropy of the policy before any training, by format and by noise (Fig. 5 and 14 of the paper).

    python bench.py entropy                                      the small policy
    python bench.py entropy --model FOLDER --data FOLDER         a real model

The paper's first claim: quantisation raises the entropy, and noise raises it further. Each format
answers the same questions, without noise and with more and more of it; a draw of noise serves one
rollout, so several are taken. Written to entropy.json, and a picture of it. Other flags go to
train_gsm8k.py.
"""
import json
import os
from statistics import fmean as mean

import torch

import methods
import qerl
import train_gsm8k
from harness.figures import save_figure
from harness.flags import Parser, require_flag, require_value
from harness.instruments import command_line, environment
from harness.run_folder import atomic_write, creating
from studies.study import name_in_rows, standard_error

SIGMAS = [0.0, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2]
COLORS = {"nvfp4": "tab:green", "mxfp4": "tab:red", "nf4": "tab:orange", "bf16": "tab:blue"}
PANELS = {
    "entropy": "entropy, nats a token",
    "accuracy": "accuracy (temperature 1)",
    "mismatch_kl": "KL of the noisy policy to the clean one,\nnats a token",
}


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
    kl, _ = qerl.mismatch(
        batch.logprobs_under(model, settings.micro_tokens), rollout.logprobs, rollout.mask)
    entropy = (rollout.entropy * rollout.mask).view(len(questions), -1).sum(1)
    tokens = rollout.mask.view(len(questions), -1).sum(1)
    return {
        "sigma": sigma,
        "draw": draw,
        "entropy": (entropy.sum() / tokens.sum()).item(),
        "standard_error": standard_error((entropy / tokens).tolist()),   # None of one question
        "accuracy": samples.correct.mean().item(),
        "length": rollout.length.float().mean().item(),
        "mismatch_kl": kl,
    }


def measure_format(weights, args):
    """A row for each sigma and draw of one format."""
    settings = train_gsm8k.arguments([*args.more, "--weights", weights, "--quantizer", "rtn"])
    model, tokenizer, questions, _ = train_gsm8k.load_all(settings, methods.Method(settings))
    require_flag(args.prompts <= len(questions), "prompts", args.prompts,
                 f"there are {len(questions)} questions; lower it")
    asked = {"model": name_in_rows(settings.model), "prompts": args.prompts, "weights": weights}
    for sigma in args.sigmas:
        rows = [
            {**asked, **measure(model, tokenizer, questions[:args.prompts], settings, sigma, draw)}
            for draw in range(args.draws)
        ]
        entropy, accuracy = (mean(row[key] for row in rows) for key in ("entropy", "accuracy"))
        print(f"{weights} sigma {sigma:g}: entropy {entropy:.4f} nats, accuracy {accuracy:.1%}",
              flush=True)
        yield from rows


def plot_entropy(result, plt):
    """PANELS against sigma, a row of them a model, a line a format; no noise at the left edge.

    result: what entropy.json holds. A point is the mean of the draws, and a dash each of them.
    """
    models = list(dict.fromkeys(r["model"] for r in result["rows"]))
    figure, axes = plt.subplots(len(models), 3, figsize=(13, 4 * len(models)), layout="constrained",
                                squeeze=False)
    for line, model in zip(axes, models):
        own = [r for r in result["rows"] if r["model"] == model]
        smallest = min((r["sigma"] for r in own if r["sigma"]), default=1e-3)
        ticks = {r["sigma"] or smallest / 2: f"{r['sigma']:g}" if r["sigma"] else "none" for r in own}
        for axis, (key, label) in zip(line, PANELS.items()):
            for weights, color in COLORS.items():
                draws = {}                              # {sigma: values}
                for r in own:
                    if r["weights"] == weights:
                        draws.setdefault(r["sigma"] or smallest / 2, []).append(r[key])
                places = sorted(draws)
                axis.plot(places, [mean(draws[place]) for place in places], "o-", markersize=3,
                          color=color, label=weights)
                for place in places:
                    axis.plot([place] * len(draws[place]), draws[place], "_", color=color, alpha=0.5)
            axis.set(xscale="log", xlabel="sigma", ylabel=label)
            axis.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        line[1].set_title(model)
        line[2].set_yscale("symlog", linthresh=1e-7)
    axes[0, 0].legend(frameon=False)
    return figure


def main(argv):
    p = Parser(__doc__)
    p.add_argument("--weights", nargs="+", choices=sorted(qerl.FORMATS), default=list(COLORS))
    p.add_argument("--sigmas", nargs="+", type=float, default=SIGMAS)
    p.add_argument("--draws", type=int, default=3, help="rollouts, each with its noise (default 3)")
    p.add_argument("--prompts", type=int, default=64, help="questions (default 64)")
    p.add_argument("--out", default="runs/entropy", help="folder (default runs/entropy)")
    args, args.more = p.parse_known_args(argv)
    require_value("out", args.out)
    for name in ("draws", "prompts"):
        require_flag(getattr(args, name) >= 1, name, getattr(args, name), "must be at least 1")
    with creating(args.out):
        os.makedirs(args.out, exist_ok=True)
    settings = train_gsm8k.read_settings(args.more)
    result = {
        "command": command_line(),
        "what": "entropy of the untrained policy, in nats; mismatch_kl: from sampling to scoring",
        "rows": [],
        **environment(settings.device),
    }
    for weights in args.weights:
        result["rows"] += measure_format(weights, args)
        atomic_write(f"{args.out}/entropy.json", json.dumps(result, indent=1))
    save_figure(f"{args.out}/entropy.png", plot_entropy, result)
    print(f"written to {args.out}/entropy.json and .png")
    return 0
