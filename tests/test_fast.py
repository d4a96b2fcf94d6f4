"""harness/fast.py computes what qerl.py computes; and how it does so faster."""
import weakref
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

import qerl
from harness import fast
from test_qerl import NEAR, PROMPTS, TOKENS, gradient_of, relative, seeded, with_lora

MANY = [[i, 3, 2 * i + 1] * (1 + i % 5) for i in range(33)]            # prompts


@pytest.mark.parametrize("weights", qerl.FORMATS)
def test_plain_and_fast_compute_the_same(family, weights):
    """With LoRA, noise, biases, tied embeddings: tokens, log-probabilities, gradients; greedily, too."""
    prompts = MANY[:15]
    repeated = [prompt for prompt in prompts for _ in range(2)]
    found = []
    for engine in (qerl, fast):
        model = with_lora(family[0], engine, weights=weights, train_norms=True, lora_alpha=6)
        with qerl.adaptive_quantization_noise(model, 0.02, seeded(2)):
            # Thirty completions and as many slots: both draw the same random numbers.
            drawn = engine.generate(model, prompts, 16, 2, 0.7, 0.9, range(20), generator=seeded(1))
            greedy = engine.generate(model, prompts, 16, temperature=0, eos=range(120), slots=4)
        length = drawn.length.clone()
        length[[4, -2, -1]] = 0                        # completions may be empty, also the last ones
        logprobs = engine.token_logprobs(model, repeated, drawn.tokens, length, 0.7)
        gradient = gradient_of(model, (logprobs * logprobs.detach().sin()).sum())
        found.append(([vars(drawn), vars(greedy), logprobs.detach()], gradient))
    (plain, plain_gradient), (quick, quick_gradient) = found
    assert_close(quick, plain, rtol=0, atol=2e-5)
    assert relative(quick_gradient, plain_gradient) < 2e-5


# --------------------------------------------------------------------------------------------------
# Layers, sampler, log-probabilities

@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_give_the_same_gradient(model, monkeypatch, recompute):
    """Each weight is decoded once forward and once backward, and none is kept between the two."""
    expected = gradient_of(model, model(TOKENS).square().mean())
    if recompute:
        model.recompute_in_backward()
    decoded = []
    dequantize = qerl.PackedWeight.dequantize

    def recorded(packed, dtype):
        weight = dequantize(packed, dtype)
        decoded.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(qerl.PackedWeight, "dequantize", recorded)
    loss = model(TOKENS).square().mean()
    layers = len(model.quantized_layers())
    assert [weight() for weight in decoded] == [None] * layers
    assert gradient_of(model, loss).equal(expected)
    assert len(decoded) == 2 * layers


def test_a_kept_sampler_samples_anew(model):
    """Other prompts, noise and LoRA than in the rollout before, which ended with fewer slots.

    Once half of 33 slots are idle and no prompt waits, 16 go on. What recorded graphs read keeps its
    address; a longer prompt asks for another cache.
    """
    model.keep_sampler = True
    options = dict(temperature=0, eos=range(120))
    samplers = []
    for step, longest in ((1, 30), (2, 20), (3, 40)):
        asked = MANY[step:] + [[9] * longest] * step
        with qerl.adaptive_quantization_noise(model, 0.1, seeded(step)):
            expected = qerl.generate(model, asked, 24, **options)
            found = fast.generate(model, asked, 24, **options)
        assert_close(vars(found), vars(expected), **NEAR)
        assert len(model.sampler.completion) == 16
        samplers.append((model.sampler, model.sampler.read))
        for p in qerl.trainable(model).values():
            p.data *= 1.5
    assert samplers[0] == samplers[1]
    assert samplers[2][0] is not samplers[0][0]


def test_packing_holds_each_prompt_once():
    """The line "p q r a, b c" of two completions, and "s d" of the prompt s, which has one."""
    packing = fast.pack([[1, 2, 3], [1, 2, 3], [4]], [1, 2, 1], torch.device("cpu"))
    assert packing.sizes == [3, 1, 1, 2, 1]            # p q r, s, a, b c, d


def test_output_layer_runs_in_chunks(model):
    """Logits of more than `chunk` tokens never exist, and each is computed once."""
    length = torch.tensor([30, 9])
    with mock.patch.object(fast, "token_logprob", wraps=fast.token_logprob) as spy:
        gradient_of(model, fast.token_logprobs(model, PROMPTS[:2], TOKENS, length, chunk=8).sum())
    rows = [len(call.args[0]) for call in spy.call_args_list]
    assert max(rows) == 8
    assert sum(rows) == length.sum()
