"""Other choices of NVFP4 codes."""
import copy
import json
import math
import os
import re
import shutil
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import methods
import qerl
import train_gsm8k
from common import QUICK, refused, run_main, stopped_and_resumed, widened, without_times
from harness import cache as cache_folder, packed_folder
from harness.questions import read_questions
from harness.small_policy import ByteText
from methods import awq, four_over_six, gptq, qat, rilq
from methods.parts import calibration, quantizers
from methods.parts import trained_codes, worked
from test_qerl import CONFIGS, SIZES, WEIGHTS, break_tensor, make_folder, relative


def calibrated(weights_seed=0, tokens=1000, out_features=48, in_features=128):
    """(weight, inputs x, gram): inputs that are correlated and of which some channels are large."""
    generator = torch.Generator().manual_seed(weights_seed)
    weight = torch.randn(out_features, in_features, generator=generator) * 0.05
    mix = torch.eye(in_features) + 0.1 * torch.randn(in_features, in_features, generator=generator)
    x = torch.randn(tokens, in_features, generator=generator) @ mix * torch.rand(in_features,
        generator=generator) ** 3
    return weight, x, x.T @ x


def output_error(parts, weight, x):
    return relative(x @ qerl.dequantize_nvfp4(*parts, torch.float32).T, x @ weight.T)


