"""The completions of a step as rows that can be cut.

They are cut into minibatches, one for each optimiser step, and these into micro-batches as large as
the memory allows. How the latter are cut changes the memory and the speed, not the gradient.
"""
from dataclasses import dataclass, is_dataclass, replace

import torch
import torch.nn.functional as F

import qerl


@dataclass(repr=False)
class Batch:
    """N completions with what the loss has to know of each. C: the longest completion."""
    prompts: list                       # N lists of token ids
    tokens: torch.Tensor                # int64 [N, C]
    length: torch.Tensor                # int64 [N], on the CPU: nothing then waits for the GPU
    rollout_logprobs: torch.Tensor      # float32 [N, C], of the noisy policy that sampled
    advantages: torch.Tensor            # float32 [N]
    weights: torch.Tensor               # float32 [N, C], each token's in the loss: token_weights
    old_logprobs: torch.Tensor          # float32 [N, C], of the policy before this step's updates
    ref_logprobs: torch.Tensor = None   # float32 [N, C], of the reference, if there is a KL term
    minibatches: list = None            # of a step: the row numbers of each, without those that
                                        # teach nothing
    index: torch.Tensor = None          # int64, of each row: its number in the step

    def trained_rows(self, first=0):
        """The rows of the minibatches, from this one on."""
        return sum(self.minibatches[first:], [])

    def micro_batches(self, chosen, budget):
        """These rows as batches of their own of at most `budget` tokens each: see cut_rows."""
        prompts = [self.prompts[i] for i in chosen]
        for piece in cut_rows(prompts, self.length[chosen].tolist(), budget):
            rows = [chosen[i] for i in piece]
            index = to_device(rows, self.tokens.device)
            cut = with_tensors(self, lambda t: t[index if t.is_cuda else rows])
            yield replace(cut, prompts=[prompts[i] for i in piece], index=index)


def to_device(numbers, device):
    """(Lists of) ints as an int64 tensor; the host does not wait for the GPU, as with torch.tensor."""
    tensor = torch.as_tensor(numbers, dtype=torch.long)
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def with_tensors(record, change):
    """A dataclass with change(t) for each tensor t in it and in the dataclasses that it holds."""
    changed = {}
    for name, value in vars(record).items():
        if isinstance(value, torch.Tensor):
            changed[name] = change(value)
        elif is_dataclass(value):
            changed[name] = with_tensors(value, change)
    return replace(record, **changed)


def make_batch(samples, advantages, engine, settings, ranks):
    """A step's completions as the rows of a Batch, in settings.updates minibatches.

    samples: train_gsm8k.Samples; advantages: float32 [P, G]; engine: as in train_gsm8k. A
    minibatch has neighbouring rows, mostly whole groups. A group whose rewards are equal has
    advantages of 0: without a KL term its rows are left out of the minibatches, and the weights of
    the others stay. (If no group has a signal the first stays, so that there is something to log.)
    """
    rollout = samples.rollout
    objective = qerl.OBJECTIVES[settings.algo]
    group = advantages.shape[1]
    mask = rollout.mask
    if objective.mask_truncated and not settings.overlong:         # (the authors' code: for GRPO, too)
        mask = mask & rollout.finished[:, None]
    teaches = qerl.has_signal(samples.rewards)
    if not teaches.any():
        teaches[0] = True
    teaches = (teaches | (settings.beta > 0)).repeat_interleave(group)
    weights = []
    for part in mask.tensor_split(settings.updates):
        # This process's share of the minibatch, in what the objective counts: completions or tokens.
        count = torch.as_tensor(objective.batch_divisor(part), device=part.device)
        fraction = count / ranks.total(count.clone()).clamp_min(1)
        weights.append(
            engine.token_weights(part, settings.algo, settings.max_new_tokens) * fraction)
    minibatches = torch.arange(len(mask), device=mask.device).tensor_split(settings.updates)
    unknown = torch.zeros_like(rollout.logprobs)
    return Batch(
        prompts=[question["prompt"] for question in samples.questions for _ in range(group)],
        tokens=rollout.tokens,
        length=rollout.length.cpu(),
        rollout_logprobs=rollout.logprobs,
        advantages=advantages.flatten(),
        weights=torch.cat(weights),
        old_logprobs=unknown,
        ref_logprobs=unknown.clone() if settings.beta else None,
        minibatches=[rows[teaches[rows]].tolist() for rows in minibatches],
    )


def effective_size(old_logprobs, rollout_logprobs, mask):
    """The fraction of n completions that is left after weighting: (Σ ratio)² / (n Σ ratio²).

    A completion's ratio π_old / π_rollout is the product of its tokens'. log-probabilities: float32
    [N, C]; mask: bool [N, C].
    """
    log_ratio = (old_logprobs - rollout_logprobs).masked_fill(~mask, 0)
    ratio = qerl.bounded(log_ratio[mask.any(1)].sum(1)).exp()
    return (ratio.sum() ** 2 / (len(ratio) * (ratio ** 2).sum())).item()


def cut_rows(prompts, lengths, budget):
    """Rows (a prompt, its completion's length) cut into micro-batches, lists of row numbers.

    One holds at most `budget` tokens, counting a prompt once that several of its rows share
    (fast.pack), and at most four times as many where attention pads the rows to one length. A row
    that is longer goes alone. Prompts with the longest rows come first.
    """
    rows_of = {}
    for i, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).append(i)

    def longest_first(prompt):
        return -len(prompt) - max(lengths[i] for i in rows_of[prompt]), prompt

    micro_batches = []
    last = []
    tokens = width = 0                  # of the last one: its tokens, its longest row
    for prompt in sorted(rows_of, key=longest_first):
        tokens += len(prompt)
        for i in rows_of[prompt]:
            size = len(prompt) + lengths[i]
            tokens += lengths[i]
            width = max(width, size)
            if not last or tokens > budget or width * (len(last) + 1) > 4 * budget:
                last = []
                micro_batches.append(last)
                tokens = width = size
            last.append(i)
    return micro_batches


def pick_groups(parts, order):
    """The groups of several train_gsm8k.Samples, one below the other, in this order: one Samples."""
    group = parts[0].rewards.shape[1]
    rows = [k * group + g for k in order for g in range(group)]
    questions = sum([s.questions for s in parts], [])
    texts = sum([s.texts for s in parts], [])
    return replace(
        parts[0],
        questions=[questions[k] for k in order],
        rollout=join_rollouts([s.rollout for s in parts], rows),
        texts=[texts[i] for i in rows],
        rewards=torch.cat([s.rewards for s in parts])[order],
        correct=torch.cat([s.correct for s in parts])[order],
    )


def join_rollouts(rollouts, rows):
    """These rows of rollouts that lie one below the other, padded to the longest."""
    longest = max(r.tokens.shape[1] for r in rollouts)

    def stack(parts):
        padded = [F.pad(t, (0, longest - t.shape[1])) if t.dim() == 2 else t for t in parts]
        return torch.cat(padded)[rows]

    return qerl.Rollout(*map(stack, zip(*(vars(r).values() for r in rollouts))))
