"""The neighbouring methods."""
import copy
import importlib
import json
import math
import random
import re
import types
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import methods
import qerl
import train_gsm8k
from common import QUICK, batch_with_log_ratios, have_capability, neighbour, refused
from common import run_main, sample_step, scored_by_letters, without_times
from harness import keeper
from harness.batches import Batch
from harness.checkpoint import read_checkpoint
from harness.full_weights import train_all_weights
from harness.mismatch import describe_mismatch
from harness.run_folder import read_jsonl
from harness.small_policy import ByteText
from methods import deep_grpo, maspo, qurl, rollout_correction
from methods.parts import branches, eight_bit
from test_qerl import PROMPTS, WEIGHTS, compressed_tensors_nvfp4, gpu, make_folder, relative
from test_qerl import stacked_layer, trl_trainer, with_lora


def mismatched_batch(seed=0, spread=0.5):
    """A batch of 4 completions of up to 9 tokens, sampled by a policy whose log-probabilities are `spread` off."""
    torch.manual_seed(seed)
    length = torch.tensor([9, 4, 7, 1])
    mask = qerl.length_mask(length, 9)
    old = -torch.rand(4, 9) * mask
    rollout = (old - spread * torch.randn(4, 9)) * mask
    return Batch([[5, 6, 7, 8]] * 4, torch.randint(20, 250, (4, 9)) * mask, length, rollout, torch.tensor([1.0, -0.5, 2.0, -2.5]),
                 mask, old, weights=qerl.token_weights(mask))


@pytest.mark.parametrize("variant,trl", [
    ("token-tis", dict(mode="token_truncate", clip_max=2.0)), ("sequence-tis", dict(mode="sequence_truncate", clip_max=2.0)),
    ("sequence-mis", dict(mode="sequence_mask", clip_min=0.5, clip_max=2.0)), ("icepop", dict(mode="token_mask", clip_min=0.5, clip_max=5.0))])
def test_rollout_correction_weights_and_gradient_equal_trl(qwen, tmp_path, variant, trl):
    """TRL computes the weights of the same log-probabilities, and then the loss; its vLLM is replaced by our tensors."""
    trainer = trl_trainer(qwen[0], tmp_path, loss_type="grpo", **{f"vllm_importance_sampling_{k}": v for k, v in trl.items()})
    trainer.use_vllm = True
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    model = qerl.load_model(qwen[0], weights="bf16", lora_rank=2, train_norms=True)
    masked = 0
    for seed in range(4):
        batch = mismatched_batch(seed)
        logprobs = qerl.token_logprobs(model, batch.prompts, batch.tokens, batch.length)
        batch.old_logprobs = (logprobs.detach() + 0.1 * torch.randn(4, 9)) * batch.mask
        batch.rollout_logprobs = (batch.old_logprobs - 0.6 * torch.randn(4, 9)) * batch.mask
        rows = [row[:n] for row, n in zip(batch.tokens.tolist(), batch.length)]
        sampled = [row[:n].tolist() for row, n in zip(batch.rollout_logprobs, batch.length)]
        trainer._generate = lambda prompts: (batch.prompts, rows, None, ["a"] * 4, sampled, {}, None, None)
        score = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (batch.old_logprobs, None, None)
        theirs = trainer._generate_and_score_completions([{"prompt": "a"}] * 4)
        trainer._get_per_token_logps_and_entropies = score
        log_ratio = batch.old_logprobs - batch.rollout_logprobs
        weight = rollout_correction.correction(log_ratio, batch.mask, variant)
        torch.testing.assert_close(weight, theirs["importance_sampling_ratio"] * batch.mask, rtol=1e-5, atol=1e-6)
        masked += int((weight == 0)[batch.mask].sum())
        theirs["advantages"] = batch.advantages
        method = neighbour(f"rollout_correction:{variant}")
        loss, _ = method.loss(logprobs, batch)
        their_loss = trainer._compute_loss(trainer.model, theirs)
        assert loss.item() == pytest.approx(their_loss.item(), rel=1e-4)
        model.zero_grad()
        trainer.model.zero_grad()
        loss.backward()
        their_loss.backward()
        for norm in (m for m in model.modules() if isinstance(m, qerl.RMSNorm)):
            torch.testing.assert_close(norm.weight.grad, trainer.model.get_parameter(f"{norm.name}.weight").grad, rtol=1e-3, atol=1e-5)
    assert (masked > 0) == (variant in ("sequence-mis", "icepop"))


def test_rollout_correction_masks_by_hand():
    """Completions whose ratios are 1.0005 everywhere, 2 and 1/2 in turn, and 1 but for one token."""
    ratio = torch.tensor([[1.0005] * 4, [2, 0.5, 2, 0.5], [1, 1, 6, 1], [1.1, 1.1, 1, 1]])
    mask = torch.tensor([[True] * 4, [True] * 4, [True] * 4, [True, True, False, False]])
    nan = torch.full_like(ratio, math.nan)
    log_ratio = torch.where(mask, ratio.log(), nan)                                     # what stands at padding must not matter
    weight = {kind: rollout_correction.correction(log_ratio, mask, kind, 2.0) for kind in rollout_correction.KEPT}
    assert weight["geometric"].tolist() == [[1] * 4, [1] * 4, [0] * 4, [0] * 4]          # the second's mean log is exactly 0
    k3 = [(r - 1 - math.log(r)) for r in (1.0005, 2, 0.5, 6, 1.1)]
    assert k3[0] < 0.01 < (k3[1] + k3[2]) / 2 and k3[3] / 4 > 0.01 > k3[4]
    assert weight["k3"].tolist() == [[1] * 4, [0] * 4, [0] * 4, [1, 1, 0, 0]]
    assert weight["icepop"][2].tolist() == [1, 1, 0, 1] and weight["token-tis"][2].tolist() == [1, 1, 2, 1]
    assert weight["sequence-mis"][2].tolist() == [0] * 4 and weight["sequence-tis"][2].tolist() == [2] * 4
    torch.testing.assert_close(weight["sequence-mis"][3], torch.tensor([1.21, 1.21, 0, 0]))
    far = rollout_correction.correction(torch.full((1, 3), 200.0), torch.ones(1, 3, dtype=torch.bool), "icepop")
    assert far.tolist() == [[0, 0, 0]]                                                   # not infinity times 0


