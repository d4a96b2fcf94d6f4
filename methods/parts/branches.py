"""Completions that go on from the middle of others, for methods/deep_grpo.py."""
import itertools
import re

import torch
import torch.nn.functional as F

import qerl
from harness.batches import pick_groups

# The end of a line, or a full stop and the like before a space.
SENTENCE_END = re.compile(r"\n+|[.!?](?=[ \t])")


def sentence_ends(pieces):
    """After how many tokens a sentence has ended; pieces: the tokens' texts.

    The end of the whole text does not count, nor what ends amid a token.
    """
    text = "".join(pieces)
    last = len(text.rstrip())
    ends = {match.end() for match in SENTENCE_END.finditer(text) if match.end() < last}
    lengths = itertools.accumulate(map(len, pieces))
    # A token without text, such as a special one, would repeat the end before it.
    return [i + 1 for i, length in enumerate(lengths) if length in ends and pieces[i]]


def fit_success(outcomes):
    """(a, b) of P(r) = sigmoid(a + b r), the logistic regression of a list of (r, 0 or 1).

    Where there is too little to fit they are 0, which makes P the same for all r.
    """
    if len(outcomes) <= 10 or len({success for _, success in outcomes}) < 2:
        return 0.0, 0.0
    r, success = torch.tensor(outcomes, dtype=torch.float64).unbind(1)
    line = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([line], max_iter=200, line_search_fn="strong_wolfe")

    def objective():
        optimizer.zero_grad()
        logits = line[0] + line[1] * r
        loss = F.binary_cross_entropy_with_logits(logits, success, reduction="sum")
        loss = loss + line[1] ** 2 / 2
        loss.backward()
        return loss
    optimizer.step(objective)
    return tuple(line.tolist())


def limited_sampler(limits):
    """A qerl.Sampler whose completion i has at most limits[i] tokens."""
    class LimitedSampler(qerl.Sampler):
        def __init__(self, *args):
            super().__init__(*args)
            self.limit[:-1] = torch.tensor(limits)
    return LimitedSampler


def join_samples(samples, branched, parents):
    """(train_gsm8k.Samples of both, of each of their groups whether it is one of branches).

    A group of branches stands behind its question's other groups. parents: of each group of `branched`
    the number of the question it belongs to. What was drawn (`draws`) stays what `samples` says.
    """
    count = len(samples.questions)
    belongs_to = [*range(count), *parents]
    order = sorted(range(len(belongs_to)), key=lambda k: belongs_to[k])      # equals keep their order
    joined = pick_groups([samples, branched], order)
    joined.draws = samples.draws or [samples]
    return joined, [k >= count for k in order]
