"""Other choices of NVFP4 codes, and weights or LoRA that are trained for them."""
import copy
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import qerl
import train_gsm8k
from common import QUICK, refused, run_main, stopped_and_resumed, widened, without_times
from harness import export, folders
from harness.data import read_questions
from harness.small_policy import ByteText
from methods import awq, four_over_six, gptq, qat, rilq
from methods.parts import calibration, quantizers, worked
from test_qerl import CONFIGS, SIZES, WEIGHTS, break_tensor, make_folder, relative

decoded = partial(qerl.dequantize_nvfp4, dtype=torch.float32)
TWO = [worked.Worked([1, 2, 3], [4, 5]), worked.Worked([6], [7, 8, 9, 10, 11])]


def correlated():
    """(weight [48, 128], inputs x [1000, 128]), of which some channels are large."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 128, generator=rng) * 0.05
    mix = torch.eye(128) + 0.1 * torch.randn(128, 128, generator=rng)
    x = torch.randn(1000, 128, generator=rng) @ mix
    return weight, x * torch.rand(128, generator=rng) ** 3


def library_values(parts):
    """What compressed-tensors decodes the three parts to."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    state = dict(zip(("weight_packed", "weight_scale", "weight_global_scale"), parts))
    return NVFP4PackedCompressor.decompress(state, scheme)["weight"].float()


def some_sequences(folder, data, count=20):
    text = train_gsm8k.ChatText(folder, "")
    return worked.worked_sequences(read_questions(data, "train*.jsonl")[:count], text, 10 ** 6)


@pytest.mark.parametrize("kind", ["odd rows", "zero blocks", "ties", "wide range"])
def test_four_over_six_takes_the_better_of_two_scales(kind):
    """Each block by exhaustive search, number by number."""
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()[:6]
    parts = four_over_six.quantize_four_over_six(weight)
    ours = decoded(*parts)
    torch.testing.assert_close(library_values(parts), ours, rtol=1e-2, atol=0)
    alpha = weight.abs().max().double() / 1536
    chosen = set()
    for block, found in zip(weight.view(-1, 16).double(), ours.view(-1, 16).double()):
        errors = {}
        for largest in (6, 4):
            scale = (block.abs().max() / (largest * alpha)).nan_to_num()
            stored = scale.to(torch.float8_e4m3fn).double() or 0.125
            distances = block[:, None] - qerl.E2M1.double() * stored * alpha
            errors[largest] = distances.square().amin(1).sum().item()
        chosen.add(min(errors, key=errors.get))
        error = (block - found).square().sum().item()
        assert error == pytest.approx(min(errors.values()), rel=1e-4, abs=1e-12)
    assert chosen == ({4} if kind == "ties" else {4, 6})


def test_four_over_six_lowers_the_error_of_gaussian_weights_as_published():
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))
    rounding = relative(decoded(*qerl.quantize_nvfp4(weight)), weight)
    better = relative(decoded(*four_over_six.quantize_four_over_six(weight)), weight)
    assert 1 - (better / rounding) ** 2 == pytest.approx(0.166, abs=0.005)