def test_rollout_correction_without_an_old_policy():
    """bypass: the clipped ratio to the rollout; pg: the gradient of w log π A, with w a constant."""
    batch = mismatched_batch(spread=0.1)
    logprobs = (batch.old_logprobs + 0.3 * torch.randn(4, 9)).requires_grad_()
    batch.old_logprobs = torch.full((4, 9), math.nan)                                    # nobody computes it
    for variant in ("bypass", "pg-token-tis", "pg-icepop"):
        method = neighbour(f"rollout_correction:{variant}")
        batch.old_logprobs = method.old_logprobs(None, batch)
        gradient = torch.autograd.grad(method.loss(logprobs, batch)[0], logprobs)[0]
        z = logprobs.detach().requires_grad_()
        ratio = (z - batch.rollout_logprobs).exp()
        A = batch.advantages[:, None]
        if variant == "bypass":
            gain = torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A)
        else:
            w = ratio.clamp(max=2) if variant == "pg-token-tis" else ratio * ((ratio >= 0.5) & (ratio <= 5))
            gain = w.detach() * z * A
        expected = -(gain.sum(1) / batch.length / 4 * (batch.length > 0)).sum()          # at padding the ratio is 1 or w is 0
        expected = torch.autograd.grad(expected, z)[0] * batch.mask
        torch.testing.assert_close(gradient, expected)
        seen = method.after_updates()
        assert seen["mismatch_kl"] == pytest.approx((ratio - 1 - ratio.log())[batch.mask].mean().item(), rel=1e-4)


def test_normalised_weights_have_mean_1_over_the_step():
    batch = mismatched_batch(spread=1.0)
    method, plain = neighbour("rollout_correction:normalised-token-tis"), neighbour("rollout_correction:token-tis")
    for m in (method, plain):
        m.before_updates(batch)
        for piece in batch.micro_batches(8):                                                    # one row each, weighted alike
            m.loss(batch.old_logprobs[:1], piece)
    weights = [torch.cat([w[mask] for _, mask, w in m.seen]) for m in (method, plain)]
    assert len(method.seen) == 4
    torch.testing.assert_close(weights[0], weights[1] / weights[1].mean())
    assert method.after_updates()["importance_mean"] == pytest.approx(1) and abs(plain.after_updates()["importance_mean"] - 1) > 0.1


def test_mismatch_by_hand():
    """Two completions with the ratios (2, 1/2) and (3): their products are 1 and 3."""
    ratio = torch.tensor([[2, 0.5], [3, 1]])
    mask = torch.tensor([[True, True], [True, False]])
    old = torch.where(mask, ratio.log() - 1, 5.0)
    found = describe_mismatch(old, torch.full((2, 2), -1.0), mask)
    expected = {"mismatch_kl": (5.5 - 3 - math.log(3)) / 3, "mismatch_max_ratio": 3, "mismatch_k1": -math.log(3) / 3,
                "mismatch_chi2": (4 + 0.25 + 9) / 3 - 1, "effective_tokens": 5.5 ** 2 / (3 * 13.25), "effective_completions": 4 ** 2 / (2 * 10)}
    assert found == pytest.approx(expected, rel=1e-5)


