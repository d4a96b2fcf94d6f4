"""Speculative sampling: guess the next tokens from other completions, check them in one pass.

    python train_gsm8k.py --model Qwen2.5-1.5B --method speculative

The problem. A rollout ends with a few long completions, and a pass over a few sequences takes nearly
as long as one over many.

The formula (Leviathan et al., arXiv 2211.17192; drafts from earlier epochs: DAS, arXiv 2511.13841;
both from secondary notes). The draft x_1 ... x_K of a sequence is what followed on its last three
tokens in another completion of the same question, in this rollout or in the last one that had the
question. One pass over the sequence's last token and the draft gives K + 1 distributions, and a token
is drawn from each:

    y_j ~ p(· | the tokens so far, x_1 ... x_j),    j = 0 ... K

y_0 is right whatever the draft says. y_1 was drawn behind x_1, so that it counts if y_0 = x_1; y_2
counts if also y_1 = x_2, and so on. The first y that differs from the draft is the last that counts.

Why is it exact? Each token that is kept was drawn from p, given the tokens kept before it. The draft
only decides how many are kept. Temperature, top-p and AQN's noise change p alone, and the
log-probabilities are p's. (The papers' rule for a draft that is certain of x is the same: accept x
with probability p(x), else draw from p without x.)

When does it pay? A pass over r rows takes about 1 + r / ROWS times what one over few takes. A draft
of K tokens, each accepted with probability a, yields 1 + a + ... + a^K tokens for K + 1 rows. Of
K = 0, 1, 3 and 7 the sampler takes the fastest for the slots that it has, and chooses again whenever
it gives up half of them. K = 0 is the plain sampler, for many sequences or bad drafts.

metrics.jsonl has a (`acceptance`), the tokens that a sequence got from a pass with a draft
(`tokens_a_pass`), the share of all tokens that came from such passes (`speculated`), and in seconds
the rollout, to compare with that of the same command and `--method qerl`.

What differs from QeRL: the sampler, which also goes down to fewer slots. Memory keeps each question's
last texts, checkpoints do not: a resumed run begins without them, so that its samples differ from those
of a run that was never stopped, with the same distribution.

The papers' results: DAS shortens a rollout by 30 to 50 % [secondary]. Ours: a rollout is 1.07 times
as fast for 512 completions of 1.5B in the second and third epoch (results/README.md), because most
tokens are sampled while many sequences live. That was with drafts by the last eight, four or two
tokens, from up to 16 earlier completions.

When would you use it? On a GPU, from the second epoch on, where some completions are much longer than
others.
"""
import copy
from functools import partial

import torch
import torch.nn.functional as F

import qerl
from harness import fast
from methods import Method
from harness.fast import IDLE

ROWS = 100                     # 7B in NVFP4 on an H200: 2.6 ms a step for 1 row, 5.9 for 128
CONTEXT = 3                    # so many last tokens are looked up
PLACES = 2 ** 23               # in the table


def best_draft(slots, acceptance):
    """The number of tokens of a draft that is fastest if each of `slots` gets one."""
    def tokens_a_second(K):
        return sum(acceptance ** j for j in range(K + 1)) / (1 + (K + 1) * slots / ROWS)
    return max((0, 1, 3, 7), key=tokens_a_second)


class Lookup:
    """How texts go on; int64: texts [n, T], the number of each one's question [n], lengths [n].

    table[hash of a question and its last tokens] is the place of the token that followed: row * T +
    column, the largest of several, or -1. If tokens share a hash, a draft is wrong, nothing else.
    """

    def __init__(self, texts, question, lengths):
        self.texts = texts
        self.question = question
        self.table = question.new_full((PLACES,), -1)
        rng = torch.Generator().manual_seed(0)
        self.factors = torch.randint(2 ** 62, (CONTEXT + 1,), generator=rng).to(texts.device)
        self.learn(*qerl.length_mask(lengths, texts.shape[1]).nonzero().unbind(1))

    def keys(self, row, column):
        """Where in the table the tokens before these places are looked up."""
        at = column[..., None] - torch.arange(1, CONTEXT + 1, device=column.device)
        tokens = self.texts[row[..., None], at.clamp_min(0)].masked_fill(at < 0, -1)
        known = torch.cat([tokens, self.question[row][..., None]], -1)
        return (known * self.factors).sum(-1) % PLACES

    def learn(self, row, column):
        """Enter these places; those of the row IDLE are -1 or less, and stay out."""
        place = row * self.texts.shape[1] + column
        self.table.scatter_reduce_(0, self.keys(row, column).flatten(), place.flatten(), "amax")

    def draft(self, row, column, K):
        """K tokens to go on with from each of these places [slots] -> [K, slots]."""
        place = self.table[self.keys(row, column)] + torch.arange(K, device=row.device)[:, None]
        return self.texts.flatten()[place.clamp(0, self.texts.numel() - 1)]