def textbook_gptq(weight, gram):
    """GPTQ as optimal brain quantisation: after each column the inverse Hessian is reduced."""
    _, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    W = weight.double().clone()
    H = gram.double() + 0.01 * gram.diag().mean() * torch.eye(len(gram))
    inverse = H.inverse()
    result = torch.zeros_like(W)
    for j in gram.diag().argsort(descending=True):
        scale = (block_scale[:, j // 16].double() / global_scale.double())[:, None]
        table = scale * qerl.E2M1.double()
        nearest = (W[:, j, None] - table).abs().argmin(1, keepdim=True)
        result[:, j] = table.gather(1, nearest)[:, 0]
        W -= ((W[:, j] - result[:, j]) / inverse[j, j])[:, None] * inverse[j]
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return result.float()


@pytest.mark.parametrize("group", [1, 48, 128])
def test_gptq_equals_the_textbook(group):
    weight, x = correlated()
    parts = gptq.quantize_gptq(weight, x.T @ x, group=group)
    expected = textbook_gptq(weight, x.T @ x)
    agree = torch.isclose(library_values(parts), expected, rtol=1e-2, atol=1e-6)
    assert agree.float().mean() > 0.99              # float32 decides a near tie otherwise
    exact = x @ weight.T
    error = relative(x @ decoded(*parts).T, exact)
    assert error == pytest.approx(relative(x @ expected.T, exact), rel=0.02)
    assert error < 0.8 * relative(x @ decoded(*qerl.quantize_nvfp4(weight)).T, exact)


def test_gptq_of_uncorrelated_inputs_is_rounding():
    weight, _ = correlated()
    for gram in (torch.eye(128), torch.zeros(128, 128)):
        ours = gptq.quantize_gptq(weight, gram)
        rounding = qerl.quantize_nvfp4(weight)
        assert torch.equal(decoded(*ours), decoded(*rounding))
        assert torch.equal(ours[1].float(), rounding[1].float())


def test_awq_finds_the_scale_with_the_least_output_error():
    """By running the inputs themselves through each of the 20 candidates."""
    weight, x = correlated()
    x[:, :3] *= 30                                                 # salient channels
    packed = qerl.PackedWeight(qerl.FORMATS["bf16"], *qerl.keep_16_bit(weight))
    layer = qerl.QuantLinear(["x"], [48], 128, packed, None)
    seen = calibration.Inputs(layer)
    seen.mask = torch.ones(1, len(x), dtype=torch.bool)
    layer(x[None])
    assert seen.count == len(x)
    torch.testing.assert_close(seen.gram, x.T @ x, rtol=1e-4, atol=1e-2)
    scales = []
    errors = []
    for a in range(20):
        s = (x.abs().mean(0) ** (a * 0.05)).clamp(min=1e-4)
        scales.append(s / (s.max() * s.min()).sqrt())
        rounded = decoded(*qerl.quantize_nvfp4(weight * scales[-1])) / scales[-1]
        errors.append(relative(x.double() @ rounded.T.double(), x.double() @ weight.T.double()))
    assert min(errors) < 0.9 * errors[0]
    best = scales[errors.index(min(errors))]
    torch.testing.assert_close(awq.awq_scale(layer, seen), best, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_folded_scales_change_no_logit(tmp_path, monkeypatch, kv_heads):
    """Of a model with biases; v -> o only where each head of o reads its own of v."""
    sizes = {**SIZES, "num_key_value_heads": kv_heads}
    monkeypatch.setitem(CONFIGS, "biased", lambda: transformers.LlamaConfig(
        **sizes, attention_bias=True, mlp_bias=True))
    folder, theirs = make_folder(tmp_path / "model", "biased")
    tensors = theirs.state_dict()
    folded = {}
    for block in qerl.load_model(folder, "bf16").blocks:
        layers = [block.attention.qkv, block.mlp.gate_up, block.mlp.down]
        layers += [block.attention.o] * (kv_heads == 4)
        widths = [layer.weight.dequantize(torch.float32).shape[1] for layer in layers]
        folded |= awq.fold(block, {k: torch.rand(n) + 0.5 for k, n in zip(layers, widths)})
    changed = [name for name, tensor in folded.items() if not torch.equal(tensor, tensors[name])]
    assert any("o_proj" in name for name in changed) == (kv_heads == 4)
    assert any("norm" in name for name in changed)
    tokens = torch.arange(30)[None]
    before = theirs(tokens).logits
    theirs.load_state_dict({**tensors, **folded})
    assert relative(theirs(tokens).logits, before) < 1e-5


@pytest.mark.parametrize("quantizer", ["awq", "gptq"])
def test_calibrated_codes_are_nearer_to_the_16_bit_model(qwen, data, cache, quantizer):
    """Of the text that they were calibrated on."""
    folder, theirs = qwen
    questions = read_questions(data, "train*.jsonl")[:20]
    text = train_gsm8k.ChatText(folder, "")
    path = quantizers.quantized_folder(folder, quantizer, questions, text, "cpu")
    tokens = torch.tensor([text.prompt(questions[0]["question"])])
    with torch.no_grad():
        exact = theirs(tokens).logits
        rounding = relative(qerl.load_model(folder)(tokens), exact)
        assert relative(qerl.load_model(path)(tokens), exact) < rounding


def test_quantizer_goes_with_a_run_and_is_found_once(qwen, data, tmp_path, cache, monkeypatch,
                                                     capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--save-every", 1)
    calibrated = (*options, "--quantizer", "gptq")
    run_main(monkeypatch, *calibrated, "--out", tmp_path / "run")
    assert capsys.readouterr().out.count("finding NVFP4 codes by gptq") == 1
    found, = cache.iterdir()
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(found)
    assert found.name.startswith(os.path.basename(qwen[0]) + "-gptq-")
    run_main(monkeypatch, *calibrated, "--method", "gptq", "--out", tmp_path / "same")
    assert "finding" not in capsys.readouterr().out
    run_main(monkeypatch, *options, "--out", tmp_path / "rtn")
    first, same, rounded = (
        without_times(tmp_path / name / "metrics.jsonl") for name in ("run", "same", "rtn"))
    assert first == same != rounded


class WholeAtOnce(calibration.LeftInFiles):
    """Weights that are in memory from the beginning, behind read()."""

    def stacked(self, *layers):
        unread = super().stacked(*layers)
        weight = unread.read()
        unread.read = lambda: weight
        return unread


@pytest.mark.parametrize("quantizer", quantizers.QUANTIZERS)
def test_codes_are_found_with_a_block_in_memory_at_a_time(qwen, data, quantizer):
    """They are those of a model that is there whole."""
    sequences = some_sequences(qwen[0], data)
    choose_codes = quantizers.module_of(quantizer).choose_codes
    whole = qerl.load_model(qwen[0], "bf16", checkpoint_class=WholeAtOnce)
    expected = choose_codes(whole, sequences)
    model = qerl.load_model(qwen[0], "bf16", checkpoint_class=calibration.LeftInFiles)
    layers = model.quantized_layers()
    unread = [layer.weight for layer in layers]
    in_memory = []
    for layer in layers:
        def read(read_file=layer.weight.read):
            in_memory.append(sum(layer.weight not in unread for layer in layers))
            return read_file()
        layer.weight.read = read
    found = choose_codes(model, sequences)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name
    assert len(in_memory) == len(layers) == 8                      # each is read once
    assert max(in_memory) == (0 if quantizer == "four-over-six" else 3)    # at a time, before it
    assert all(layer.weight in unread for layer in layers)


def test_a_folder_of_codes_keeps_them(qwen, data, cache, capsys):
    """Whatever --quantizer says, by default, too."""
    packed = quantizers.quantized_folder(qwen[0], "four-over-six", [], None, "cpu")
    flags = ["--model", packed, "--data", data, "--device", "cpu", "--max-new-tokens", "8"]
    settings = train_gsm8k.arguments(flags)
    model, *_ = train_gsm8k.load_all(settings, qerl)
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
    next(t for name, t in tensors.items() if name.endswith("weight_packed"))[0, 0] ^= 1
    save_file(tensors, weights, {"format": "pt"})
    seal = folders.fingerprint(str(weights.parent))           # as made elsewhere
    (weights.parent / folders.SEAL).write_text(seal)
    said = refused(monkeypatch, capsys, *options, "--resume", "--eval-only")
    assert "was begun with other weights" in said


def test_worked_answers_are_what_the_reward_asks_for(qwen):
    gold = "She has 3*4=<<3*4=12>>12 eggs.\n#### 1,200"
    for scheme, whole in (("answer", 1.0), ("paper", 2.2)):
        text = train_gsm8k.ChatText(qwen[0], train_gsm8k.SYSTEM[scheme])
        *tokens, last = text.worked_answer(gold)
        assert last in text.eos and "<<" not in text.decode(tokens)
        assert train_gsm8k.reward(text.decode(tokens), 1200, scheme) == (whole, 1.0)


def test_rows_of_worked_answers():
    longer = worked.Worked([1, 2, 3], [4])
    rows = worked.rows_of([longer, worked.Worked([5], [6, 7])], "cpu")
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert rows.mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert rows.answered.tolist() == [[False, False, True, False], [True, True, False, False]]
    for answer, written in (("c\n#### 5", "<think>c</think><answer>5</answer>"),
                            ("\\frac12", "<think></think><answer>\\frac12</answer>")):
        question = {"question": "ab", "answer": answer}            # MATH's is without steps
        one, = worked.worked_sequences([question], ByteText(), 10)
        assert ByteText().decode(one.prompt + one.answer) == f"ab\n{written}"


def test_rilq_loss_equals_transformers(qwen, tmp_path):
    """MSE of the final hidden states over all tokens, cross-entropy over the answers'."""
    student_folder, student = make_folder(tmp_path / "student", seed=1)
    rows = worked.rows_of(TWO, "cpu")
    target = qerl.load_model(qwen[0], "bf16").hidden(rows.tokens)
    model = qerl.load_model(student_folder, "bf16", lora_rank=2)
    loss, mse, cross_entropy = rilq.rilq_loss(model, target, rows)
    squares = []
    losses = []
    for s in TWO:
        tokens = torch.tensor([s.prompt + s.answer])
        labels = torch.tensor([[-100] * len(s.prompt) + s.answer])
        ours = student(tokens, labels=labels, output_hidden_states=True)
        theirs = qwen[1](tokens, output_hidden_states=True)
        squares.append((ours.hidden_states[-1] - theirs.hidden_states[-1]).square().flatten())
        losses += [ours.loss] * len(s.answer)
    assert mse.item() == pytest.approx(torch.cat(squares).mean().item(), rel=1e-4)
    assert cross_entropy.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert loss.item() == pytest.approx((mse + cross_entropy).item() / 2)


def test_rilq_starts_lora_and_is_the_reference(qwen, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rilq, "TEXTS", 10)
    monkeypatch.setattr(rilq.compensate, "__defaults__", (1e-2, 8, 0))
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1,
               "--method", "rilq", "--beta", 0.1)
    metrics = stopped_and_resumed(monkeypatch, options, tmp_path)
    said = re.search(r"RILQ: validation loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)
    assert float(said[2]) < float(said[1])
    assert metrics[0]["kl"] < 1e-9 < metrics[2]["kl"]      # the reference is the first step's policy
    adapter = load_file(tmp_path / "whole" / "adapter" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0.01 for name, tensor in adapter.items() if "lora_B" in name)


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


@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_qat_starts_at_the_quantised_model_and_ends_in_its_bytes(qwen, data, tmp_path, cache,
                                                                 quantizer):
    folder = start = qwen[0]
    if quantizer != "rtn":
        questions = read_questions(data, "train*.jsonl")[:16]
        text = train_gsm8k.ChatText(folder, "")
        start = quantizers.quantized_folder(folder, quantizer, questions, text, "cpu")
    student = qat.fake_quantised(start)
    ordinary = qerl.load_model(start)
    teacher = qerl.load_model(folder, "bf16")
    sequences = some_sequences(folder, data)
    rows = worked.rows_of(sequences, "cpu")
    with torch.no_grad():
        assert relative(student(rows.tokens), ordinary(rows.tokens)) < 1e-5
    before = qat.answer_loss(student, teacher, rows).item()
    qat.cold_start(student, teacher, sequences, lr=3e-4, steps=6, batch=8)
    assert qat.answer_loss(student, teacher, rows).item() < before
    export.write_packed_folder(folder, qat.packed_tensors(student), tmp_path)
    trained = qerl.load_model(str(tmp_path))
    with torch.no_grad():
        logits = trained(rows.tokens)
        assert relative(logits, student(rows.tokens)) < 1e-5
        assert relative(logits, ordinary(rows.tokens)) > 1e-3
    for layer, first in zip(trained.quantized_layers(), ordinary.quantized_layers()):
        (codes, *scales), (codes_before, *scales_before) = layer.weight.parts, first.weight.parts
        assert not torch.equal(codes, codes_before)
        for ours, theirs in zip(scales, scales_before):
            assert torch.equal(ours.float(), theirs.float())


def test_straight_through_gradient_is_that_of_the_rounded_weight(qwen):
    """transformers' loss and gradients, the library's decoded weights being its parameters."""
    folder, theirs = qwen
    student = qat.fake_quantised(folder)
    loss = qat.answer_loss(student, None, worked.rows_of(TWO, "cpu"))
    loss.backward()
    theirs = copy.deepcopy(theirs).requires_grad_(True)
    parameters = dict(theirs.named_parameters())
    for name, p in parameters.items():
        if name.endswith("_proj.weight"):
            p.data = library_values(qerl.quantize_nvfp4(p.data))
    expected = 0.0
    for s in TWO:
        labels = torch.tensor([[-100] * len(s.prompt) + s.answer])
        mean = theirs(torch.tensor([s.prompt + s.answer]), labels=labels).loss
        expected = expected + mean * len(s.answer) / 7
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)     # decoded in 16 bit
    for layer in student.quantized_layers():
        for name, gradient in zip(layer.names, layer.master.grad.split(layer.sizes)):
            assert relative(gradient, parameters[f"{name}.weight"].grad) < 0.03


def test_distillation_is_forward_kl(qwen, tmp_path):
    folder, _ = make_folder(tmp_path / "teacher", seed=1)
    models = [qerl.load_model(path, "bf16") for path in (folder, qwen[0])]
    divergences = []
    for s in TWO:
        tokens = torch.tensor([s.prompt + s.answer])
        p, q = (torch.distributions.Categorical(logits=model(tokens)[0, len(s.prompt) - 1:-1])
                for model in models)
        divergences.append(torch.distributions.kl_divergence(p, q))
    loss = qat.answer_loss(models[1], models[0], worked.rows_of(TWO, "cpu"))
    torch.testing.assert_close(loss, torch.cat(divergences).mean())


@pytest.mark.parametrize("variant,quantizer", [("distil", "gptq"), ("sft", "rtn")])
def test_qat_is_the_frozen_start_of_a_run(qwen, data, tmp_path, cache, monkeypatch, capsys, variant,
                                          quantizer):
    """It has the scales of the quantiser's folder and, hardly trained, most of its codes."""
    monkeypatch.setattr(qat, "RECIPE", dict(lr=3e-4, steps=4, batch=4))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1,
               "--method", f"qat:{variant}", "--quantizer", quantizer)
    stopped_and_resumed(monkeypatch, options, tmp_path)
    assert capsys.readouterr().out.count(f"cold start by {variant}, 4 steps, once") == 1
    found = next(path for path in cache.iterdir() if "-qat-" in path.name)
    config = json.loads((tmp_path / "whole" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(found)
    start = qwen[0] if quantizer == "rtn" else next(cache.glob("*-gptq-*"))
    layers = [qerl.load_model(str(path)).quantized_layers() for path in (found, start)]
    for trained, first in zip(*layers):
        (codes, *scales), (codes_before, *scales_before) = trained.weight.parts, first.weight.parts
        assert 0 < (codes != codes_before).float().mean() < 0.5
        assert torch.equal(scales[0].float(), scales_before[0].float())


def test_codes_are_found_by_one_process(qwen, cache):
    """The others wait for it. What a killed process has left is removed."""
    made = []

    def make(path):
        made.append(path)
        time.sleep(0.3)
        shutil.copy(f"{qwen[0]}/model.safetensors", path)

    def find(_):
        return folders.cached_folder(qwen[0], "slow", ["key"], make)
    first = find(0)
    os.rename(first, f"{first}.123.tmp")
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(find, range(3))) == {first}
    assert os.listdir(cache) == [os.path.basename(first)]
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
    export.save_packed(qwen[0], "packed", "cpu")
    shutil.copytree(qwen[0], "narrow")
    break_tensor(qwen[0], tmp_path / "narrow", widened, lambda c: c.update(intermediate_size=200))
    base = ("--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "out")
    assert message in refused(monkeypatch, capsys, *base, *options)