def test_rollout_correction_trains_and_resumes(qwen, data, tmp_path, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--stages", 3, "--sigma-start", 0.3, "--sigma-end", 0.3,
               "--eval-questions", 1, "--skip-eval-before")
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))     # differs within a group
    logs = {}
    for variant in ("sequence-mis", "pg-icepop", "bypass"):
        method = ("--method", f"rollout_correction:{variant}")
        run_main(monkeypatch, *options, *method, "--out", tmp_path / variant)
        logs[variant] = without_times(tmp_path / variant / "metrics.jsonl")
    masked = [m["masked_fraction"] for m in logs["sequence-mis"]]
    assert masked[0] == 0 and any(0 < fraction <= 1 for fraction in masked)              # the first stage has no noise
    assert any(m["masked_fraction"] > 0 for m in logs["pg-icepop"][1:]) and all(m["masked_fraction"] == 0 for m in logs["bypass"])
    for log in logs.values():
        assert abs(log[0]["mismatch_kl"]) < 1e-6 and log[0]["effective_completions"] > 0.999
        assert all(m["mismatch_kl"] > 1e-3 and m["effective_tokens"] < 1 for m in log[1:])
    cut = (*options, "--method", "rollout_correction:sequence-mis", "--out", tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(keeper.Keeper, "log", lambda self, logged: None if logged["step"] < 3 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_main(patch, *cut)
    run_main(monkeypatch, *cut, "--resume")
    file = "adapter/adapter_model.safetensors"
    assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "sequence-mis" / file).read_bytes()
    assert "leave out --tis" in refused(monkeypatch, capsys, *options, "--method", "rollout_correction:bypass", "--tis", 2, "--out", tmp_path / "a")
    assert "no cap" in refused(monkeypatch, capsys, *options, "--method", "rollout_correction:icepop", "--tis", 2, "--out", tmp_path / "b")


def compressed_tensors_scheme(format):
    """The library's 8-bit scheme with a scale per output channel and per token, and its compressor."""
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, IntQuantizationCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    name, compressor = {"int8": ("INT8", IntQuantizationCompressor), "fp8": ("FP8_DYNAMIC", FloatQuantizationCompressor)}[format]
    return preset_name_to_scheme(name, ["Linear"]), compressor


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_eight_bit_bytes_equal_compressed_tensors(kind, format):
    """At our scale. For FP8 that is the library's own; for INT8 it has amax / 127.5, we FlashRL's amax / 127."""
    from compressed_tensors.quantization.utils import calculate_qparams
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    codes, scale = eight_bit.quantize_rows(weight, format)
    scheme, compressor = compressed_tensors_scheme(format)
    state = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert codes.dtype == state["weight"].dtype and torch.equal(codes.view(torch.uint8), state["weight"].view(torch.uint8))
    torch.testing.assert_close(codes.float() * scale, compressor.decompress(state, scheme)["weight"])
    theirs, _ = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme.weights)
    full = scale > 1e-29                                                                 # an empty or tiny row has any scale
    torch.testing.assert_close(scale[full] * (127 / 127.5 if format == "int8" else 1), theirs[full], rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_eight_bit_product_equals_the_librarys_operands(format):
    """Stacked layers with bias: F.linear of what compressed-tensors makes of input (a scale per token) and weight."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    torch.manual_seed(0)
    layer = stacked_layer("bf16", [torch.randn(48, 128), torch.randn(16, 128)], torch.randn(64), lora_rank=4, lora_alpha=8)
    layer.lora_B.data.normal_()
    x, residual = torch.randn(3, 5, 128) * torch.rand(3, 5, 1), torch.randn(15, 64)
    quantised = eight_bit.EightBitLinear(layer, format)
    merged = eight_bit.current_weight(layer)
    torch.testing.assert_close(F.linear(x, merged, layer.bias), layer(x), rtol=1e-4, atol=1e-4)
    scheme, _ = compressed_tensors_scheme(format)
    rows, none = x.flatten(0, 1), torch.zeros(1)
    w = fake_quantize(merged, eight_bit.quantize_rows(merged, format)[1], none, scheme.weights)
    z = fake_quantize(rows, eight_bit.quantize_rows(rows, format)[1], none, scheme.input_activations)
    expected = F.linear(z, w, layer.bias)
    torch.testing.assert_close(quantised(x).flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(quantised.decode(rows, residual), expected + residual, rtol=1e-4, atol=1e-4)
    error = relative(expected, layer(x).flatten(0, 1))
    assert 1e-3 < error < (0.02 if format == "int8" else 0.06)


def test_int8_product_is_exact():
    """Sums of up to 127 * 127 * 8192, beyond float32's integers, equal PyTorch's int8 x int8 -> int32."""
    torch.manual_seed(0)
    x, w = (torch.randint(-127, 128, (n, 8192)).to(torch.int8) for n in (3, 16))
    x[0], w[0] = 127, 127
    ours = eight_bit.multiply_codes(x, torch.ones(3, 1), w, torch.ones(16, 1))
    assert torch.equal(ours, torch._int_mm(x, w.T).float()) and ours.max() == 127 * 127 * 8192
    x_scale, w_scale = torch.rand(3, 1), torch.rand(16, 1)
    torch.testing.assert_close(eight_bit.multiply_codes(x, x_scale, w, w_scale), ours * x_scale * w_scale.T)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_eight_bit_rollout_is_one_policy_and_leaves_the_model_as_it_was(qwen, format):
    """Prompts and decoding have the same 8-bit products: the rollout's log-probabilities are those of the whole text."""
    model = with_lora(qwen[0], weights="bf16")
    before = {name: p.clone() for name, p in model.named_parameters()}
    prompts = [p for p in PROMPTS for _ in range(2)]
    with eight_bit.eight_bit(model, format):
        rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            same = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    with torch.no_grad():
        trained = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    assert describe_mismatch(same, rollout.logprobs, rollout.mask)["mismatch_kl"] < 1e-5    # a sum's order can tip a rounding
    assert describe_mismatch(trained, rollout.logprobs, rollout.mask)["mismatch_kl"] > 1e-5
    assert list(before) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert len(model.quantized_layers()) == 8


@pytest.mark.parametrize("options", [("flashrl:int8",), ("flashrl:fp8",), ("flashrl:int8", "--lora-rank", 0, "--beta", 0)])
def test_flashrl_quantises_the_current_policy_before_each_rollout(qwen, data, tmp_path, monkeypatch, options):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--eval-questions", 1, "--skip-eval-before", "--method", *options)
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))     # differs within a group
    rollouts, generate = [], qerl.generate

    def spy(model, *args, **kwargs):
        layer = model.blocks[0].mlp.down
        if isinstance(layer, eight_bit.EightBitLinear):
            rollouts.append(layer.codes.clone())
        return generate(model, *args, **kwargs)

    monkeypatch.setattr(qerl, "generate", spy)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert len(rollouts) == 3 and not torch.equal(rollouts[0].view(torch.uint8), rollouts[2].view(torch.uint8))
    log = without_times(tmp_path / "whole" / "metrics.jsonl")
    assert all(m["mismatch_kl"] > 1e-6 and m["sigma"] == 0 for m in log)
    settings = json.loads((tmp_path / "whole" / "summary.json").read_text())["settings"]
    assert (settings["tis"], settings["weights"], settings["sigma_start"]) == (2, "bf16", 0)
    with monkeypatch.context() as patch:
        patch.setattr(keeper.Keeper, "log", lambda self, logged: None if logged["step"] < 3 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_main(patch, *options, "--out", tmp_path / "cut")
    run_main(monkeypatch, *options, "--out", tmp_path / "cut", "--resume")
    whole, cut = (read_checkpoint(str(tmp_path / name), {}, must_agree=["no such setting"])[1] for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)


def test_flashrl_refuses_what_makes_no_sense(qwen, data, tmp_path, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--method", "flashrl")
    assert "use --weights bf16" in refused(monkeypatch, capsys, *options, "--weights", "nvfp4", "--out", tmp_path / "a")
    have_capability(monkeypatch, 8, 0)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(qerl.UserError, match="--method flashrl:int8"):
        neighbour("flashrl:fp8", device="cuda")
    assert neighbour("flashrl:int8", device="cuda").variant == "int8"
    have_capability(monkeypatch, 8, 9)
    assert neighbour("flashrl:fp8", device="cuda").variant == "fp8"


def test_adaptive_clipping_is_the_clipping_of_the_whole_weight():
    """Written in the untruncated ratio ρ and in r R, whose bound stays 1 + ε; below, the bound is that of TIS."""
    batch = mismatched_batch(spread=1.0)
    logprobs = (batch.old_logprobs + 0.5 * torch.randn(4, 9)).requires_grad_()
    method = neighbour("qurl:acr")
    loss, _ = method.loss(logprobs, batch)
    z = logprobs.detach().requires_grad_()
    rho, R = (batch.old_logprobs - batch.rollout_logprobs).exp(), (z - batch.old_logprobs).exp()
    r, A = torch.minimum(torch.ones(()), 2 / rho), batch.advantages[:, None]
    upper, lower = rho * torch.minimum(r * R, torch.tensor(1.28)) * A, rho * r * torch.maximum(R, torch.tensor(0.8)) * A
    expected = -(torch.where(A > 0, upper, lower) * batch.weights).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    ours, theirs = torch.autograd.grad(loss, logprobs)[0], torch.autograd.grad(expected, z)[0]
    torch.testing.assert_close(ours, theirs)
    capped = (rho > 2) & batch.mask
    assert method.before_updates(batch)["capped_fraction"] == pytest.approx((capped.sum() / batch.mask.sum()).item()) and capped.any()
    tis, _ = methods.find("qerl", method.settings).loss(logprobs, batch)
    differs = torch.autograd.grad(tis, logprobs)[0] != ours
    assert differs.any() and not (differs & ~capped).any()


def test_update_aware_scaling_keeps_the_policy_its_codes_and_its_error(qwen):
    """A step of one size in the weights is 1.5 of them in the codes; compressed-tensors' NVFP4 bytes do not change."""
    torch.manual_seed(0)
    model = qerl.load_model(qwen[0], "bf16")
    train_all_weights(model)
    scaled = copy.deepcopy(model)
    qurl.scale_for_updates(scaled, 1.5)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(scaled(tokens), model(tokens), rtol=1e-4, atol=1e-4)
        for norm, other in ((m, n) for m, n in zip(model.modules(), scaled.modules()) if isinstance(m, qerl.RMSNorm)):
            assert torch.allclose(other.weight, norm.weight * (1 if norm.name == "model.norm" else 1.5))
        moved = []
        for layers in zip(model.quantized_layers(), scaled.quantized_layers()):
            masters = [layer.master for layer in layers]
            before = [eight_bit.quantize_rows(master, "int8")[0] for master in masters]
            assert (before[0] != before[1]).float().mean() < 1e-4                        # a tie may tip
            for master in masters:
                master += 2e-4 * torch.sign(torch.sin(torch.arange(master.numel()))).view_as(master)
            moved.append([(eight_bit.quantize_rows(m, "int8")[0] != c).float().mean().item() for m, c in zip(masters, before)])
        for layer, (plain, by_uaq) in zip(model.quantized_layers(), moved):
            reads_a_norm = len(layer.names) > 1
            assert by_uaq / plain == pytest.approx(1.5 if reads_a_norm else 1, rel=0.1)
    weight = torch.randn(512, 1024)
    (theirs, _), (theirs_scaled, _) = compressed_tensors_nvfp4(weight), compressed_tensors_nvfp4(weight / 1.5)
    for name in ("weight_packed", "weight_scale"):
        assert torch.equal(theirs[name].view(torch.uint8), theirs_scaled[name].view(torch.uint8))


def test_qurl_trains_and_resumes(qwen, data, tmp_path, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--stages", 3, "--eval-questions", 1, "--skip-eval-before", "--beta", 0)
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))     # differs within a group
    full, noisy = ("--method", "qurl", "--lora-rank", 0), ("--method", "qurl:acr", "--tis", 1.05, "--sigma-start", 0.2, "--sigma-end", 0.2)
    tensors, logs = {}, {}
    for name, method in (("full", full), ("noisy", noisy)):
        run_main(monkeypatch, *options, *method, "--out", tmp_path / name)
        logs[name] = without_times(tmp_path / name / "metrics.jsonl")
        with monkeypatch.context() as patch:
            patch.setattr(keeper.Keeper, "log", lambda self, logged: None if logged["step"] < 3 else 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run_main(patch, *options, *method, "--out", tmp_path / "cut" / name)
        run_main(monkeypatch, *options, *method, "--out", tmp_path / "cut" / name, "--resume")
        tensors[name], cut = (read_checkpoint(str(folder / name), {}, must_agree=["no such setting"])[1] for folder in (tmp_path, tmp_path / "cut"))
        assert cut.keys() == tensors[name].keys() and all(torch.equal(cut[k], t) for k, t in tensors[name].items())
    assert all(m["mismatch_kl"] > 1e-6 and m["sigma"] == 0 for m in logs["full"])        # 8 bits sampled, without noise
    start = dict(qerl.load_model(qwen[0], "bf16").named_parameters())["blocks.0.mlp_norm.weight"]
    assert relative(tensors["full"]["model.blocks.0.mlp_norm.weight"], 1.5 * start) < 0.02
    assert [m["capped_fraction"] > 0 for m in logs["noisy"]] == [False, True, True]      # the first stage has no noise
    assert json.loads((tmp_path / "noisy" / "summary.json").read_text())["settings"]["weights"] == "nvfp4"
    for method, message in ((("qurl", "--weights", "nvfp4"), "frozen nvfp4 weights"), (("qurl",), "acr-int8"),
                            (("qurl:acr-fp8", "--weights", "nf4"), "use --weights bf16"), (("qurl:acr", "--tis", 0), "use --tis 2")):
        assert message in refused(monkeypatch, capsys, *options, "--method", *method, "--out", tmp_path / "a")


@gpu
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_gpu_eight_bit_products_equal_the_cpus(tmp_path, format):
    """The tensor cores' products, of one row and of many, and a rollout recorded as a CUDA graph."""
    torch.manual_seed(0)
    weight, scale = eight_bit.quantize_rows(torch.randn(96, 256), format)
    for n in (1, 17, 300):
        x, x_scale = eight_bit.quantize_rows(torch.randn(n, 256), format)
        ours = eight_bit.multiply_codes(x.cuda(), x_scale.cuda(), weight.cuda(), scale.cuda()).cpu().float()
        assert relative(ours, eight_bit.multiply_codes(x, x_scale, weight, scale)) < (1e-6 if format == "int8" else 5e-3)
    model = with_lora(make_folder(tmp_path, "wide")[0], weights="bf16", device="cuda")
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    with eight_bit.eight_bit(model, format):
        rollout = qerl.generate(model, prompts, 40, 2, slots=70)
        with torch.no_grad():
            logprobs = qerl.token_logprobs(model, [p for p in prompts for _ in range(2)], rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].mean() < 0.05               # what bfloat16 adds otherwise FP8 rounds otherwise


def small_neighbour(name, settings=(), **state):
    """The Method of --method NAME with the small preset's settings and these."""
    method = methods.find(name, train_gsm8k.arguments(["--device", "cpu", "--micro-tokens", "16384", "--method", name, *map(str, settings)]))
    method.state.update(state)
    return method


def steered(method, model, scheduled, log_ratios):
    """The sigma that a step had, whose completions had these log ratios."""
    with method.noise(model, scheduled, torch.Generator()):
        pass
    return method.before_updates(batch_with_log_ratios(log_ratios))["sigma"]


def test_noise_control_holds_a_divergence(qwen):
    """The noise of a made-up policy has the divergence 100 sigma^2 on top of a rounding of 1e-3: the loop must find both."""
    model = qerl.load_model(qwen[0])
    method = small_neighbour("noise_control:divergence")

    def divergent(sigma):                            # half of the tokens at +x, half at -x: mean(e^l - 1 - l) = cosh(x) - 1
        x = math.acosh(1 + 1e-3 + 100 * sigma ** 2)
        return [[x, -x]]
    assert steered(method, model, 0.0, divergent(0)) == 0                                # without noise: only K_0 is measured
    assert method.state["sigma"] == 0.01 and method.state["rounding"] == pytest.approx(1e-3, rel=1e-3)
    sigmas = [steered(method, model, 0.01, divergent(method.state["sigma"])) for _ in range(30)]
    assert sigmas[0] == 0.01 and sigmas[1] == pytest.approx(0.008)                       # down by 0.8 at most
    assert 100 * sigmas[-1] ** 2 == pytest.approx(3e-3, rel=1e-2)
    fallen = [steered(method, model, 0.005, divergent(method.state["sigma"])) for _ in range(30)]
    assert 100 * fallen[-1] ** 2 == pytest.approx(3e-3 / 4, rel=1e-2)                     # half of Eq. 8's sigma: a quarter
    up = small_neighbour("noise_control:divergence")
    assert [steered(up, model, 0.01, [[0.0, 0.0]]) for _ in range(2)] == [0.01, 0.0125]  # up by 1.25 at most
    for _ in range(40):
        steered(up, model, 0.01, [[0.0, 0.0]])
    assert up.state["sigma"] == 0.2


def test_noise_control_counts_tokens_that_give_no_gradient():
    method = small_neighbour("noise_control:divergence")
    method.scheduled, method.sigma = 0.01, 0.01
    batch = batch_with_log_ratios([[0.1, -0.1]])
    expected = method.before_updates(batch), method.state["divergence"]
    method.state["divergence"] = None
    batch.mask[:] = False                               # DAPO, and all completions were cut off
    assert (method.before_updates(batch), method.state["divergence"]) == expected and expected[1] > 0


def test_noise_control_by_plappert_and_by_entropy(qwen):
    model = qerl.load_model(qwen[0])
    method = small_neighbour("noise_control:plappert")
    assert steered(method, model, 0.01, [[-0.002, -0.004]]) == 0.01                      # mean(-l) = 0.003 is near enough
    assert steered(method, model, 0.01, [[-0.002, -0.0041]]) == pytest.approx(0.0101)
    assert method.state["sigma"] == pytest.approx(0.01)
    method = small_neighbour("noise_control:entropy", sigma=0.05)
    for nats, sigma in ((0.19, 0.054), (0.21, 0.05)):                                 # steps of a 50th of 0.2
        with method.noise(model, 0.01, torch.Generator()):
            method.entropy = nats
        method.before_updates(batch_with_log_ratios([[0.0]]))
        assert method.state["sigma"] == pytest.approx(sigma)


@pytest.mark.parametrize("variant,noisy", [
    ("noise_control:divergence", ["0.input", "0.post", "1.input", "1.post", "norm"]), ("attention", ["0.input", "1.input"]),
    ("mlp", ["0.post", "1.post"]), ("first", ["0.input", "0.post"]), ("last", ["1.input", "1.post"]),
])
def test_noise_control_where_the_noise_goes(qwen, variant, noisy):
    """In those norms it is QeRL's own draw, in the others there is none."""
    model = qerl.load_model(qwen[0])
    norms = {m.name.removeprefix("model.layers.").removeprefix("model.").removesuffix("_layernorm").replace("post_attention", "post"): m
             for m in model.modules() if isinstance(m, qerl.RMSNorm)}
    with qerl.adaptive_quantization_noise(model, 0.01, torch.Generator().manual_seed(3)):
        expected = {name: norm.noisy_weight for name, norm in norms.items()}
    with small_neighbour(variant if ":" in variant else f"shaped_noise:{variant}").noise(model, 0.01, torch.Generator().manual_seed(3)):
        assert sorted(name for name, norm in norms.items() if norm.noisy_weight is not None) == noisy
        assert all(torch.equal(norms[name].noisy_weight, expected[name]) for name in noisy)
    assert all(norm.noisy_weight is None for norm in norms.values())


@pytest.mark.parametrize("variant,kurtosis,cdf", [
    ("uniform", 1.8, lambda z: np.clip(z / math.sqrt(12) + 0.5, 0, 1)),
    ("laplace", 6.0, lambda z: np.where(z < 0, 0.5 * np.exp(math.sqrt(2) * z), 1 - 0.5 * np.exp(-math.sqrt(2) * z))),
])
def test_noise_control_distributions(qwen, variant, kurtosis, cdf):
    """Mean, variance and fourth moment of the noise, and Kolmogorov and Smirnov's distance from the distribution's formula."""
    model, rng = qerl.load_model(qwen[0]), torch.Generator().manual_seed(0)
    method, drawn = small_neighbour(f"shaped_noise:{variant}"), []
    for _ in range(100):
        with method.noise(model, 0.01, rng):
            drawn += [(m.noisy_weight - m.weight.detach()) / 0.01 for m in model.modules() if isinstance(m, qerl.RMSNorm)]
    z = np.sort(torch.cat(drawn).double().numpy())
    assert abs(z.mean()) < 0.02 and abs(z.var() - 1) < 0.04 and abs((z ** 4).mean() / kurtosis - 1) < 0.1
    steps = np.arange(len(z) + 1) / len(z)
    distance = max(np.abs(cdf(z) - steps[1:]).max(), np.abs(cdf(z) - steps[:-1]).max())
    assert distance < 1.95 / math.sqrt(len(z))                                           # the 0.1 % point


def test_noise_control_pools_draws_within_each_group(qwen):
    """Completion g of each prompt was sampled under draw g // 2: under that noise, scored anew, it has the same log-probabilities."""
    model = with_lora(qwen[0])
    prompts, sampling, noise = [[5, 6, 7], [8, 9]], torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    method = small_neighbour("pooled_noise")
    with method.noise(model, 0.3, noise):
        rollout = method.generate(model, prompts, 6, 8, eos={300}, slots=256, generator=sampling)
    repeated, agrees = [p for p in prompts for _ in range(8)], []
    noise.manual_seed(2)
    for _ in range(4):
        with qerl.adaptive_quantization_noise(model, 0.3, noise):
            scored = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
        agrees.append((scored - rollout.logprobs).abs().amax(1) < 1e-4)
    assert torch.stack(agrees).int().tolist() == [([0] * 2 * j + [1, 1] + [0] * (6 - 2 * j)) * 2 for j in range(4)]


def test_noise_control_drops_completions_far_from_the_policy():
    """Sequence-MIS by hand: products 1.5, 4, 1/4 and 2 count 1.5, 0, 0 and 2 times, in the loss as in its gradient."""
    method = small_neighbour("pooled_noise")
    ratios = torch.tensor([1.5, 4.0, 0.25, 2.0 - 1e-6])
    batch = batch_with_log_ratios((ratios.log()[:, None] * torch.tensor([[0.75, 0.25]])).tolist(), [1.0, 1.0, -1.0, -2.0])
    batch.weights = torch.full((4, 2), 1 / 8)
    logprobs = batch.old_logprobs.clone().requires_grad_()
    loss, kl = method.loss(logprobs, batch)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.5 - 2 * 2) / 4, abs=1e-5) and kl == 0
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.5, 0, 0, 4]).repeat(2, 1).T / 8)
    with method.noise(None, 0.01, None):
        assert method.before_updates(batch)["kept_fraction"] == 0.5


