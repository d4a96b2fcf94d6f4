"""What the demonstrations of methods/ measure of the built-in policy, on held-out problems.

Of the answers that it reads there, 60 % are careless, as of those that it once imitated.
"""
import torch
import torch.nn.functional as F

import qerl
from harness.answers import final_number, stated_number
from harness.small_policy import ByteText, made_up_problems, word_problems
from harness.worked import batches_of, worked_sequences


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
