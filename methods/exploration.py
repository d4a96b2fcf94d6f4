"""Exploration without parameter noise: DEEP-GRPO's branches and MASPO's soft bounds.

    python -m methods.exploration                      the demonstration, on a CPU
    python train_gsm8k.py --method exploration:deep_grpo | exploration:maspo

Marks: [P] the authors' code or README was read, [S] a secondary note, [I] our inference or choice.

DEEP-GRPO (arXiv 2602.14169). The problem: all G completions start at the question, so the states
behind a first good half are seen rarely, and a group that fails altogether teaches nothing. A
failed completion is cut at the ends of its sentences. One of them, the pivot, is drawn by

    Q(r) ~ P(r) r^2,    r = sentences before the cut / sentences of the completion             [P]
    P(r) = sigmoid(a + b r), fitted to the last 10,000 (r, was a branch right), with a penalty of
           b^2/2; P = 1 until both outcomes have been seen and there are more than 10          [P]

so it is deep, but can still be mended. G branches go on from it (8 as in the paper, where G is 8),
with their own baseline, A = reward - mean(reward) of the branches, not divided by their standard
deviation [P]. The loss is that of the main completions plus that of the branches, each normalised
by itself [P]. What was cut stays in a branch's prompt: only what follows is trained on. Ours [I]: a
sentence ends at a line's end or at . ! ? before a space (theirs: at any token "."), and the
question itself is no pivot (theirs counts as a first sentence). The authors' later versions ask a
teacher instead; not here.

MASPO (arXiv 2602.17550). The problem: clipping drops the gradient of a token at once, at the same
ratio for a likely and an unlikely token. With rho = pi/pi_old the loss is -w rho A, where w has no
gradient [P]:

    w = exp(-(rho - 1)^2 / (2 s^2)) where A > 0 and rho > 1, or A < 0 and rho < 1; else 1
    s = clamp(pi_old^-0.3, 1, 10) * clamp(c, 0.1, 10)
    c = 1 + 0.03 A for A > 0, else 1 / (1 - 0.03 A)

What differs from QeRL: DEEP-GRPO adds groups after scoring (`explore`) and weighs the two streams;
MASPO replaces Eq. 3's clipping, so --clip-low and --clip-high do nothing. AQN stays; to compare
without it use --sigma-start 0 --sigma-end 0.

The papers' results: GSM8K with 0.5B parameters 64.1 by GRPO with 8 completions, 67.7 by DEEP-GRPO
[S]; MASPO against GRPO on six mathematical benchmarks, mean of 32 answers, 48.4 -> 51.4 with 1.5B
parameters, 58.9 -> 61.8 with 7B [P]. Ours will stand in methods/README.md.

When would you use them? `deep_grpo` where most completions fail late and sampling is cheap beside
the rest: each failed completion costs G more (logged: seconds of "branches"). `maspo` with several
updates a rollout and much clipping; with one update rho is 1 and nothing happens, so it is refused.
"""
import functools
from collections import namedtuple

import torch
import torch.nn.functional as F

import qerl
from harness.branches import join_samples, limited_sampler, sentence_ends
from harness.demonstration import small_policy
from harness.mismatch import ratio_of
from harness.small_policy import made_up_problems
from methods import Method
from qerl import require

REMEMBERED = 10_000            # outcomes of pivots

# Where branches begin: the number of the question, r, that question with the pivot in its prompt,
# and how many tokens are left.
Pivot = namedtuple("Pivot", "parent r question room")


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


def pivot_utility(cuts, line):
    """(r, Q not normalised) of a completion's cuts, float64 [cuts]; line: of fit_success."""
    r = torch.arange(1, cuts + 1, dtype=torch.float64) / (cuts + 1)
    return r, torch.sigmoid(line[0] + line[1] * r) * r ** 2