def resumes_bit_for_bit(monkeypatch, tmp_path, options):
    """Train, whole and stopped in the fourth step, resumed from the second; returns the metrics, once they are equal."""
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch:
        def stop(model, prompt, count=iter(range(3, -1, -1))):
            if next(count) == 0:
                raise qerl.UserError("stopped")
        patch.setattr(train_gsm8k, "require_finite_policy", stop)
        with pytest.raises(SystemExit):
            run_main(patch, *options, "--out", tmp_path / "stopped")
    assert read_checkpoint(str(tmp_path / "stopped"), {}, must_agree=["none"])[0]["step"] == 2
    run_main(monkeypatch, *options, "--out", tmp_path / "stopped", "--resume")
    whole, stopped = (without_times(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped"))
    assert len(whole) == 5 and whole == stopped
    states = [read_checkpoint(str(tmp_path / name), {}, must_agree=["none"]) for name in ("whole", "stopped")]
    assert states[0][0]["method"] == states[1][0]["method"]
    assert all(torch.equal(tensor, states[1][1][name]) for name, tensor in states[0][1].items())
    return whole


@pytest.mark.parametrize("name", ["noise_control:divergence", "noise_control:entropy", "pooled_noise", "shaped_noise:mlp"])
def test_noise_control_trains(qwen, data, tmp_path, monkeypatch, name):
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--method", name, "--group", 4,
               "--skip-eval-before", "--eval-questions", 1)
    metrics = resumes_bit_for_bit(monkeypatch, tmp_path, options)
    sigmas = [m["sigma"] for m in metrics]
    scheduled = [qerl.noise_sigma(step, 5) for step in range(5)]
    assert sigmas[0] == 0 and all(m["gradient_norm"] > 0 for m in metrics)
    if name.startswith("noise_control"):            # random weights: little divergence, much entropy
        factor = 1.25 if name.endswith("divergence") else 0.6
        assert sigmas[1:3] == pytest.approx([0.01, 0.01 * factor])
    else:
        assert sigmas == scheduled
    assert metrics[0]["mismatch_kl"] < 1e-9 and all(m["mismatch_kl"] > 1e-8 for m in metrics if m["sigma"] > 1e-3)
    assert all(0 <= m["kept_fraction"] <= 1 for m in metrics) if name == "pooled_noise" else "kept_fraction" not in metrics[0]


def test_fp16_rounds_more_finely_than_bfloat16(qwen):
    """Decoding against training, by transformers' own float32 log-probabilities: 3 more bits, up to 64 times less K3."""
    folder, theirs = qwen
    errors, mismatches = {}, {}
    for dtype in (torch.bfloat16, torch.float16):
        model = qerl.load_model(folder, "bf16", dtype=dtype)
        rollout, batch = sample_step(small_neighbour("qerl"), model, types.SimpleNamespace(eos={300}), [[5, 6, 7]], group=16)
        tokens = torch.cat([torch.tensor([[5, 6, 7]]).repeat(16, 1), rollout.tokens], 1)
        exact = theirs(tokens).logits[:, 2:-1].log_softmax(-1).gather(-1, rollout.tokens[..., None])[..., 0]
        errors[dtype] = (batch.old_logprobs - exact).std().item()
        mismatches[dtype], _ = qerl.mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.mask)
    assert 5 < errors[torch.bfloat16] / errors[torch.float16] < 13                       # 8: 2^-8 against 2^-11
    assert mismatches[torch.bfloat16] > 20 * mismatches[torch.float16] > 0


