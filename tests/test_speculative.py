"""methods/speculative.py: the plain sampler's distribution, in fewer passes."""
import math

import pytest
import torch
import torch.nn.functional as F

import qerl
from common import QUICK, run_main, stop_at
from harness.folders import read_jsonl
from methods import speculative
from test_qerl import seeded, with_lora


def always(monkeypatch, K):
    """Every pass has drafts of K tokens."""
    monkeypatch.setattr(speculative, "best_draft", lambda slots, acceptance: K)


def same(rollout, other):
    for name, tensor in vars(rollout).items():
        torch.testing.assert_close(getattr(other, name), tensor, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("temperature,top_p", [(0.6, 1.0), (1.0, 0.7)])
def test_frequencies_are_the_policys(quiz, monkeypatch, temperature, top_p):
    """Of texts of three tokens, by chi-squared. Drafts are right now and then."""
    always(monkeypatch, 3)
    model = qerl.load_model(quiz, "bf16")
    texts = torch.cartesian_prod(*[torch.arange(9)] * 3)                         # [729, 3]
    logits = model(F.pad(texts, (1, 0), value=2))[:, :-1]                        # behind token 2
    p = qerl.nucleus((logits / temperature).softmax(-1).flatten(0, 1), top_p)
    p = (p / p.sum(-1, keepdim=True)).view_as(logits)
    expected = 10000 * p.gather(-1, texts[..., None]).flatten(1).prod(1)
    often = expected > 10
    method = speculative.Neighbour(None)
    for seed in range(2):                              # the second time with texts of the first
        rollout = method.generate(model, [[2]], 3, 10000, temperature=temperature, top_p=top_p,
                                  slots=10000, generator=seeded(seed))
        assert 1.05 < method.measured["tokens_a_pass"] < 2.5
        found = (rollout.tokens @ torch.tensor([81, 9, 1])).bincount(minlength=729)
        assert (found[expected == 0] == 0).all()
        chi_squared = ((found - expected) ** 2 / expected)[often].sum()
        assert chi_squared < often.sum() + 4 * math.sqrt(2 * often.sum())


def test_greedy_completions_are_the_plain_samplers(family, monkeypatch):
    """Of different length, in slots that are refilled or given up, in a cache of several pieces.

    By an acceptance of 0.1 drafts do not pay before half of 40 slots are given up.
    """
    monkeypatch.setattr(qerl, "CACHE_PIECE", 8)
    model = with_lora(family[0])
    prompts = [[i, 3, 2 * i + 1] for i in range(20)]
    eos = set(qerl.generate(model, prompts, 24, temperature=0).tokens[:6, 3].tolist())
    plain = qerl.generate(model, prompts, 24, 2, temperature=0, eos=eos)
    assert plain.finished.any() and not plain.finished.all()
    method = speculative.Neighbour(None)
    for slots, acceptance in ((40, 0.1), (40, 0.5), (6, 0.5)):
        method.state["acceptance"] = acceptance
        same(plain, method.generate(model, prompts, 24, 2, temperature=0, eos=eos, slots=slots))
        assert method.measured["speculated"] == 1 or acceptance == 0.1
    assert method.measured["tokens_a_pass"] > 1.5


@pytest.mark.parametrize("off,measured", [
    (0, {"acceptance": 1.0, "tokens_a_pass": 7.0, "speculated": 1.0}),
    (1, {"acceptance": 0.1, "tokens_a_pass": 1.0, "speculated": 1.0}),
])
def test_right_drafts_make_several_tokens_a_pass(qwen, monkeypatch, off, measured):
    """21 tokens in three passes if all drafts, of seven tokens, are right; if all are wrong, in 21."""
    always(monkeypatch, 7)
    model = with_lora(qwen[0])
    prompts = [[i, 3] for i in range(6)]
    plain = qerl.generate(model, prompts, 21, temperature=0)

    def draft(self, row, column, K):
        column = (column + torch.arange(K)[:, None]).clamp_max(20)
        return plain.tokens[row, column] + off
    monkeypatch.setattr(speculative.Lookup, "draft", draft)
    method = speculative.Neighbour(None)
    same(plain, method.generate(model, prompts, 21, 1, temperature=0))
    assert method.measured == measured


def test_drafts_are_as_long_as_pays():
    cases = {(256, 0.6): 0, (128, 0.6): 1, (16, 0.6): 3, (16, 0.1): 0, (4, 0.9): 7, (4, 0.1): 1}
    assert {case: speculative.best_draft(*case) for case in cases} == cases


def test_a_draft_is_what_followed_on_the_most_last_tokens():
    """Of the same question alone; a text's beginning, too, is something that others go on from."""
    texts = torch.tensor([
        [1, 2, 3, 4, 0, 0],
        [7, 1, 2, 3, 4, 5],
        [8, 3, 4, 6, 0, 0],
        [1, 2, 3, 4, 1, 1],                            # another question's
    ])
    lookup = speculative.Lookup(texts, torch.tensor([0, 0, 0, 1]), torch.tensor([4, 6, 4, 6]))
    drafts = lookup.draft(torch.tensor([0, 3]), torch.tensor([4, 0]), 2)
    assert drafts.T.tolist() == [[5, 8], [1, 2]]       # behind 1 2 3 4, not behind 3 4 alone


def test_a_resumed_run_keeps_the_acceptance_and_not_the_texts(quiz, tmp_path, monkeypatch):
    """Each step has all ten questions; the run is stopped in its second."""
    options = ("--model", quiz, "--data", quiz, *QUICK, "--prompts", 10, "--steps", 3,
               "--save-every", 1, "--skip-eval-before", "--method", "speculative",
               "--out", tmp_path / "out")
    known = []
    generate = speculative.Neighbour.generate

    def noted(self, *args, **options):
        known.append((len(self.texts), self.state["acceptance"]))
        return generate(self, *args, **options)
    monkeypatch.setattr(speculative.Neighbour, "generate", noted)
    stop_at(2, *options)
    run_main(monkeypatch, *options, "--resume")
    texts, acceptance = zip(*known)
    assert texts == (0, 10, 0, 10)
    assert acceptance[0] == 0.5 != acceptance[1] == acceptance[2]
    log = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert all(m["speculated"] > 0 and m["tokens_a_pass"] > 1 for m in log)
