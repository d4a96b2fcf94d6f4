"""Completions that go on from the middle of others, for methods/exploration.py."""
import itertools
import re

import torch

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
    return [i + 1 for i, length in enumerate(lengths) if length in ends]


def limited_sampler(limits):
    """A qerl.Sampler whose completion i has at most limits[i] tokens."""
    class LimitedSampler(qerl.Sampler):
        def __init__(self, *args):
            super().__init__(*args)
            self.limit[:-1] = torch.tensor(limits)
    return LimitedSampler


def join_samples(samples, branched, parents):
    """train_gsm8k.Samples of both: each group of branches stands behind its question's other groups.

    parents: of each group of `branched` the number of the question it belongs to. What was drawn
    (`draws`) stays what `samples` says.
    """
    count = len(samples.questions)
    belongs_to = [*range(count), *parents]
    order = sorted(range(len(belongs_to)), key=lambda k: belongs_to[k])      # equals keep their order
    joined = pick_groups([samples, branched], order)
    joined.draws = samples.draws or [samples]
    return joined