def test_fp16_trains(qwen, data, tmp_path, monkeypatch):
    scored_by_letters(monkeypatch)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--method", "fp16", "--skip-eval-before", "--eval-questions", 1)
    assert methods.find("fp16", train_gsm8k.Settings(dtype="float16")).loss_scale_growth == 400
    monkeypatch.setattr(methods.fp16.Neighbour, "loss_scale_growth", 2)
    run_main(monkeypatch, *options, "--out", tmp_path / "run")
    metrics = without_times(tmp_path / "run" / "metrics.jsonl")
    assert [m["loss_scale"] for m in metrics] == [2.0 ** 16, 2.0 ** 17, 2.0 ** 17, 2.0 ** 18, 2.0 ** 18]
    assert all(m["gradient_norm"] > 0 for m in metrics) and 0 < metrics[0]["mismatch_kl"] < 1e-5
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["settings"]["dtype"] == "float16"


@pytest.mark.parametrize("pieces,ends", [
    (["One", ".", " Two", "!", " End", "."], [2, 4]),                                    # the end of all is no cut
    (["a", ".\n\n", "b", "\n", "c", "\n", "\n"], [2, 4]), (["pi", " is", " 3", ".", "5", "."], []),
    (["Why", "?\n", "So"], [2]), (["no", " end", ".", "\n"], []), (["amid. a", " token", ".", " x"], [3]), ([], []),
    (["1+2=3", "\n", "3-2=1", "</think>", ""], [2]), (["a", "\n", "", "b"], [2]),
])
def test_sentences_end_at_tokens(pieces, ends):
    assert branches.sentence_ends(pieces) == ends