def maspo_weights(ratio, old_logprobs, advantages):
    """w of ratio and old_logprobs [B, C] and advantages [B, 1] -> float32 [B, C]."""
    confidence = torch.where(advantages > 0, 1 + 0.03 * advantages, 1 / (1 - 0.03 * advantages))
    width = (-0.3 * old_logprobs).exp().clamp(1, 10) * confidence.clamp(0.1, 10)
    leaving = (ratio - 1) * advantages > 0
    return torch.where(leaving, (-((ratio - 1) / width) ** 2 / 2).exp(), 1)


class Neighbour(Method):
    """DEEP-GRPO or MASPO. state: "outcomes", the last (r, was a branch right), oldest first."""
    variants = ("deep_grpo", "maspo")

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.state = {"outcomes": []}
        self.branch_prompts = set()            # of the current step, as tuples of token ids
        self.measured = {}

    def check(self):
        if self.variant == "maspo":
            name = "--method exploration:maspo"
            require(self.settings.updates > 1,
                    f"{name}: with one update a rollout the ratio is 1 and nothing bounds it; use "
                    "--updates 2 or more")
            require(self.settings.tis == 0,
                    f"{name}: is defined without importance weights; use --tis 0")

    def prepare(self, model, folder, questions, tokenizer):
        self.tokenizer = tokenizer
        self.piece = functools.lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))

    def explore(self, samples, complete, generator):
        """Add a group of branches behind the group of each failed completion that has a pivot."""
        if self.variant != "deep_grpo":
            return samples
        pivots = self.pivots(samples, generator)
        self.branch_prompts = {tuple(pivot.question["prompt"]) for pivot in pivots}
        self.measured = {"branches": len(pivots)}
        if not pivots:
            return samples
        group = samples.rewards.shape[1]
        limits = [pivot.room for pivot in pivots for _ in range(group)]
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
            question["begun"] = self.tokenizer.decode(begun)
            room = self.settings.max_new_tokens - len(begun)
            pivots.append(Pivot(i // group, r[chosen].item(), question, room))
        return pivots

    def advantages(self, samples):
        """Of branches without the division by the standard deviation."""
        is_branch = torch.tensor(["begun" in q for q in samples.questions])[:, None]
        centered = samples.rewards - samples.rewards.mean(1, keepdim=True)
        is_branch = is_branch.to(centered.device)
        return torch.where(is_branch, centered, super().advantages(samples))

    def token_weights(self, minibatch):
        """Main completions and branches are two streams, and each has a mean of its own."""
        is_branch = torch.tensor([tuple(p) in self.branch_prompts for p in minibatch.prompts])
        weights = torch.zeros_like(minibatch.mask, dtype=torch.float32)
        for stream in (is_branch, ~is_branch):
            stream = stream.to(weights.device)
            weights[stream] = qerl.token_weights(minibatch.mask[stream], self.settings.algo)
        return weights

    def loss(self, logprobs, piece):
        if self.variant != "maspo":
            return super().loss(logprobs, piece)
        advantages = piece.advantages[:, None]
        ratio = ratio_of(logprobs - piece.old_logprobs)
        w = maspo_weights(ratio.detach(), piece.old_logprobs, advantages)
        # Without advantages Eq. 3 is its KL term.
        kl_loss, kl = qerl.policy_loss(
            logprobs, piece.old_logprobs, 0 * piece.advantages, piece.weights,
            ref_logprobs=piece.ref_logprobs, beta=self.settings.beta)
        return kl_loss - (w * ratio * advantages * piece.weights).sum(), kl

    def measure(self, batch):
        """Lengths, entropy and mismatch in metrics.jsonl are of all, its accuracy without branches."""
        return self.measured


# --------------------------------------------------------------------------------------------------
# The demonstration

def show_pivots():
    text = ("He sells 4 of 12 eggs. So 12 - 4 = 8 are left! They cost 2 dollars each.\n"
            "8 * 2 = 18. The answer is 18.")
    right_of_50 = {0.2: 38, 0.4: 36, 0.6: 25, 0.8: 4}
    outcomes = [(r, int(i < right)) for r, right in right_of_50.items() for i in range(50)]
    a, b = fit_success(outcomes)
    cuts = sentence_ends(list(text))
    r, utility = pivot_utility(len(cuts), (a, b))
    print("1. Pivots of a failed completion, a letter a token, after outcomes made by hand: of 50\n"
          f"branches from r = 0.2, 0.4, 0.6 and 0.8 each, {list(right_of_50.values())} were right.\n"
          f"P(r) = sigmoid({a:.2f} {b:+.2f} r).\n\n"
          "     r     P   r^2     Q  the completion up to the cut ends in")
    for j, cut in enumerate(cuts):
        probability = utility[j] / r[j] ** 2
        share = utility[j] / utility.sum()
        print(f"  {r[j]:.2f}  {probability:.2f}  {r[j] ** 2:.2f}  {share:4.0%}  {text[:cut][-22:]!r}")


def show_branches():
    import train_gsm8k         # only here, because it imports the methods
    model, text, _ = small_policy(0)
    settings = train_gsm8k.arguments(["--device", "cpu", "--method", "exploration:deep_grpo"])
    method = Neighbour(settings, "deep_grpo")
    method.prepare(model, None, None, text)
    problems, _ = made_up_problems()
    asked = train_gsm8k.with_prompts(problems[:48], text, 400)
    sampling_rng = torch.Generator().manual_seed(0)

    def complete(questions, phase="rollout", **options):
        prompts = [q["prompt"] for q in questions]
        rollout = qerl.generate(
            model, prompts, 64, 8, eos=text.eos, generator=sampling_rng, **options)
        texts = train_gsm8k.decode_all(text, rollout)
        return train_gsm8k.score(questions, rollout, texts, "answer")

    samples = complete(asked)
    both = method.explore(samples, complete, torch.Generator().manual_seed(0))
    branches = [i for i, q in enumerate(both.questions) if "begun" in q]
    cut = {both.questions[i]["question"] for i in branches}
    mains = [i for i, q in enumerate(both.questions) if q["question"] in cut and i not in branches]
    failed = int((samples.correct == 0).sum())
    print(f"\n2. The small policy: of {samples.correct.numel()} completions of {len(asked)} questions "
          f"{failed} failed. {len(branches)} of these end a\n"
          f"sentence before their last, and so were branched; they belong to {len(cut)} questions. A\n"
          "branch inherits what was wrong before the cut, so it pays where failures come late.\n\n"
          "                  right answers   groups with some right, some wrong")
    for name, groups in (("these questions", mains), ("their pivots", branches)):
        print(f"  {name:15} {both.correct[groups].mean():13.1%} {teaching(both, groups):15.1%}")


def teaching(samples, groups):
    """The fraction of these groups whose answers are not all alike."""
    return qerl.has_signal(samples.correct[groups]).float().mean()


def show_bounds():
    print("\n3. MASPO's w, by which the gradient of a token is multiplied, beside clipping at 0.8 and\n"
          "1.28, which multiplies by 1 or 0:\n\n"
          "              A = 1                        A = -1\n"
          "  ratio  pi=0.9  pi=0.01  clipping    pi=0.9  pi=0.01  clipping")
    for ratio in (0.1, 0.5, 0.79, 1.0, 1.29, 2.0, 5.0):
        shown = f"{ratio:7}"
        for advantage, clipped in ((1.0, ratio > 1.28), (-1.0, ratio < 0.8)):
            old_logprobs = torch.tensor([[0.9, 0.01]]).log()
            ratios = torch.full((1, 2), ratio)
            likely, unlikely = maspo_weights(ratios, old_logprobs, torch.tensor([[advantage]]))[0]
            shown += f" {likely:7.2f} {unlikely:8.2f} {int(not clipped):9}   "
        print(shown.rstrip())


def main():
    show_pivots()
    show_branches()
    show_bounds()


if __name__ == "__main__":
    main()
