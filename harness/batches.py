"""The completions of a step as rows that can be cut.

They are cut into minibatches, one for each optimiser step, and these into micro-batches as large as
the memory allows. How the latter are cut changes the memory and the speed, not the gradient.
"""
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

import qerl


@dataclass(repr=False)
class Batch:
    """N completions with what the loss has to know of each. C: the longest completion."""
    prompts: list                       # N lists of token ids
    tokens: torch.Tensor                # int64 [N, C]
    length: torch.Tensor                # int64 [N]
    rollout_logprobs: torch.Tensor      # float32 [N, C], of the noisy policy that sampled
    advantages: torch.Tensor            # float32 [N]
    mask: torch.Tensor                  # bool [N, C], True at tokens that give a gradient
    old_logprobs: torch.Tensor = None   # float32 [N, C], of the policy before this step's updates
    ref_logprobs: torch.Tensor = None   # float32 [N, C], of the reference, if there is a KL term
    weights: torch.Tensor = None        # float32 [N, C], each token's in the loss: token_weights

    def __repr__(self):
        """Dtypes and shapes alone, for who prints it in a debugger."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self)[1:])
        tensors = [f"{name} {value.dtype} {list(value.shape)}" for name, value in named if value is not None]
        return f"Batch of {len(self.prompts)} prompts: {', '.join(tensors)}"

    @property
    def sampled(self):
        """bool [N, C], True at all tokens that were sampled, with a gradient or without."""
        return qerl.length_mask(self.length, self.tokens.shape[1])

    def rows(self, chosen):
        """These rows (a list of ints) as a batch of their own."""
        kept = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                kept[f.name] = value[chosen]
        return replace(self, prompts=[self.prompts[i] for i in chosen], **kept)

    def minibatches(self, count):
        """`count` batches of neighbouring rows, of equal size as far as it goes."""
        for chosen in torch.arange(len(self.prompts)).tensor_split(count):
            yield self.rows(chosen.tolist())

    def micro_batches(self, budget):
        """Batches of at most `budget` tokens each: see cut_rows."""
        for chosen in cut_rows(self.prompts, self.length.tolist(), budget):
            yield self.rows(chosen)

    def logprobs_under(self, model, budget):
        """log π(token) of all completions under the model as it is, float32 [N, C]; padding: 0."""
        result = torch.zeros_like(self.rollout_logprobs)
        for chosen in cut_rows(self.prompts, self.length.tolist(), budget):
            prompts = [self.prompts[i] for i in chosen]
            tokens = self.tokens[chosen]
            with torch.no_grad():
                result[chosen] = qerl.token_logprobs(model, prompts, tokens, self.length[chosen])
        return result


def cut_rows(prompts, lengths, budget):
    """Rows (a prompt, its completion's length) cut into micro-batches, lists of row numbers.

    One holds at most `budget` tokens, counting a prompt once that several of its rows share
    (qerl.pack), and at most four times as many where attention pads the rows to one length. A row
    that is longer goes alone. Prompts with the longest rows come first.
    """
    longest = {}
    for prompt, length in zip(map(tuple, prompts), lengths):
        longest[prompt] = max(longest.get(prompt, 0), len(prompt) + length)
    order = sorted(range(len(prompts)), key=lambda i: (-longest[tuple(prompts[i])], prompts[i]))
    micro_batches = []
    tokens = width = 0                  # of the last one: its tokens, its longest row
    for i in order:
        size = len(prompts[i]) + lengths[i]
        shares_prompt = bool(micro_batches) and prompts[i] == prompts[micro_batches[-1][-1]]
        added = lengths[i] if shares_prompt else size
        too_many = tokens + added > budget
        padded = max(width, size) * (len(micro_batches[-1]) + 1) if micro_batches else 0
        if not micro_batches or too_many or padded > 4 * budget:
            micro_batches.append([])
            tokens = width = 0
            added = size
        micro_batches[-1].append(i)
        tokens += added
        width = max(width, size)
    return micro_batches


def pick_groups(parts, order):
    """The groups of several train_gsm8k.Samples, one below the other, in this order: one Samples."""
    group = parts[0].rewards.shape[1]
    rows = [k * group + g for k in order for g in range(group)]
    questions = [question for s in parts for question in s.questions]
    texts = [text for s in parts for text in s.texts]
    return replace(
        parts[0],
        questions=[questions[k] for k in order],
        rollout=join_rollouts([s.rollout for s in parts], rows),
        texts=[texts[i] for i in rows],
        rewards=torch.cat([s.rewards for s in parts])[order],
        correct=torch.cat([s.correct for s in parts])[order],
    )


def move_samples(samples, device):
    """train_gsm8k.Samples with its tensors on a device."""
    rollout = samples.rollout
    rollout = qerl.Rollout(*(getattr(rollout, f.name).to(device) for f in fields(rollout)))
    return replace(samples, rollout=rollout, rewards=samples.rewards.to(device),
                   correct=samples.correct.to(device))


def join_rollouts(rollouts, rows):
    """These rows of rollouts that lie one below the other, padded to the longest."""
    longest = max(r.tokens.shape[1] for r in rollouts)

    def stack(name):
        parts = [getattr(r, name) for r in rollouts]
        padded = [F.pad(t, (0, longest - t.shape[1])) if t.dim() == 2 else t for t in parts]
        return torch.cat(padded)[rows]
    return qerl.Rollout(*(stack(f.name) for f in fields(qerl.Rollout)))
