"""methods/speculative.py: the plain sampler's distribution, in fewer passes."""
import json
import math
import types

import pytest
import torch

import qerl
from common import QUICK, run_main
from methods import speculative
from qerl import kernels
from test_qerl import KERNEL_DEVICE, gpu, make_folder, relative, runs_kernels, seeded, with_lora


def always(monkeypatch, K):
    """Every pass has drafts of K tokens."""
    monkeypatch.setattr(speculative, "best_draft", lambda slots, acceptance: K)


def same(rollout, other):
    for name, tensor in vars(rollout).items():
        torch.testing.assert_close(getattr(other, name), tensor, rtol=1e-4, atol=1e-4)


def text_probabilities(model, prompt, length, temperature, top_p):
    """That of each text of so many tokens, by training's arithmetic, [V ** length]."""
    V = model.config.vocab_size
    texts = torch.tensor([prompt])
    product = torch.ones(1)
    for _ in range(length):
        p = qerl.nucleus((model(texts)[:, -1] / temperature).softmax(-1), top_p)
        product = (product[:, None] * p / p.sum(-1, keepdim=True)).flatten()
        next_tokens = torch.arange(V).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(V, 0), next_tokens], 1)
    return product


@torch.no_grad()
@pytest.mark.parametrize("temperature,top_p", [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7)])
def test_frequencies_are_the_policys(quiz, monkeypatch, temperature, top_p):
    """All texts of three tokens, by chi-squared. Some drafts are right, in the second rollout more."""
    always(monkeypatch, 3)
    model = qerl.load_model(quiz, "bf16")
    probabilities = text_probabilities(model, [0, 1, 2], 3, temperature, top_p)
    often = probabilities > 1e-3
    expected = 10000 * torch.cat([probabilities[often], probabilities[~often].sum()[None]])
    method = speculative.Neighbour(None)
    for seed in range(2):
        rollout = method.generate(model, [[0, 1, 2]], 3, 10000, temperature=temperature, top_p=top_p,
                                  slots=10000, generator=seeded(seed))
        assert 1.05 < method.measured["tokens_a_pass"] < 2.5
        counts = (rollout.tokens @ torch.tensor([81, 9, 1])).bincount(minlength=729)
        assert (counts[probabilities == 0] == 0).all()
        found = torch.cat([counts[often], counts[~often].sum()[None]])
        chi_squared = ((found - expected) ** 2 / expected.clamp_min(1)).sum()
        freedom = len(expected) - 1
        assert chi_squared < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_completions_are_the_plain_samplers(family, monkeypatch):
    """Of different length, in slots that are refilled or given up, in a cache of several pieces."""
    monkeypatch.setattr(qerl, "CACHE_PIECE", 8)
    model = with_lora(family[0])
    prompts = [[i, 3, 2 * i + 1] for i in range(20)]
    eos = set(qerl.generate(model, prompts, 24, temperature=0).tokens[:6, 3].tolist())
    plain = qerl.generate(model, prompts, 24, 2, temperature=0, eos=eos)
    assert plain.finished.any() and not plain.finished.all()
    method = speculative.Neighbour(None)
    for slots in (40, 6):
        same(plain, method.generate(model, prompts, 24, 2, temperature=0, eos=eos, slots=slots))
    assert method.measured["tokens_a_pass"] > 1.5


@pytest.mark.parametrize("off,measured", [
    (0, {"acceptance": 1.0, "tokens_a_pass": 7.0, "speculated": 1.0}),
    (1, {"acceptance": 0.1, "tokens_a_pass": 1.0, "speculated": 1.0}),
])
def test_right_drafts_make_several_tokens_a_pass(qwen, monkeypatch, off, measured):
    """21 tokens in three passes, if the seven tokens of each draft are right; if all are wrong, in 21."""
    always(monkeypatch, 7)
    model = with_lora(qwen[0])
    plain = qerl.generate(model, [[i, 3] for i in range(6)], 21, temperature=0)

    def draft(self, row, column, K):
        column = (column + torch.arange(K)[:, None]).clamp_max(20)
        return plain.tokens[row, column] + off
    monkeypatch.setattr(speculative.Lookup, "draft", draft)
    method = speculative.Neighbour(None)
    same(plain, method.generate(model, [[i, 3] for i in range(6)], 21, 1, temperature=0))
    assert method.measured == measured