def newton(outcomes, steps=60):
    """scikit-learn's logistic regression (slope penalised by b^2 / 2) by damped Newton steps in numpy."""
    r, y = np.array(outcomes).T
    x, line = np.stack([np.ones_like(r), r], 1), np.zeros(2)
    for _ in range(steps):
        p = 1 / (1 + np.exp(-x @ line))
        line -= 0.5 * np.linalg.solve((x.T * (p * (1 - p))) @ x + np.diag([0, 1]), x.T @ (p - y) + line * [0, 1])
    return line


def test_pivots_are_drawn_by_success_and_depth():
    deep_fails = [(0.25, 1)] * 60 + [(0.25, 0)] * 20 + [(0.75, 1)] * 30 + [(0.75, 0)] * 90
    rng = random.Random(0)
    rare = [(rng.random(), int(i % 400 == 0)) for i in range(2000)]
    for outcomes in (deep_fails, rare, [(r, 1 - y) for r, y in rare]):
        assert branches.fit_success(outcomes) == pytest.approx(newton(outcomes), abs=1e-4)
    many = [outcome for outcome in deep_fails for _ in range(100)]                       # the penalty is negligible: the frequencies
    a, b = branches.fit_success(many)
    assert [1 / (1 + math.exp(-a - b * r)) for r in (0.25, 0.75)] == pytest.approx([0.75, 0.25], abs=3e-3)
    for too_little in ([], [(0.5, 0), (0.5, 1)] * 5, [(0.5, 1)] * 50):
        assert branches.fit_success(too_little) == (0, 0)
    r, utility = deep_grpo.pivot_utility(3, (a, b))
    assert r.tolist() == [0.25, 0.5, 0.75]
    assert (utility / utility.sum()).tolist() == pytest.approx(np.array([0.75 / 16, 0.5 / 4, 0.25 * 9 / 16]) / 0.3125, abs=3e-3)


