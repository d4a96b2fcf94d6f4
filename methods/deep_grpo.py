"""DEEP-GRPO: branches from the middle of failed completions (arXiv 2602.14169).

    python train_gsm8k.py --method deep_grpo

Marks: [P] the authors' code or README was read, [S] a secondary note, [I] our inference or choice.

The problem: all G completions start at the question, so that they rarely reach the states behind a
good first half, and a group that fails altogether teaches nothing.

The formulas. A failed completion can be cut at the end of each of its sentences. One of these cuts,
the pivot, is drawn with probability

    Q(r) ~ P(r) r^2,    r = sentences before the cut / sentences of the completion             [P]
    P(r) = sigmoid(a + b r), fitted to the last 10,000 (r, was a branch right), with a penalty of
           b^2/2; P = 1 until both outcomes have been seen and there are more than 10          [P]

so that it is deep, but the completion can still be mended. G branches go on from it (the paper has 8,
and its G is 8). They have their own baseline: A = reward - mean(reward) of the branches, not divided
by their standard deviation [P]. The loss is that of the main completions plus that of the branches;
each is a mean over its own completions of the step [P]. The advantages carry this factor, and a KL
term stays a mean over all [I]. The tokens before the pivot are part of a branch's prompt: only the
tokens behind it are trained on. Ours [I]: a sentence ends at the end of a line or at . ! ? before a
space (theirs ends at any token "."), and the question itself is no pivot (theirs counts it as the
first sentence). The authors' later versions ask a teacher instead, which this file does not.

What differs from QeRL: `resample` adds groups after scoring, and `group_advantages` has two streams.
AQN stays; --sigma-start 0 --sigma-end 0 compares without it.

The paper's result: on GSM8K a model of 0.5B parameters reaches 64.1 by GRPO with 8 completions and
67.7 by DEEP-GRPO [S]. Ours: methods/README.md.

When would you use it? Where most completions fail late and sampling is cheap beside the rest: each
failed completion costs G more.
"""
import functools
import itertools
import re
from dataclasses import replace

import torch

import qerl
from harness import fast
from harness.errors import require
from harness.batches import pick_groups
from methods import Method

REMEMBERED = 10_000            # outcomes of pivots
# The end of a line, or a full stop and the like before a space.
SENTENCE_END = re.compile(r"\n+|[.!?](?=[ \t])")


def sentence_ends(pieces):
    """The numbers of tokens after which a sentence has ended; pieces: the tokens' texts.

    The end of the whole text does not count, nor does an end within a token.
    """
    text = "".join(pieces)
    last = len(text.rstrip())
    ends = {match.end() for match in SENTENCE_END.finditer(text) if match.end() < last}
    lengths = itertools.accumulate(map(len, pieces))
    # A token without text, such as a special one, would repeat the end before it.
    return [i + 1 for i, length in enumerate(lengths) if length in ends and pieces[i]]


def fit_success(outcomes):
    """(a, b) of P(r) = sigmoid(a + b r), the logistic regression of a list of (r, 0 or 1).

    Both are 0 where there is too little to fit, which makes P the same for all r.
    """
    if len(outcomes) <= 10 or len({success for _, success in outcomes}) < 2:
        return 0.0, 0.0
    r, success = torch.tensor(outcomes, dtype=torch.float64).unbind(1)
    x = torch.stack([torch.ones_like(r), r], 1)                                  # [n, 2]
    penalty = x.new_tensor([0, 1])
    line = x.new_zeros(2)
    for _ in range(30):                            # Newton's method, which needs about ten
        p = (x @ line).sigmoid()
        gradient = x.T @ (p - success) + penalty * line
        hessian = x.T * (p * (1 - p)) @ x + penalty.diag()
        line -= torch.linalg.solve(hessian, gradient)
    return tuple(line.tolist())


