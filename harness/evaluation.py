"""How many held-out questions a policy answers rightly."""
import math
from statistics import fmean

import torch

from harness.answers import answers_to, grade
from harness.data import by_set, decode_all
from harness.engines import find_engine, find_method
from harness.folders import write_json, write_jsonl
from harness.policy import load_all
from harness.run import lasting, require_finite_rollout, restore_policy


def answer_all(model, tokenizer, questions, settings, ranks, samples, temperature, top_p):
    """The texts of `samples` answers to each question, to which each process gives its part.

    The engine samples them, not a neighbour: a method's sampler is for the training.
    """
    first = len(questions) * ranks.rank // ranks.count
    last = len(questions) * (ranks.rank + 1) // ranks.count
    prompts = [question["prompt"] for question in questions[first:last]]
    rng = torch.Generator(model.device).manual_seed(settings.seed)
    ranks.differ(rng, settings.seed, 0)
    rollout = find_engine(settings).generate(
        model, prompts, settings.max_new_tokens, samples, temperature, top_p,
        eos=tokenizer.eos, slots=settings.slots, generator=rng,
    )
    require_finite_rollout(rollout)
    return ranks.collect(decode_all(tokenizer, rollout))


def pass_at(k, correct, samples):
    """Probability that one of k answers is right, where `correct` of `samples` were: the unbiased
    estimate (arXiv 2107.03374, Eq. 1)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate(model, tokenizer, questions, settings, when, ranks):
    """Accuracies as fractions: pass@1 (at the paper's temperature 0.6 and top-p 0.95) and greedy.

    pass@1 is the mean over questions and `eval_samples` answers to each, from which pass@2, pass@4 and
    so on are estimated, too; of several sets of questions (--eval) it is the mean of the sets' own.
    The first of the answers and the greedy ones go to answers_WHEN.jsonl in the run's folder, with how
    many were right.
    """
    answers = [{"question": q["question"], "number": str(q["right"])} for q in questions]
    result = {}
    measures = {               # samples, temperature and top-p
        "accuracy": (settings.eval_samples, settings.eval_temperature, settings.eval_top_p),
        "greedy": (1, 0.0, 1.0),
    }
    for name, (samples, *drawn_how) in measures.items():
        texts = answer_all(model, tokenizer, questions, settings, ranks, samples, *drawn_how)
        right = [bool(grade(*answer, anywhere=True)) for answer in answers_to(questions, texts)]
        counts = [sum(right[i:i + samples]) for i in range(0, len(right), samples)]
        for answer, text, correct, count in zip(answers, texts[::samples], right[::samples], counts):
            answer[name] = {"text": text, "correct": correct, "right": count}
        sets = by_set(questions, counts).items()
        for k in (2 ** i for i in range(samples.bit_length())):
            label = name if k == 1 else f"pass@{k}"
            shares = {source: fmean(pass_at(k, count, samples) for count in of_set)
                      for source, of_set in sets}
            result[f"{label}_{when}"] = fmean(shares.values())
            if len(shares) > 1:
                result |= {f"{label}_{source}_{when}": share for source, share in shares.items()}
    found = ", ".join(f"{name} {share:.1%}" for name, share in result.items())
    print(f"{found} of {len(questions)} questions")
    if settings.out and ranks.main:
        write_jsonl(f"{settings.out}/answers_{when}.jsonl", answers)
    return result


def evaluate_only(settings, ranks):
    """Measure the model, or with --resume the run's policy; with --out write eval.json, too."""
    model, tokenizer, data, settings = load_all(settings, find_method(settings), ranks)
    if settings.resume:
        saved = restore_policy(model, settings.out)
        print(f"evaluating {settings.out} after step {saved['state']['step']}")
    result = evaluate(model, tokenizer, data.held_out, settings, "now", ranks)
    if settings.out and ranks.main:
        result["settings"] = lasting(settings)
        write_json(f"{settings.out}/eval.json", result)