def test_branches_join_the_samples_behind_their_question(qwen):
    """Two questions of two completions, three of them failed, two with pivots: what is asked, rewarded, remembered and weighed."""
    method = small_neighbour("deep_grpo", ["--max-new-tokens", 12, "--group", 2])
    text = ByteText()
    method.prepare(None, None, None, text)
    model = qerl.load_model(qwen[0])

    def samples_of(questions, texts, correct):
        tokens = [text.encoding.encode_ordinary(t) for t in texts]
        length = torch.tensor(list(map(len, tokens)))
        padded = torch.tensor([t + [0] * (length.max() - len(t)) for t in tokens])
        zeros = torch.zeros(padded.shape)
        correct = torch.tensor(correct)
        return train_gsm8k.Samples(questions, qerl.Rollout(padded, zeros, zeros, length, length > 0), texts, 2 * correct, correct)

    questions = [{"question": "p", "prompt": [1, 2], "right": 3}, {"question": "q", "prompt": [4], "right": 5}]
    samples = samples_of(questions, ["ab\ncd", "right\n.", "no end", "x\ny"], [[0.0, 1.0], [0.0, 0.0]])
    asked = []

    def complete(branched, phase, sampler_class):
        rollout = qerl.generate(model, [q["prompt"] for q in branched], 12, 2, sampler_class=sampler_class)
        asked.append((branched, phase, rollout.length.tolist()))
        return samples_of(branched, ["b1", "b2", "b3", "b4"], [[1.0, 0.0], [0.0, 0.0]])
    both = method.explore(samples, complete, torch.Generator().manual_seed(0))
    (branched, phase, length), = asked
    first, second = ({"question": "p", "prompt": [1, 2, *b"ab\n"], "right": 3, "begun": "ab\n"},
                     {"question": "q", "prompt": [4, *b"x\n"], "right": 5, "begun": "x\n"})
    assert branched == [first, second] and phase == "branches" and length == [9, 9, 10, 10]   # of 12, less what was begun
    assert both.questions == [questions[0], first, questions[1], second] and both.draws == [samples]
    assert both.texts == ["ab\ncd", "right\n.", "b1", "b2", "no end", "x\ny", "b3", "b4"]
    assert [bytes(row[:n].tolist()).decode() for row, n in zip(both.rollout.tokens, both.rollout.length)] == both.texts
    assert method.state["outcomes"] == [(0.5, 1.0), (0.5, 0.0)]
    advantages = method.advantages(both)
    torch.testing.assert_close(advantages, torch.tensor([[-1, 1], [math.sqrt(2), -math.sqrt(2)], [0, 0], [0, 0]]) / math.sqrt(2), rtol=1e-3, atol=0)
    batch = train_gsm8k.make_batch(both, advantages.flatten(), qerl.OBJECTIVES["grpo"])
    assert method.before_updates(batch) == {"branches": 2, "branch_accuracy": 0.25, "mended": 0.5}
    weights = method.token_weights(batch)
    assert method.settings.updates == 4 and weights.sum(1).tolist() == pytest.approx([1] * 8)      # two of eight in each minibatch, on average
    minibatches = [[0, 1, 2, 3, 4], [2, 3], [0], [1, 7]]
    for chosen in minibatches:                                                           # whatever else is in a completion's minibatch
        assert method.token_weights(batch.rows(chosen)).sum(1).tolist() == pytest.approx([1] * len(chosen))
    method.settings.algo = "dapo"                                                        # there each token of a stream weighs the same
    batch.mask[2] = False                                                                # a branch that was cut off
    method.before_updates(batch)
    for chosen in minibatches:
        part = batch.rows(chosen)
        for branches, rows in ((False, [0, 1, 4, 5]), (True, [2, 3, 6, 7])):
            expected = 4 / batch.mask[rows].sum().item()
            own = torch.tensor([i in rows for i in chosen])
            assert method.token_weights(part)[own].flatten().tolist() == pytest.approx((expected * part.mask[own]).flatten().tolist())
    scored = train_gsm8k.score([{"right": Decimal(6), "begun": "<answer>1"}], both.rollout, ["6</answer>", "</answer>"], "answer")
    assert scored.correct.tolist() == [[0, 0]]
    scored = train_gsm8k.score([{"right": Decimal(16), "begun": "<answer>1"}], both.rollout, ["6</answer>", "</answer>"], "answer")
    assert scored.correct.tolist() == [[1, 0]]


