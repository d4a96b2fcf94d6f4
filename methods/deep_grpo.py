"""DEEP-GRPO: branches from the middle of failed completions (arXiv 2602.14169).

    python train_gsm8k.py --method deep_grpo

Marks: [P] the authors' code or README was read, [S] a secondary note, [I] our inference or choice.

The problem: all G completions start at the question, so the states behind a first good half are
seen rarely, and a group that fails altogether teaches nothing.

The formulas. A failed completion is cut at the ends of its sentences. One of them, the pivot, is
drawn by

    Q(r) ~ P(r) r^2,    r = sentences before the cut / sentences of the completion             [P]
    P(r) = sigmoid(a + b r), fitted to the last 10,000 (r, was a branch right), with a penalty of
           b^2/2; P = 1 until both outcomes have been seen and there are more than 10          [P]

so it is deep, but can still be mended. G branches go on from it (8 as in the paper, where G is 8),
with their own baseline, A = reward - mean(reward) of the branches, not divided by their standard
deviation [P]. The loss is that of the main completions plus that of the branches, each normalised
by itself [P], over the step, so that a branch weighs the same in each minibatch [I]. What was cut
stays in a branch's prompt: only what follows is trained on. Ours [I]: a sentence ends at a line's
end or at . ! ? before a space (theirs: at any token "."), and the question itself is no pivot
(theirs counts as a first sentence). The authors' later versions ask a teacher instead; not here.

What differs from QeRL: groups are added after scoring (`explore`), and the two streams are weighed.
AQN stays; to compare without it use --sigma-start 0 --sigma-end 0.

The paper's result: GSM8K with 0.5B parameters 64.1 by GRPO with 8 completions, 67.7 by DEEP-GRPO
[S]. Ours: methods/README.md.

When would you use it? Where most completions fail late and sampling is cheap beside the rest: each
failed completion costs G more (logged: seconds of "branches").
"""
import functools
from collections import namedtuple

import torch

import qerl
from methods import Method
from methods.parts.branches import fit_success, join_samples, limited_sampler, sentence_ends

REMEMBERED = 10_000            # outcomes of pivots

# Where branches begin: the number of the question, r, that question with the pivot in its prompt,
# and how many tokens are left.
Pivot = namedtuple("Pivot", "parent r question room")


def pivot_utility(cuts, line):
    """(r, Q not normalised) of a completion's cuts, float64 [cuts]; line: of fit_success."""
    r = torch.arange(1, cuts + 1, dtype=torch.float64) / (cuts + 1)
    return r, torch.sigmoid(line[0] + line[1] * r) * r ** 2


class Neighbour(Method):
    """QeRL with branches. state: "outcomes", the last (r, was a branch right), oldest first."""

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.state = {"outcomes": []}
        self.branch_prompts = set()            # of the current step, as tuples of token ids
        self.sizes = {}                        # {is it a branch: its stream's size in the step}
        self.measured = {}

    def prepare(self, model, folder, questions, tokenizer):
        self.tokenizer = tokenizer
        self.piece = functools.lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))

    def explore(self, samples, complete, generator):
        """Add a group of branches behind the group of each failed completion that has a pivot."""
        pivots = self.pivots(samples, generator)
        self.branch_prompts = {tuple(pivot.question["prompt"]) for pivot in pivots}
        self.measured = {"branches": len(pivots)}
        if not pivots:
            return samples
        limits = [pivot.room for pivot in pivots for _ in range(samples.rewards.shape[1])]
        branched = complete([pivot.question for pivot in pivots], "branches",
                            sampler_class=limited_sampler(limits))
        mended = branched.correct.amax(1)
        self.measured["branch_accuracy"] = branched.correct.mean().item()
        self.measured["mended"] = mended.mean().item()
        self.state["outcomes"] += zip([pivot.r for pivot in pivots], mended.tolist())
        del self.state["outcomes"][:-REMEMBERED]
        return join_samples(samples, branched, [pivot.parent for pivot in pivots])

    def pivots(self, samples, generator):
        """A Pivot for each failed completion of several sentences."""
        line = fit_success(self.state["outcomes"])
        group = samples.rewards.shape[1]
        pivots = []
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
            room = self.settings.max_new_tokens - len(begun)
            pivots.append(Pivot(i // group, r[chosen].item(), question, room))
        return pivots

    def advantages(self, samples):
        """Of branches without the division by the standard deviation."""
        centered = samples.rewards - samples.rewards.mean(1, keepdim=True)
        is_branch = [[tuple(q["prompt"]) in self.branch_prompts] for q in samples.questions]
        is_branch = torch.tensor(is_branch, device=centered.device)
        return torch.where(is_branch, centered, super().advantages(samples))

    def token_weights(self, minibatch):
        """Main completions and branches are two streams, and each has a mean of its own.

        A minibatch may have few branches, or none: it counts for as much of their stream as it has.
        """
        weights = torch.zeros_like(minibatch.mask, dtype=torch.float32)
        for branches, stream in self.streams(minibatch):
            mask = minibatch.mask[stream]
            share = self.settings.updates * self.size(mask) / max(1, self.sizes[branches])
            weights[stream] = share * qerl.token_weights(
                mask, self.settings.algo, self.settings.max_new_tokens)
        return weights

    def streams(self, batch):
        """(is it that of the branches, which rows it has, bool [B]) of the two streams."""
        is_branch = torch.tensor([tuple(p) in self.branch_prompts for p in batch.prompts])
        is_branch = is_branch.to(batch.mask.device)
        return (False, ~is_branch), (True, is_branch)

    def size(self, mask):
        """What the mean of a stream is over: its completions, or with DAPO its tokens."""
        return int(qerl.OBJECTIVES[self.settings.algo].count(mask))

    def before_updates(self, batch):
        """Lengths, entropy and mismatch in metrics.jsonl are of all, its accuracy without branches."""
        self.sizes = {branches: self.size(batch.mask[stream]) for branches, stream in self.streams(batch)}
        return self.measured