def packed_values(parts):
    """What compressed-tensors decodes the three parts to."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    state = dict(zip(("weight_packed", "weight_scale", "weight_global_scale"), parts))
    return NVFP4PackedCompressor.decompress(state, scheme)["weight"].float()


@pytest.mark.parametrize("kind",
    ["gaussian", "odd rows", "zeros", "zero blocks", "ties", "wide range"])
def test_four_over_six_takes_the_better_of_two_scales(kind):
    """Each block by exhaustive search, number by number."""
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()[:6]
    parts = four_over_six.quantize_four_over_six(weight)
    ours = qerl.dequantize_nvfp4(*parts, torch.float32)
    torch.testing.assert_close(packed_values(parts), ours, rtol=1e-2, atol=0)
    alpha = weight.abs().max().double() / 1536
    chosen = set()
    for block, found in zip(weight.view(-1, 16).double(), ours.view(-1, 16).double()):
        errors = {}
        for largest in (6, 4):
            scale = (block.abs().max() / (largest * alpha)).nan_to_num()
            stored = scale.to(torch.float8_e4m3fn).double() or 0.125
            table = qerl.E2M1.double() * stored * alpha
            errors[largest] = (block[:, None] - table).square().amin(1).sum().item()
        chosen.add(min(errors, key=errors.get))
        assert (block - found).square().sum().item() == pytest.approx(min(errors.values()), rel=1e-4,
            abs=1e-12)
    assert chosen == {"zeros": {6}, "zero blocks": {4, 6}, "ties": {4}}.get(kind, {4, 6})


def test_four_over_six_lowers_the_error_of_gaussian_weights_as_published():
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))
    rounding, better = (relative(qerl.dequantize_nvfp4(*quantize(weight), torch.float32),
        weight) ** 2
                        for quantize in (qerl.quantize_nvfp4, four_over_six.quantize_four_over_six))
    assert 1 - better / rounding == pytest.approx(0.166, abs=0.005)


def textbook_gptq(weight, gram, damping=0.01):
    """GPTQ as optimal brain quantisation in a given order: after each column the inverse Hessian is
    reduced.
    """
    _, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    table = qerl.E2M1.double()
    W, H = weight.double().clone(), gram.double().clone()
    H += damping * H.diag().mean() * torch.eye(len(H))
    inverse = H.inverse()
    result = torch.zeros_like(W)
    left = list(range(len(H)))
    for j in sorted(left, key=lambda j: -gram[j, j].item()):
        scale = (block_scale[:, j // 16].double() / global_scale.double())[:, None]
        nearest = (W[:, j, None] - scale * table).abs().argmin(1)
        result[:, j] = scale[:, 0] * table[nearest]
        W -= ((W[:, j] - result[:, j]) / inverse[j, j])[:, None] * inverse[j]
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return result


@pytest.mark.parametrize("group", [1, 48, 128])
def test_gptq_equals_the_textbook(group):
    weight, x, gram = calibrated()
    parts = gptq.quantize_gptq(weight, gram, group=group)
    expected = textbook_gptq(weight, gram).float()
    agree = torch.isclose(packed_values(parts), expected, rtol=1e-2, atol=1e-6)
    # float32 decides a near tie otherwise
    assert agree.float().mean() > 0.99
    error = output_error(parts, weight, x)
    assert error == pytest.approx(relative(x @ expected.T, x @ weight.T), rel=0.02)
    assert error < 0.8 * output_error(qerl.quantize_nvfp4(weight), weight, x)


def test_gptq_of_uncorrelated_inputs_is_rounding():
    weight, _, _ = calibrated()
    for gram in (torch.eye(128), torch.zeros(128, 128)):
        ours, rounding = gptq.quantize_gptq(weight, gram), qerl.quantize_nvfp4(weight)
        assert torch.equal(qerl.dequantize_nvfp4(*ours, torch.float32),
            qerl.dequantize_nvfp4(*rounding, torch.float32))
        assert torch.equal(ours[1].view(torch.uint8), rounding[1].view(torch.uint8))
        assert torch.equal(ours[2], rounding[2])


def plain_layer(weight):
    parts = qerl.keep_16_bit(weight)
    return qerl.QuantLinear(["x"], [len(weight)], weight.shape[1],
        qerl.PackedWeight(qerl.FORMATS["bf16"], *parts), None)


def test_awq_finds_the_scale_with_the_least_output_error():
    """By running the inputs themselves through each of the 20 candidates."""
    weight, x, gram = calibrated(1)
    x[:, :3] *= 30                                                 # salient channels
    layer = plain_layer(weight)
    seen = calibration.Inputs(layer)
    seen.mask = torch.ones(1, len(x), dtype=torch.bool)
    layer(x[None])
    assert seen.count == len(x)
    torch.testing.assert_close(seen.gram, x.T @ x, rtol=1e-4, atol=1e-2)
    errors = []
    for a in range(20):
        s = (x.abs().mean(0) ** (a * 0.05)).clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        decoded = qerl.dequantize_nvfp4(*qerl.quantize_nvfp4(weight * s), torch.float32)
        errors.append((relative(x.double() / s @ decoded.T.double(), x.double() @ weight.T.double()),
            s))
    best = min(errors, key=lambda e: e[0])
    assert best[0] < 0.9 * errors[0][0]
    torch.testing.assert_close(awq.awq_scale(layer, seen), best[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_folded_scales_change_no_logit(tmp_path, monkeypatch, kv_heads):
    """Of a model with biases; v -> o only where each head of o reads its own of v."""
    monkeypatch.setitem(CONFIGS, "biased", lambda: transformers.LlamaConfig(
        **{**SIZES, "num_key_value_heads": kv_heads}, attention_bias=True, mlp_bias=True))
    folder, theirs = make_folder(tmp_path / "model", "biased")
    tensors = theirs.state_dict()
    model = qerl.load_model(folder, "bf16")
    torch.manual_seed(0)
    for block in model.blocks:
        layers = [block.attention.qkv, block.mlp.gate_up,
            block.mlp.down] + [block.attention.o] * (kv_heads == 4)
        scales = {layer: torch.rand(layer.weight.dequantize(torch.float32).shape[1]) + 0.5
            for layer in layers}
        folded = awq.fold(block, scales)
        changed = [name for name, tensor in folded.items() if not torch.equal(tensor, tensors[name])]
        assert any("o_proj" in name for name in changed) == (kv_heads == 4)
        assert any("norm" in name for name in changed)
        tensors.update(folded)
    tokens = torch.arange(30)[None]
    before = theirs(tokens).logits
    theirs.load_state_dict(tensors)
    assert relative(theirs(tokens).logits, before) < 1e-5


@pytest.mark.parametrize("quantizer", quantizers.QUANTIZERS)
def test_quantised_folder_is_one_of_compressed_tensors(qwen, data, cache, quantizer):
    """transformers, with the library, loads it and computes our logits; what was calibrated is
    nearer to the 16-bit model.
    """
    folder, theirs = qwen
    questions = read_questions(data, "train*.jsonl")[:20]
    text = train_gsm8k.ChatText(folder, "")
    path = quantizers.quantized_folder(folder, quantizer, questions, text, "cpu")
    ours = qerl.load_model(path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokens = torch.tensor([text.prompt(questions[0]["question"])])
    with torch.no_grad():
        # the library decodes its weights when they are first used, in 16 bit
        loaded(tokens[:, :1])
        for tensor in [*loaded.parameters(), *loaded.buffers()]:
            tensor.data = tensor.data.float()
        # and its embeddings
        assert relative(ours(tokens), loaded(tokens).logits) < 0.01
        exact = theirs(tokens).logits
    # of a single text only what was calibrated on it has to be nearer
    if quantizer != "four-over-six":
        assert relative(ours(tokens), exact) < relative(qerl.load_model(folder)(tokens), exact)


def test_quantizer_goes_with_a_run_and_is_found_once(qwen, data, tmp_path, cache, monkeypatch,
        capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--save-every", 1,
        "--quantizer", "gptq")
    run_main(monkeypatch, *options, "--out", tmp_path / "run")
    assert capsys.readouterr().out.count("finding NVFP4 codes by gptq") == 1
    found, = cache.iterdir()
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(found)
    assert found.name.startswith(os.path.basename(qwen[0]) + "-gptq-")
    loaded = []
    load_model = qerl.load_model
    monkeypatch.setattr(qerl, "load_model", lambda folder, *rest, **options: loaded.append(folder)
                        or load_model(folder, *rest, **options))
    run_main(monkeypatch, *options, "--method", "gptq", "--out", tmp_path / "same")
    assert "finding" not in capsys.readouterr().out and loaded == [str(found)]
    rounding = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--save-every", 1, "--out",
        tmp_path / "rtn")
    run_main(monkeypatch, *rounding)
    names = ("run", "same", "rtn")
    calibrated, same, rounded = (without_times(tmp_path / n / "metrics.jsonl") for n in names)
    assert calibrated == same
    assert calibrated != rounded


@pytest.mark.parametrize("quantizer", quantizers.QUANTIZERS)
def test_codes_are_found_with_a_block_in_memory_at_a_time(qwen, data, quantizer):
    """They are those of a model that is there whole; it keeps its weights."""
    text = train_gsm8k.ChatText(qwen[0], "")
    sequences = worked.worked_sequences(read_questions(data, "train*.jsonl")[:20], text, 4000)
    module = quantizers.module_of(quantizer)
    whole = qerl.load_model(qwen[0], "bf16")
    before = [layer.weight for layer in whole.quantized_layers()]
    expected = module.choose_codes(whole, sequences)
    assert all(layer.weight is weight for layer, weight in zip(whole.quantized_layers(), before))
    model = qerl.load_model(qwen[0], "bf16", checkpoint_class=calibration.LeftInFiles)
    layers = model.quantized_layers()
    alive, most = weakref.WeakSet(), []
    for layer in layers:
        def read(layer=layer, unread=layer.weight.read):
            weight = unread()
            alive.add(weight)
            most.append(len(alive))
            return weight
        layer.weight.read = read
    found = module.choose_codes(model, sequences)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
        for name in found)
    assert len(most) == len(layers) == 8                           # each is read once
    assert max(most) == (1 if quantizer == "four-over-six" else 4) and not alive


def test_a_folder_of_codes_keeps_them(qwen, data, cache, capsys):
    """Whatever --quantizer says, by default, too."""
    packed = quantizers.quantized_folder(qwen[0], "four-over-six", [], None, "cpu")
    settings = train_gsm8k.arguments(["--model", packed, "--data", data, "--device", "cpu",
        "--max-new-tokens", "8"])
    model, *_ = train_gsm8k.load_all(settings, methods.find("qerl", settings))
    assert settings.quantizer == "gptq"
    assert model.name_or_path == packed
    assert len(list(cache.iterdir())) == 1
    assert "is in 4 bits already: its codes stay" in capsys.readouterr().out


def test_a_run_does_not_go_on_with_other_codes(qwen, data, tmp_path, cache, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--quantizer", "gptq",
        "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    run_main(monkeypatch, *options, "--resume", "--eval-only")
    weights, = cache.glob("*/model*.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("weight_packed"))
    tensors[name][0, 0] ^= 1
    save_file(tensors, weights, {"format": "pt"})
    # as made elsewhere
    (weights.parent / cache_folder.SEAL).write_text(cache_folder.fingerprint(str(weights.parent)))
    for more in ((), ("--eval-only",)):
        assert "was begun with other weights" in refused(monkeypatch, capsys, *options, "--resume",
            *more)


def test_worked_answers_are_what_the_reward_asks_for(qwen):
    gold = "She has 3*4=<<3*4=12>>12 eggs.\n#### 1,200"
    for scheme, whole in (("answer", 1.0), ("paper", 2.2)):
        text = train_gsm8k.ChatText(qwen[0], train_gsm8k.SYSTEM[scheme])
        tokens = text.worked_answer(gold)
        assert tokens[-1] in text.eos and "<<" not in text.decode(tokens[:-1])
        assert train_gsm8k.reward(text.decode(tokens[:-1]), 1200, scheme) == (whole, 1.0)


def test_rows_of_worked_answers():
    sequences = worked.worked_sequences([{"question": "ab", "answer": "c\n#### 5"}], ByteText(), 10)
    longer = worked.Worked([1, 2, 3], [4])
    rows = worked.rows_of([longer, worked.Worked([5], [6, 7])], "cpu")
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert rows.mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert rows.answered.tolist() == [[False, False, True, False], [True, True, False, False]]
    text = ByteText().decode(sequences[0].prompt + sequences[0].answer)
    assert text == "ab\n<think>c</think><answer>5</answer>"
    # MATH's: without steps
    bare, = worked.worked_sequences([{"question": "ab", "answer": "\\frac12"}], ByteText(), 10)
    text = ByteText().decode(bare.prompt + bare.answer)
    assert text == "ab\n<think></think><answer>\\frac12</answer>"


def test_rilq_loss_equals_transformers(qwen, tmp_path):
    """MSE of the final hidden states over all tokens, cross-entropy over the answers'."""
    student_folder, student = make_folder(tmp_path / "student", seed=1)
    _, teacher = qwen
    sequences = [worked.Worked([1, 2, 3], [4, 5]), worked.Worked([6], [7, 8, 9, 10, 11])]
    rows = worked.rows_of(sequences, "cpu")
    target = qerl.load_model(qwen[0], "bf16").hidden(rows.tokens)
    model = qerl.load_model(student_folder, "bf16", lora_rank=2)
    loss, mse, cross_entropy = rilq.rilq_loss(model, target, rows)
    squares, losses = [], []
    for s in sequences:
        tokens = torch.tensor([s.prompt + s.answer])
        labels = torch.tensor([[-100] * len(s.prompt) + s.answer])
        ours, theirs = (m(tokens, labels=labels, output_hidden_states=True)
            for m in (student, teacher))
        squares.append((ours.hidden_states[-1] - theirs.hidden_states[-1]).square().flatten())
        losses += [ours.loss] * len(s.answer)
    assert mse.item() == pytest.approx(torch.cat(squares).mean().item(), rel=1e-4)
    assert cross_entropy.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert loss.item() == pytest.approx((mse + cross_entropy).item() / 2)