def pivot_utility(cuts, line):
    """(r, Q not normalised) of a completion's cuts, float64 [cuts]; line: what fit_success gives."""
    r = torch.arange(1, cuts + 1, dtype=torch.float64) / (cuts + 1)
    return r, torch.sigmoid(line[0] + line[1] * r) * r ** 2


class Neighbour(Method):
    """QeRL with branches. state: "outcomes", the last pairs (r, was a branch right), oldest first."""

    def check(self):
        require(not qerl.OBJECTIVES[self.settings.algo].redraw,
                     f"--method deep_grpo: --algo {self.settings.algo} replaces groups itself; use "
                     "--algo grpo")
        require(not self.settings.overlong,
                "--method deep_grpo: --overlong would count a branch from its pivot; leave it out")

    def prepare(self, model, folder, questions, tokenizer):
        self.state["outcomes"] = []
        self.begun = {}            # {prompt of a branch: how many of its tokens are the completion's}
        self.tokenizer = tokenizer
        self.piece = functools.cache(lambda token: tokenizer.decode([token]))

    def generate(self, model, prompts, max_new_tokens, group_size, **options):
        """fast.generate; a branch is cut where its completion would have been."""
        begun = torch.tensor([self.begun.get(tuple(p), 0) for p in prompts])
        limits = (max_new_tokens - begun).repeat_interleave(group_size)
        return fast.generate(model, prompts, max_new_tokens, group_size, limits=limits, **options)

    def resample(self, samples, complete, shares, settings, ranks, generator):
        """Add a group of branches for each failed completion that has a pivot, behind its group."""
        pivots = list(self.pivots(samples, generator))
        count = len(samples.questions)
        self.is_branch = [False] * count                               # of each group
        self.measured = {"branches": len(pivots)}
        if not pivots:
            return samples
        parents, depths, questions, begun = zip(*pivots)
        self.begun = {tuple(q["prompt"]): count for q, count in zip(questions, begun)}
        branched = complete(list(questions))
        self.begun = {}
        mended = branched.correct.amax(1)
        self.measured["branch_accuracy"] = branched.correct.mean().item()
        self.measured["mended"] = mended.mean().item()
        self.state["outcomes"] += zip(depths, mended.tolist())
        del self.state["outcomes"][:-REMEMBERED]
        belongs_to = [*range(count), *parents]
        order = sorted(range(len(belongs_to)), key=lambda k: belongs_to[k])      # equals keep their order
        self.is_branch = [k >= count for k in order]
        return replace(pick_groups([samples, branched], order), draws=[samples])

    def pivots(self, samples, generator):
        """Yield where the branches begin, for each failed completion of several sentences.

        That is the number of its question, r, the question with the pivot in its prompt, and how many
        tokens the completion has before it.
        """
        line = fit_success(self.state["outcomes"])
        group = samples.rewards.shape[1]
        for i in (samples.correct.flatten() == 0).nonzero()[:, 0].tolist():
            tokens = samples.rollout.tokens[i, :samples.rollout.length[i]].tolist()
            cuts = sentence_ends([self.piece(token) for token in tokens])
            if not cuts:
                continue
            r, utility = pivot_utility(len(cuts), line)
            chosen = torch.multinomial(utility, 1, generator=generator).item()
            begun = tokens[:cuts[chosen]]
            question = dict(samples.questions[i // group])
            question["prompt"] = question["prompt"] + begun
            question["begun"] = question.get("begun", "") + self.tokenizer.decode(begun)
            yield i // group, r[chosen].item(), question, len(begun)

    def group_advantages(self, rewards, algorithm):
        """Branches are not divided by the deviation; each stream is divided by its share of the groups."""
        is_branch = torch.tensor(self.is_branch, device=rewards.device)[:, None]
        centered = rewards - rewards.mean(1, keepdim=True)
        advantages = torch.where(is_branch, centered, qerl.group_advantages(rewards, algorithm))
        branches = is_branch.float().mean()
        return advantages / torch.where(is_branch, branches, 1 - branches)
