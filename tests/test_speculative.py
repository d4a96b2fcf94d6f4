"""methods/speculative.py: the plain sampler's distribution, in fewer passes."""
import json
import math
import types

import pytest
import torch
import torch.nn.functional as F

import qerl
from common import QUICK, run_main
from methods import speculative
from test_qerl import KERNEL_DEVICE, gpu, make_folder, relative, runs_kernels, seeded, with_lora


def always(monkeypatch, K):
    """Every pass has drafts of K tokens."""
    monkeypatch.setattr(speculative, "best_draft", lambda slots, acceptance: K)


def same(rollout, other):
    for name, tensor in vars(rollout).items():
        torch.testing.assert_close(getattr(other, name), tensor, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("temperature,top_p", [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7)])
def test_frequencies_are_the_policys(quiz, monkeypatch, temperature, top_p):
    """All texts of three tokens, by chi-squared. Drafts are right now and then."""
    always(monkeypatch, 3)
    model = qerl.load_model(quiz, "bf16")
    texts = torch.cartesian_prod(*[torch.arange(9)] * 3)                         # [729, 3]
    logits = model(F.pad(texts, (1, 0), value=2))[:, :-1]                        # behind token 2
    p = qerl.nucleus((logits / temperature).softmax(-1).flatten(0, 1), top_p)
    p = (p / p.sum(-1, keepdim=True)).view_as(logits)
    p = p.gather(-1, texts[..., None]).flatten(1).prod(1)
    often = p > 1e-3
    expected = 10000 * torch.cat([p[often], p[~often].sum()[None]])
    method = speculative.Neighbour(None)
    for seed in range(2):                              # the second time with texts of the first
        rollout = method.generate(model, [[2]], 3, 10000, temperature=temperature, top_p=top_p,
                                  slots=10000, generator=seeded(seed))
        assert 1.05 < method.measured["tokens_a_pass"] < 2.5
        counts = (rollout.tokens @ torch.tensor([81, 9, 1])).bincount(minlength=729)
        assert (counts[p == 0] == 0).all()
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
    """21 tokens in three passes if all drafts, of seven tokens, are right; if all are wrong, in 21."""
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


def test_without_drafts_it_is_the_plain_sampler(qwen, monkeypatch):
    always(monkeypatch, 0)
    model = with_lora(qwen[0])
    generates = (qerl.generate, speculative.Neighbour(None).generate)
    plain, ours = (generate(model, [[1, 2], [3]], 8, 3, generator=seeded(0)) for generate in generates)
    assert all(torch.equal(a, b) for a, b in zip(vars(plain).values(), vars(ours).values()))


@pytest.mark.parametrize("slots,acceptance,K", [
    (256, 0.6, 0), (128, 0.1, 0), (128, 0.6, 1), (16, 0.6, 3), (16, 0.1, 0), (4, 0.9, 7), (4, 0.1, 1),
])
def test_drafts_are_as_long_as_pays(slots, acceptance, K):
    assert speculative.best_draft(slots, acceptance) == K


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
    """Each step has all ten questions; the second is stopped, and goes on without earlier texts."""
    options = ("--model", quiz, "--data", quiz, *QUICK, "--prompts", 10, "--steps", 3,
               "--save-every", 1, "--skip-eval-before", "--method", "speculative",
               "--out", tmp_path / "out")
    known = []
    generate = speculative.Neighbour.generate

    def stop_in_the_second(self, *args, **options):
        known.append((len(self.texts), self.state["acceptance"]))
        if len(known) == 2:
            raise KeyboardInterrupt
        return generate(self, *args, **options)
    monkeypatch.setattr(speculative.Neighbour, "generate", stop_in_the_second)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *options)
    run_main(monkeypatch, *options, "--resume")
    texts, acceptance = zip(*known)
    assert texts == (0, 10, 0, 10)
    assert acceptance[0] == 0.5 != acceptance[1] == acceptance[2]
    log = [json.loads(line) for line in open(tmp_path / "out" / "metrics.jsonl")]
    assert [m["speculated"] > 0 and m["tokens_a_pass"] > 1 for m in log] == [True] * 3


@runs_kernels
def test_kernel_attention_of_several_tokens_a_slot(monkeypatch):
    """Four rows a slot; of some slots a piece of the cache or a program's part ends between them."""
    torch.manual_seed(0)
    monkeypatch.setattr(qerl, "CACHE_PIECE", 256)
    monkeypatch.setattr(qerl.kernels, "MOST_PARTS", 3)
    cached = torch.tensor([0, 126, 254, 130, 256])
    filled = (cached + torch.arange(4)[:, None]).flatten().to(KERNEL_DEVICE)
    new_tokens = torch.randn(20, 10 * 48), *torch.rand(2, 20, 48)
    kept = torch.randn(2, 5, 2, 300, 48)
    behind = torch.arange(300)[:, None] >= cached[:, None, None, None]

    def attended(kept, dtype):
        pieces = [piece.to(KERNEL_DEVICE, dtype).contiguous() for piece in kept.split(256, 3)]
        addresses = torch.tensor([[piece.data_ptr() for piece in pieces]], device=KERNEL_DEVICE)
        cache = types.SimpleNamespace(pieces=[pieces], filled=filled, max_len=300, addresses=addresses)
        y = qerl.decode_attention(*(t.to(KERNEL_DEVICE, dtype) for t in new_tokens), cache, 0)
        return y.double(), torch.cat(pieces, 3).nan_to_num().double()
    found = attended(kept.masked_fill(behind, math.nan), torch.float32)
    monkeypatch.setattr(qerl, "use_kernels", lambda x: False)
    expected = attended(kept.masked_fill(behind, 0), torch.float64)
    assert all(relative(a, b) < 1e-5 for a, b in zip(found, expected))


@gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_gpu_rollouts_with_drafts_are_the_policys(tmp_path, top_p):
    """By a CUDA graph and the kernels."""
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda")
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    method = speculative.Neighbour(None)
    for _ in range(2):
        rollout = method.generate(model, prompts, 40, 1, top_p=top_p, slots=32)
    assert method.measured["tokens_a_pass"] > 1
    with torch.no_grad():
        logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].mean() < 0.03
