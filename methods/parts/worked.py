"""The training questions with their worked answers, as token ids to learn or to calibrate from."""
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Worked(NamedTuple):
    """One question and its worked answer, as the policy would be asked and would write it."""
    prompt: list                   # token ids
    answer: list                   # token ids, with the one that ends a completion


def worked_sequences(questions, tokenizer, tokens, seed=0):
    """Worked questions in the seed's order, until they have so many tokens; all, if all have fewer.

    questions: dicts with "question" and "answer"; tokenizer: a WordText or a ChatText.
    """
    order = random.Random(seed).sample(questions, len(questions))
    sequences = []
    for question in order:
        work, _, final = question["answer"].rpartition("####")     # other data's has no steps
        answer = tokenizer.worked_answer(work.strip(), final.strip())
        sequences.append(Worked(tokenizer.prompt(question["question"]), answer))
        tokens -= len(sequences[-1].prompt) + len(answer)
        if tokens <= 0:
            break
    return sequences


class Rows(NamedTuple):
    """Worked questions side by side. Attention is causal, so padding on the right hides itself."""
    tokens: torch.Tensor           # int64 [B, T], padded on the right
    mask: torch.Tensor             # bool [B, T], False at padding
    answered: torch.Tensor         # bool [B, T], True where the next token is one of the answer


def rows_of(sequences, device):
    """Rows of B sequences."""
    lines = [torch.tensor(s.prompt + s.answer) for s in sequences]
    tokens = nn.utils.rnn.pad_sequence(lines, batch_first=True).to(device)
    prompt = torch.tensor([[len(s.prompt)] for s in sequences], device=device)          # [B, 1]
    end = torch.tensor([[len(line)] for line in lines], device=device)
    t = torch.arange(tokens.shape[1], device=device)
    return Rows(tokens, t < end, (t >= prompt - 1) & (t < end - 1))


def batches_of(sequences, size, device):
    """All sequences as Rows of at most `size`; lengths are similar, so that little is padding."""
    ordered = sorted(sequences, key=lambda s: len(s.prompt) + len(s.answer))
    return [rows_of(ordered[i:i + size], device) for i in range(0, len(ordered), size)]


def answer_logits(model, rows, hidden=None):
    """(logits float32 [n, V] that predict the n answer tokens of some Rows, these tokens int64 [n]).

    hidden [B, T, d]: of the Rows, where it is known already.
    """
    if hidden is None:
        hidden = model.hidden(rows.tokens)
    logits = F.linear(hidden[rows.answered], model.lm_head)
    return logits.float(), rows.tokens.roll(-1, 1)[rows.answered]


def fit(optimizer, loss_of, sequences, batch, device):
    """Take optimiser steps, each on `batch` of the sequences, and yield their losses, loss_of(Rows)."""
    rng = random.Random(0)
    while True:
        rows = rows_of(rng.sample(sequences, min(batch, len(sequences))), device)
        loss = loss_of(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