class SpeculativeSampler(fast.Sampler):
    """For fast.generate. K: tokens of a draft; where it is 0 this is the plain sampler."""

    fewest = 4

    def __init__(self, earlier, question, acceptance, counts, model, count, slots, max_len, *args):
        """earlier: other completions of these questions, int32 [count, max_new_tokens], or zeros.

        question int64 [count]: the number of each one's question; acceptance: that of drafts; counts
        int64 [3]: passes of a sequence with a draft, tokens they gave, drafts that failed.
        """
        self.earlier = earlier
        idle = question.new_tensor([IDLE])                                       # of the spare row
        self.question = torch.cat([question, idle, question]).to(model.device)
        self.acceptance = acceptance
        self.counts = counts
        super().__init__(model, count, slots, max_len + 7, *args)                # a draft may overhang

    def record(self):
        """Choose K for these slots; if it is not 0, look at all texts so far."""
        self.K = best_draft(len(self.completion), self.acceptance)
        if self.K:
            texts = torch.cat([self.tokens, self.earlier.to(self.tokens)])
            self.tokens = texts[:len(self.tokens)]     # what is written there is seen by the lookup
            whole = torch.full_like(self.length, texts.shape[1])     # padding is never looked up
            self.lookup = Lookup(texts, self.question, torch.cat([self.length[:-1], whole]))
            self.ahead = torch.arange(self.K + 1, device=texts.device)[:, None]
        super().record()

    def forward(self):
        """Logits [(K + 1) * slots, V]: first behind each slot's last token, then behind its draft."""
        if not self.K:
            return super().forward()
        self.draft = self.lookup.draft(self.completion, self.position, self.K)
        tokens = torch.cat([self.token[None], self.draft])                       # [K + 1, slots]
        filled = self.cache.filled + self.ahead
        if fast.use_kernels(self.model.embedding):
            hidden = self.decode(tokens.flatten(), filled.flatten())
        else:
            hidden = torch.cat([self.decode(*row) for row in zip(tokens, filled)])
        self.logits = F.linear(hidden, self.model.lm_head)

    def decode(self, tokens, filled):
        """Hidden states of these tokens, whose places in the cache are `filled`.

        The kernels take several tokens of a slot at once: all slots' next tokens, then those behind.
        """
        cache = copy.copy(self.cache)                  # the same keys and values
        cache.filled = filled
        return self.model.decode(tokens, cache)

    def draw(self):
        """Draw, write down the tokens that count, and return the last of them."""
        drawn = super().draw()
        if not self.K:
            return drawn
        token, logprob, entropy = (t.view(self.K + 1, -1) for t in drawn)
        goes_on = (token[..., None] != self.eos).all(-1)                         # [K + 1, slots]
        right = (token[:-1] == self.draft) & goes_on[:-1]
        accepted = right.cumprod(0).sum(0)                                       # [slots]
        kept = torch.minimum(accepted + 1, self.limit[self.completion] - self.position)
        busy = self.completion != IDLE
        failed = busy & (accepted < kept.clamp(max=self.K))        # else the limit was reached
        self.counts += torch.stack([busy, busy * kept, failed]).sum(1)

        dropped = self.ahead >= kept                   # [K + 1, slots]; they go to the spare row
        row = self.completion.expand_as(dropped).masked_fill(dropped, IDLE)
        column = (self.position + self.ahead).masked_fill(dropped, 0)
        self.tokens[row, column] = token
        self.logprobs[row, column] = logprob
        self.entropy[row, column] = entropy
        self.lookup.learn(row, column)
        last = kept - 1
        self.position.add_(last)                       # `pick` goes on behind the last
        self.cache.filled.add_(last)
        return [t.gather(0, last[None])[0] for t in (token, logprob, entropy)]


class Neighbour(Method):
    """QeRL, sampled by a SpeculativeSampler. state: "acceptance", that of the last rollout's drafts."""

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.state = {"acceptance": 0.5}               # a guess
        self.texts = {}                                # a prompt's completions, when it was last asked

    def generate(self, model, prompts, max_new_tokens, group_size, **options):
        asked = list(map(tuple, prompts))
        none = torch.zeros(group_size, max_new_tokens, dtype=torch.int32)
        earlier = torch.cat([self.texts.get(prompt, none) for prompt in asked])
        question = torch.arange(len(earlier)) // group_size
        counts = torch.zeros(3, dtype=torch.long, device=model.device)
        sampler_class = partial(
            SpeculativeSampler, earlier, question, self.state["acceptance"], counts)
        rollout = fast.generate(model, prompts, max_new_tokens, group_size,
                                sampler_class=sampler_class, **options)
        tokens = F.pad(rollout.tokens, (0, max_new_tokens - rollout.tokens.shape[1])).int().cpu()
        self.texts |= zip(asked, tokens.split(group_size))
        passes, given, failed = counts.tolist()
        if passes:
            accepted = given - passes
            # Never 0, or no draft would ever be tried again.
            self.state["acceptance"] = max(0.1, accepted / max(1, accepted + failed))
        self.measured = {
            "acceptance": self.state["acceptance"],
            "tokens_a_pass": given / max(1, passes),
            "speculated": given / int(rollout.length.sum()),
        }
        return rollout