def test_rilq_starts_lora_and_is_the_reference(qwen, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rilq, "TEXTS", 10)
    monkeypatch.setattr(rilq.compensate, "__defaults__", (1e-2, 8, 0))
    # differs within a group
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1,
        "--method", "rilq", "--beta", 0.1)
    metrics = stopped_and_resumed(monkeypatch, options, tmp_path)
    before, after = re.search(r"RILQ: validation loss ([\d.]+) -> ([\d.]+)",
        capsys.readouterr().out).groups()
    assert float(after) < float(before)
    # the reference is the policy of the first step
    assert metrics[0]["kl"] < 1e-9 < metrics[2]["kl"]
    adapter = load_file(tmp_path / "whole" / "adapter" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0.01 for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_qat_starts_at_the_quantised_model_and_ends_in_its_bytes(qwen, data, tmp_path, cache,
        quantizer):
    folder = qwen[0]
    text = train_gsm8k.ChatText(folder, "")
    questions = read_questions(data, "train*.jsonl")[:16]
    start = folder if quantizer == "rtn" else quantizers.quantized_folder(folder, quantizer,
        questions, text, "cpu")
    student, ordinary = qat.fake_quantised(start), qerl.load_model(start)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative(student(tokens), ordinary(tokens)) < 1e-5
    teacher = qerl.load_model(folder, "bf16")
    sequences = worked.worked_sequences(questions, text, 10 ** 6)
    rows = worked.rows_of(sequences, "cpu")
    before = qat.answer_loss(student, teacher, rows).item()
    qat.cold_start(student, teacher, sequences, lr=3e-4, steps=6, batch=8)
    assert qat.answer_loss(student, teacher, rows).item() < before
    (tmp_path / "trained").mkdir()
    packed_folder.write_packed_folder(folder, trained_codes.packed_tensors(student),
        tmp_path / "trained")
    trained = qerl.load_model(str(tmp_path / "trained"))
    with torch.no_grad():
        assert relative(trained(tokens), student(tokens)) < 1e-5 < 1e-3 < relative(trained(tokens),
            ordinary(tokens))
    for layer, first in zip(trained.quantized_layers(), ordinary.quantized_layers()):
        assert not torch.equal(layer.weight.parts[0], first.weight.parts[0])
        for scales in (1, 2):
            assert torch.equal(layer.weight.parts[scales].float(),
                first.weight.parts[scales].float())


def test_straight_through_gradient_is_that_of_the_rounded_weight(qwen):
    """A cold start's loss and gradients, of transformers with the library's decoded weights as
    parameters.
    """
    folder, theirs = qwen
    student = qat.fake_quantised(folder)
    sequences = [worked.Worked([1, 2, 3], [4, 5]), worked.Worked([6], [7, 8, 9, 10, 11])]
    loss = qat.answer_loss(student, None, worked.rows_of(sequences, "cpu"))
    loss.backward()
    theirs = copy.deepcopy(theirs).requires_grad_(True)
    for name, p in theirs.named_parameters():
        if name.endswith("_proj.weight"):
            p.data = packed_values(qerl.quantize_nvfp4(p.data))
    expected = sum(theirs(torch.tensor([s.prompt + s.answer]),
        labels=torch.tensor([[-100] * len(s.prompt) + s.answer])).loss
                   * len(s.answer) for s in sequences) / 7
    expected.backward()
    # the library decodes in 16 bit
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for layer in student.quantized_layers():
        for name, gradient in zip(layer.names, layer.master.grad.split(layer.sizes)):
            assert relative(gradient, gradients[f"{name}.weight"]) < 0.03


def test_distillation_is_forward_kl(qwen, tmp_path):
    folder, _ = make_folder(tmp_path / "teacher", seed=1)
    teacher, student = qerl.load_model(folder, "bf16"), qerl.load_model(qwen[0], "bf16")
    sequences = [worked.Worked([1, 2, 3], [4, 5]), worked.Worked([6], [7, 8, 9])]
    loss = qat.answer_loss(student, teacher, worked.rows_of(sequences, "cpu"))
    divergences = []
    for s in sequences:
        p, q = (torch.distributions.Categorical(
            logits=m(torch.tensor([s.prompt + s.answer]))[0, len(s.prompt) - 1:-1])
                for m in (teacher, student))
        divergences.append(torch.distributions.kl_divergence(p, q))
    torch.testing.assert_close(loss, torch.cat(divergences).mean())


def test_cold_start_warms_up_and_falls_as_a_cosine(qwen, monkeypatch):
    seen = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step",
                        lambda self, *a: seen.append(self.param_groups[0]["lr"]) or step(self, *a))
    qat.cold_start(qat.fake_quantised(qwen[0]), None, [worked.Worked([1], [2, 3])], lr=1.0, steps=40,
        batch=1)
    expected = [0.5, 0.75] + [(1 + math.cos(math.pi * i / 38)) / 2 for i in range(38)]
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("variant", qat.Neighbour.variants)
def test_qat_is_the_frozen_start_of_a_run(qwen, data, tmp_path, cache, monkeypatch, capsys, variant):
    monkeypatch.setattr(qat, "RECIPE", dict(lr=3e-4, steps=4, batch=4))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1,
        "--method", f"qat:{variant}")
    stopped_and_resumed(monkeypatch, options, tmp_path)
    assert capsys.readouterr().out.count(f"cold start by {variant}, 4 steps, once") == 1
    found, = cache.iterdir()
    config = json.loads((tmp_path / "whole" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(found)
    name = "model.layers.0.mlp.down_proj.weight"
    trained = load_file(found / "model.safetensors")
    packed, scale, _ = qerl.quantize_nvfp4(load_file(f"{qwen[0]}/model.safetensors")[name])
    changed = (trained[f"{name}_packed"] != packed).float().mean()
    assert 0 < changed < 0.5 and torch.equal(trained[f"{name}_scale"].float(), scale.float())


def test_qat_starts_from_the_quantizers_folder(qwen, data, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(qat, "RECIPE", dict(lr=1e-12, steps=1, batch=2))
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--method",
        "qat", "--quantizer", "gptq",
             "--out", tmp_path / "run")
    stored = {("qat" if "-qat-" in path.name else "gptq"): qerl.load_model(str(path))
        for path in cache.iterdir()}
    for layer, start in zip(stored["qat"].quantized_layers(), stored["gptq"].quantized_layers()):
        assert torch.equal(layer.weight.dequantize(torch.float32),
            start.weight.dequantize(torch.float32))


def test_rilq_keeps_the_best_adapter_and_stops(qwen, data):
    """At a rate at which the loss is NaN at once the start stays, after PATIENCE validations."""
    questions = read_questions(data, "train*.jsonl")
    sequences = rilq.texts_of(questions, train_gsm8k.ChatText(qwen[0], ""), 10)
    assert len(sequences) == 10
    assert all(len(s.prompt) + len(s.answer) <= rilq.LONGEST for s in sequences)
    teacher = qerl.load_model(qwen[0], "bf16")
    torch.manual_seed(0)
    model = qerl.load_model(qwen[0], lora_rank=4)
    start = rilq.adapter(model)
    losses = rilq.compensate(model, teacher, sequences, lr=10.0)
    assert len(losses) == 1 + rilq.PATIENCE
    assert all(torch.equal(start[name], p) for name, p in rilq.adapter(model).items())
    losses = rilq.compensate(model, teacher, sequences, lr=1e-3, steps=16)
    assert losses[-1] < losses[0]
    held = worked.rows_of(sequences[:2], "cpu")
    with torch.no_grad():
        loss, _, _ = rilq.rilq_loss(model, teacher.hidden(held.tokens), held)
    assert loss.item() == pytest.approx(min(losses))


def test_codes_are_found_by_one_process(qwen, cache):
    """The others wait for it. What a killed process has left is removed."""
    made = []

    def make(path):
        made.append(path)
        time.sleep(0.3)
        shutil.copy(f"{qwen[0]}/model.safetensors", path)

    def find(_):
        return packed_folder.cached_folder(qwen[0], "slow", ["key"], make)
    first = find(0)
    os.rename(first, f"{first}.123.tmp")
    with ThreadPoolExecutor(3) as pool:
        folder, *others = pool.map(find, range(3))
    assert others == 2 * [folder]
    assert os.listdir(cache) == [os.path.basename(folder)]
    assert len(made) == 2


@pytest.mark.parametrize("options,message", [
    (["--quantizer", "gptq", "--weights", "nf4"], "chooses codes of NVFP4; use --weights nvfp4"),
    (["--method", "gptq", "--quantizer", "rtn"], "use --quantizer rtn alone"),
    (["--method", "gptq:int3"], "gptq has no variant int3; choose gptq alone"),
    (["--method", "rilq", "--weights", "bf16"], "there is no error of quantisation to undo"),
    (["--method", "rilq", "--train-norms"], "leave --train-norms out"),
    (["--method", "rilq", "--dtype", "float16"], "use --dtype float32"),
    (["--method", "rilq", "--model", "packed"], "is in 4 bits already"),
    (["--method", "qat", "--weights", "mxfp4"], "trains weights for NVFP4, not for mxfp4"),
    (["--method", "qat:rl"], "choose qat:distil, qat:sft"),
    (["--method", "qat", "--model", "packed"], "is in 4 bits already"),
    (["--quantizer", "gptq", "--model", "narrow"], "not divisible by nvfp4's block of 16"),
])
def test_quantizers_that_make_no_sense_are_refused(
        qwen, data, tmp_path, cache, monkeypatch, capsys, options, message):
    """packed: a folder in NVFP4. narrow: a model with 200 inner features."""
    monkeypatch.chdir(tmp_path)
    packed_folder.save_packed(qwen[0], "packed", "cpu")
    shutil.copytree(qwen[0], "narrow")
    break_tensor(qwen[0], tmp_path / "narrow", widened, lambda c: c.update(intermediate_size=200))
    base = ("--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "out")
    assert message in refused(monkeypatch, capsys, *base, *options)
