"""What the demonstrations of methods/ share: the small policy, a step without its update, measures.

Of the answers that it reads on held-out problems 60 % are careless, as of those that it once
imitated.
"""
import torch
import torch.nn.functional as F

import qerl
from harness.answers import final_number, stated_number
from harness.batches import Batch
from harness.small_policy import ByteText, made_up_problems, warm_start, word_problems
from harness.worked import batches_of, worked_sequences


def small_policy(count, weights="nvfp4", **options):
    """(model, text, `count` prompts as lists of token ids) of the built-in policy on a CPU."""
    text = ByteText()
    problems, _ = made_up_problems()
    prompts = [text.prompt(p["question"]) for p in problems[:count]]
    return qerl.load_model(warm_start(), weights, **options), text, prompts


def sample_step(method, model, text, prompts, sigma=0.0, group=4, seed=0):
    """A step's rollout by a methods.Method, with noise, and its log pi_old -> (Rollout, Batch).

    group completions a prompt of at most 64 tokens; every advantage is 1.
    """
    sampling_rng = torch.Generator().manual_seed(seed)
    noise_rng = torch.Generator().manual_seed(seed)
    with method.noise(model, sigma, noise_rng):
        rollout = method.generate(
            model, prompts, 64, group, eos=text.eos, slots=256, generator=sampling_rng)
    repeated = [p for p in prompts for _ in range(group)]
    advantages = torch.ones(len(repeated))
    batch = Batch(
        repeated, rollout.tokens, rollout.length, rollout.logprobs, advantages, rollout.mask)
    batch.old_logprobs = method.old_logprobs(model, batch)
    return rollout, batch


def k3_of(batch):
    """How far the policy that sampled a Batch is from the one without noise, in nats a token."""
    return qerl.mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.mask)[0]


def worked_problems():
    """(questions to learn from, held-out Rows), their answers as the policy once imitated them."""
    questions, held_out = made_up_problems(careless=0.6)
    known = {p["question"] for p in questions + held_out}
    text = word_problems(128, seed=3, exclude=known, careless=0.6)
    sequences = worked_sequences(text, ByteText(), tokens=10 ** 9)
    return questions, batches_of(sequences, 64, "cpu")


@torch.no_grad()
def answer_logits(model, rows):
    """(logits [n, V] that predict the n answer tokens of some Rows, these tokens int64 [n])."""
    hidden = model.hidden(rows.tokens)[rows.answered]
    return F.linear(hidden, model.lm_head), rows.tokens.roll(-1, 1)[rows.answered]


@torch.no_grad()
def distance(model, teacher, held_out):
    """How far a model's outputs on held-out Rows are from a 16-bit model's.

    -> {"error": of the logits, relative; "kl": forward KL to it, nats per token; "perplexity"}.
    """
    difference = norm = kl = loss = 0.0
    count = 0
    for rows in held_out:
        logits, labels = answer_logits(model, rows)
        exact, _ = answer_logits(teacher, rows)
        difference += (logits - exact).square().sum().item()
        norm += exact.square().sum().item()
        kl += F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True,
                       reduction="sum").item()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    perplexity = torch.tensor(loss / count).exp().item()
    return {"error": (difference / norm) ** 0.5, "kl": kl / count, "perplexity": perplexity}


def accuracy(model, problems=128):
    """The fraction of held-out problems that the built-in policy answers right, greedily."""
    text = ByteText()
    questions = made_up_problems()[1][:problems]
    prompts = [text.prompt(q["question"]) for q in questions]
    rollout = qerl.generate(model, prompts, 64, temperature=0.0, eos=text.eos)
    texts = [text.decode(tokens[:length].tolist())
             for tokens, length in zip(rollout.tokens, rollout.length)]
    right = [stated_number(t) == final_number(q) for t, q in zip(texts, questions)]
    return sum(right) / len(right)