def test_deep_grpo_trains(qwen, data, tmp_path, monkeypatch):
    """Any letter ends a sentence here, so that an untrained model's completions have pivots; every third branch is right."""
    monkeypatch.setattr(branches, "SENTENCE_END", re.compile(r"(?s)."))
    monkeypatch.setattr(deep_grpo, "REMEMBERED", 7)
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (float(sum(map(ord, text)) % 7), float(sum(map(ord, text)) % 3 == 0)))
    metrics = resumes_bit_for_bit(monkeypatch, tmp_path, ("--model", qwen[0], "--data", data, *QUICK, "--method",
                                                          "deep_grpo", "--skip-eval-before", "--eval-questions", 1))
    assert all(0 <= m["branches"] <= 4 and m["gradient_norm"] > 0 for m in metrics) and sum(m["branches"] for m in metrics) > 7
    state, _ = read_checkpoint(str(tmp_path / "whole"), {}, must_agree=["none"])
    outcomes = state["method"]["outcomes"]
    assert len(outcomes) == 7 and all(0 < r < 1 and right in (0, 1) for r, right in outcomes)
    timed = [m["seconds"] for m in read_jsonl(tmp_path / "whole" / "metrics.jsonl")]
    assert all(("branches" in t) == (m["branches"] > 0) for t, m in zip(timed, metrics))


def test_maspo_weights_by_hand():
    """exp(-(rho - 1)^2 / 2 s^2) with s of the paper's two factors, where the update leaves 1; else 1."""
    def w(ratio, probability, advantage):
        return maspo.maspo_weights(*(torch.tensor([[x]]) for x in (ratio, math.log(probability), advantage))).item()
    assert w(1.5, 1.0, 1.0) == pytest.approx(math.exp(-0.25 / (2 * 1.03 ** 2)))
    assert w(0.5, 1.0, -1.0) == pytest.approx(math.exp(-0.25 * 1.03 ** 2 / 2))
    assert w(3.0, 0.01, 2.0) == pytest.approx(math.exp(-4 / (2 * (0.01 ** -0.3 * 1.06) ** 2)))
    assert w(3.0, 1e-9, 1000.0) == pytest.approx(math.exp(-4 / (2 * (10 * 10) ** 2)))    # both factors at their bounds
    assert w(0.1, 1.0, -1000.0) == pytest.approx(math.exp(-0.81 / (2 * 0.1 ** 2)))
    assert w(0.5, 0.9, 1.0) == w(1.5, 0.9, -1.0) == w(1.0, 0.9, 1.0) == w(2.0, 0.9, 0.0) == 1


def test_maspo_loss_is_weighted_and_detached():
    """Its gradient is -w rho A, KL apart, which is Eq. 3's own; before any update it is GRPO's."""
    method = small_neighbour("maspo", ["--beta", 0.1])
    torch.manual_seed(0)
    old, ref = -torch.rand(4, 3) - 0.1, -torch.rand(4, 3)
    batch = Batch([[1]] * 4, None, None, None, torch.tensor([1.0, -1.0, 2.0, 0.0]), None, old, ref, torch.rand(4, 3))
    logprobs = (old + 0.5 * torch.randn(4, 3)).requires_grad_()
    loss, kl = method.loss(logprobs, batch)
    loss.backward()
    x = ref - logprobs.detach()
    A, ratio = batch.advantages[:, None], (logprobs.detach() - old).exp()
    w = maspo.maspo_weights(ratio, old, A)
    assert (w < 0.99).any()
    torch.testing.assert_close(logprobs.grad, batch.weights * (0.1 * (1 - x.exp()) - w * ratio * A))
    assert kl.item() == pytest.approx((batch.weights * (x.exp() - 1 - x)).sum().item())
    assert loss.item() == pytest.approx((batch.weights * (0.1 * (x.exp() - 1 - x) - w * ratio * A)).sum().item(), rel=1e-5)
    gradients = []
    for objective in (method, small_neighbour("qerl", ["--beta", 0.1])):
        fresh = old.clone().requires_grad_()
        objective.loss(fresh, batch)[0].backward()
        gradients.append(fresh.grad)
    torch.testing.assert_close(*gradients)
    far = torch.tensor([[60.0, -60.0, 0.0]]) + old[:1]                                   # no NaN, no infinity
    assert all(t.isfinite() for t in method.loss(far, batch.rows([0])))


def test_maspo_trains(qwen, data, tmp_path, monkeypatch):
    scored_by_letters(monkeypatch)
    weights, seen = maspo.maspo_weights, []

    def recorded(*args):
        seen.append(weights(*args))
        return seen[-1]
    monkeypatch.setattr(maspo, "maspo_weights", recorded)
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--method", "maspo", "--updates", 2, "--steps", 2,
             "--lr", 0.03, "--warm-up", 0, "--skip-eval-before", "--eval-questions", 1, "--out", tmp_path / "run")
    metrics = without_times(tmp_path / "run" / "metrics.jsonl")
    assert len(seen) == 4 and all(m["gradient_norm"] > 0 for m in metrics) and "branches" not in metrics[0]
    assert seen[0].min() > 1 - 1e-6 and seen[1].min() < 1 - 1e-4                         # a step's second update is bounded


@pytest.mark.parametrize("options,message", [
    (["--method", "noise_control", "--sigma-start", 0, "--sigma-end", 0], "--method noise_control: there is no noise"),
    (["--method", "pooled_noise", "--group", 6], "use a --group divisible by 4"),
    (["--method", "pooled_noise", "--tis", 2], "use --tis 0"),
    (["--method", "fp16", "--dtype", "bfloat16"], "--method fp16: computes in float16, not in bfloat16; leave"),
    (["--method", "maspo", "--updates", 1], "maspo: with one update a rollout the ratio is 1"),
    (["--method", "maspo", "--tis", 2], "use --tis 0"),
    (["--method", "noise_control:louder"], "choose noise_control:divergence, "),
])
def test_neighbours_refuse(data, tmp_path, monkeypatch, capsys, options, message):
    assert message in refused(monkeypatch, capsys, *options, "--device", "cpu", "--out", tmp_path / "out")


def test_a_table_compares_the_second_step_of_each_method(capsys):
    comparison = importlib.import_module("methods.__main__")
    comparison.main(["qerl", "jetrl:training"])
    header, qerl_row, jetrl_row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[:2] == ["method", "KL"] and qerl_row[0] == "qerl" and jetrl_row[0] == "jetrl:training"
    assert 0 < float(qerl_row[1]) < float(jetrl_row[1])                           # FP8 in training adds to the noise's divergence
    with pytest.raises(SystemExit) as stop:
        comparison.main(["nonsense"])
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("error: --method nonsense: unknown; choose one of qerl, ")
