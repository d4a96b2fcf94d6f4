"""methods/speculative.py: the plain sampler's distribution, in fewer passes."""
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from harness import fast
from methods import speculative
from test_qerl import NEAR, seeded, with_lora


@torch.no_grad()
def test_frequencies_are_the_policys(quiz, monkeypatch):
    """Of texts of three tokens, by chi-squared. Drafts are right now and then."""
    monkeypatch.setattr(speculative, "best_draft", lambda *_: 3)
    model = fast.load_model(quiz, "bf16")
    method = speculative.Neighbour(None)
    rollout = method.generate(
        model, [[2]], max_new_tokens=3, group_size=10000, temperature=0.6, slots=10000,
        generator=seeded(0))
    assert 1.05 < method.measured["tokens_a_pass"] < 2.5
    texts = torch.cartesian_prod(*[torch.arange(9)] * 3)                         # [729, 3]
    length = torch.full((729,), 3)
    logprobs = fast.token_logprobs(model, [[2]] * 729, texts, length, temperature=0.6)
    expected = 10000 * logprobs.sum(1).exp()
    number = rollout.tokens @ torch.tensor([81, 9, 1])
    difference = number.bincount(minlength=729) - expected
    terms = (difference ** 2 / expected)[expected > 10]
    assert terms.sum() < len(terms) + 4 * (2 * len(terms)) ** 0.5


def test_greedy_completions_are_the_plain_samplers(family):
    """Of different length, in slots that are refilled or given up.

    By an acceptance of 0.1 drafts do not pay before half of 40 slots are given up.
    """
    model = with_lora(family[0])
    prompts = [[i, 3, 2 * i + 1] for i in range(20)]
    endless = fast.generate(model, prompts, 24, temperature=0)
    eos = set(endless.tokens[:6, 3].tolist())
    options = dict(max_new_tokens=24, group_size=2, temperature=0, eos=eos)
    plain = fast.generate(model, prompts, **options)
    assert plain.finished.any() and not plain.finished.all()
    method = speculative.Neighbour(None)
    for slots, acceptance in ((40, 0.1), (40, 0.5), (6, 0.5)):
        method.state["acceptance"] = acceptance
        found = method.generate(model, prompts, slots=slots, **options)
        for name, tensor in vars(plain).items():
            assert_close(getattr(found, name), tensor, **NEAR)
        assert method.measured["speculated"] == 1 or acceptance == 0.1
    assert method.measured["tokens_a_pass"] > 1.5


@pytest.mark.parametrize("wrong,acceptance,tokens_a_pass", [
    (0, 1.0, 7.0),
    (1, 0.1, 1.0),
])
def test_right_drafts_make_several_tokens_a_pass(
        model, monkeypatch, wrong, acceptance, tokens_a_pass):
    """21 tokens in three passes if all drafts, of seven tokens, are right; if all are wrong, in 21."""
    monkeypatch.setattr(speculative, "best_draft", lambda *_: 7)
    prompts = [[1, 3], [2, 3]]
    plain = fast.generate(model, prompts, 21, temperature=0)
    drafts = F.pad(plain.tokens + wrong, (0, 7))

    def draft(lookup, row, column, K):
        return drafts[row, column + torch.arange(K)[:, None]]
    monkeypatch.setattr(speculative.Lookup, "draft", draft)
    method = speculative.Neighbour(None)
    method.generate(model, prompts, 21, 1, temperature=0)
    assert method.measured == {
        "acceptance": acceptance, "tokens_a_pass": tokens_a_pass, "speculated": 1.0}


@pytest.mark.parametrize("slots,acceptance,length", [
    (256, 0.6, 0),
    (128, 0.6, 1),
    (16, 0.6, 3),
    (4, 0.9, 7),
    (16, 0.1, 0),
])
def test_drafts_are_as_long_as_pays(slots, acceptance, length):
    assert speculative.best_draft(slots, acceptance) == length


def test_a_draft_is_what_followed_on_the_last_three_tokens():
    """Of the same question alone; a text's beginning, too, is something that others go on from."""
    texts = torch.tensor([
        [1, 2, 3, 4, 0, 0],
        [7, 1, 2, 3, 4, 5],
        [8, 5, 3, 4, 6, 0],
        [1, 2, 3, 4, 1, 1],                            # another question's
    ])
    question = torch.tensor([0, 0, 0, 1])
    length = torch.tensor([4, 6, 5, 6])
    lookup = speculative.Lookup(texts, question, length)
    row = torch.tensor([0, 3])
    column = torch.tensor([4, 0])
    drafts = lookup.draft(row, column, K=2)
    assert drafts.T.tolist() == [[5, 8], [1, 2]]       # behind 2 3 4, not behind 5 3 4