@pytest.mark.parametrize("slots,acceptance,K", [
    (256, 0.6, 0), (128, 0.1, 0), (128, 0.6, 1), (16, 0.6, 3), (16, 0.1, 0), (4, 0.9, 7), (4, 0.1, 1),
])
def test_drafts_are_as_long_as_pays(slots, acceptance, K):
    assert speculative.best_draft(slots, acceptance) == K


def test_without_drafts_it_is_the_plain_sampler(qwen, monkeypatch):
    always(monkeypatch, 0)
    model = with_lora(qwen[0])
    plain = qerl.generate(model, [[1, 2], [3]], 8, 3, generator=seeded(0))
    rollout = speculative.Neighbour(None).generate(model, [[1, 2], [3]], 8, 3, generator=seeded(0))
    assert all(torch.equal(a, b) for a, b in zip(vars(plain).values(), vars(rollout).values()))


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
    """Each step has all ten questions; the third is stopped, and goes on without earlier texts."""
    out = tmp_path / "out"
    options = ("--model", quiz, "--data", quiz, *QUICK, "--prompts", 10, "--steps", 3, "--save-every", 1,
               "--skip-eval-before", "--method", "speculative", "--out", out)
    calls = []
    generate = speculative.Neighbour.generate

    def stop_in_the_third(self, *args, **options):
        calls.append((self.state["acceptance"], len(self.texts)))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(self, *args, **options)
    monkeypatch.setattr(speculative.Neighbour, "generate", stop_in_the_third)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *options)
    run_main(monkeypatch, *options, "--resume")
    acceptance, texts = zip(*calls)
    assert acceptance[0] == 0.5 and acceptance[3] == acceptance[2] != acceptance[1]
    assert texts == (0, 10, 10, 0)
    log = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert [m["speculated"] > 0 and m["tokens_a_pass"] > 1 for m in log] == [True] * 3


@runs_kernels
@pytest.mark.parametrize("parts", [None, 3])
def test_kernel_attention_of_several_tokens_a_slot(monkeypatch, parts):
    """Four rows a slot. Of one slot they lie in two pieces; of another the next part begins there."""
    torch.manual_seed(0)
    filled = torch.tensor([0, 62, 254, 130, 256])
    of_rows = (filled + torch.arange(4)[:, None]).flatten()
    qkv = torch.randn(20, 10 * 48)
    cos = torch.randn(20, 48)
    sin = torch.randn(20, 48)
    whole = torch.randn(2, 5, 2, 300, 48)
    for b, n in enumerate(filled):
        whole[:, b, :, n:] = float("nan")              # what lies there does not matter
    pieces = [piece.contiguous().to(KERNEL_DEVICE) for piece in whole.split(256, 3)]
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=KERNEL_DEVICE)
    rows = [t.to(KERNEL_DEVICE) for t in (qkv, cos, sin)]
    y = kernels.decode_attention(*rows, pieces, addresses, 300, of_rows.to(KERNEL_DEVICE), 256,
                                 split=64, parts=parts)
    monkeypatch.setattr(qerl, "use_kernels", lambda x: False)
    monkeypatch.setattr(qerl, "CACHE_PIECE", 256)
    exact = [piece.nan_to_num().double() for piece in whole.split(256, 3)]
    cache = types.SimpleNamespace(pieces=[exact], filled=of_rows)
    expected = qerl.decode_attention(qkv.double(), cos.double(), sin.double(), cache, 0)
    assert relative(y.cpu().double(), expected) < 1e-5
    for piece, right in zip(pieces, exact):
        assert relative(piece.cpu().nan_to_num().double(), right) < 1e-6


@gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_gpu_rollouts_with_drafts_are_the_policys(tmp_path, top_p):
    """By a CUDA graph and the kernels; twice the same bits."""
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda")
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    rollouts = []
    for _ in range(2):
        method = speculative.Neighbour(None)
        for _ in range(2):
            rollout = method.generate(model, prompts, 40, 2, top_p=top_p, slots=32,
                                      generator=torch.Generator("cuda").manual_seed(0))
        rollouts.append(rollout)
    assert method.measured["tokens_a_pass"] > 1
    assert torch.equal(rollouts[0].logprobs, rollouts[1].logprobs)
    repeated = [p for p in prompts for _ in range(2)]
    with torch.no_grad():
        logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].mean() < 0.03
