"""Other choices of NVFP4 codes, and weights or LoRA that are trained for them."""
import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import qerl
import train_gsm8k
from common import run_main
from harness import export, fast
from harness.data import ChatText, read_questions
from harness.folders import read_jsonl, write_jsonl
from harness.policy import SYSTEM
from harness.small_policy import WordText
from methods import awq, four_over_six, gptq, qat, rilq
from methods.parts import calibration, quantizers, worked
from test_qerl import WEIGHTS, make_folder, relative, stacked_layer

decoded = partial(fast.FORMATS["nvfp4"].dequantize, dtype=torch.float32)


def correlated():
    """(weight [48, 128], inputs x [1000, 128]), of which some channels are large."""
    weight = 0.05 * torch.randn(48, 128)
    mix = torch.eye(128) + 0.1 * torch.randn(128, 128)
    x = torch.randn(1000, 128) @ mix
    return weight, x * torch.rand(128) ** 3


@pytest.fixture
def asked(qwen, data):
    """(questions, the tokenizer, both as worked sequences)"""
    questions = read_questions(data, "train*.jsonl")[:20]
    text = ChatText(qwen, "")
    return questions, text, worked.worked_sequences(questions, text, 10 ** 6)


# --------------------------------------------------------------------------------------------------
# Codes

def nearest(x, scale):
    """x rounded to the nearest of E2M1's values times a scale, by trying all of them."""
    values = scale[..., None] * qerl.E2M1.double()
    distances = (x[..., None] - values).abs()
    index = distances.argmin(-1, keepdim=True)
    return values.expand_as(distances).gather(-1, index)[..., 0]


@pytest.mark.parametrize("kind", ["odd rows", "zero blocks", "ties", "wide range"])
def test_four_over_six_takes_the_better_of_two_scales(kind):
    weight = WEIGHTS[kind]()
    blocks = weight.double().view(-1, 16)
    largest = blocks.abs().amax(1, keepdim=True)
    alpha = largest.max() / 1536

    def errors_of(values):
        return (values - blocks).square().sum(1)

    def errors_with(code):
        stored = (largest / (code * alpha)).to(torch.float8_e4m3fn).double()
        stored[stored == 0] = 0.125
        return errors_of(nearest(blocks, stored * alpha))
    ours = decoded(*four_over_six.quantize_four_over_six(weight)).view(-1, 16)
    best = torch.minimum(errors_with(6), errors_with(4))
    assert_close(errors_of(ours), best, rtol=1e-4, atol=1e-12)


def textbook_gptq(weight, gram):
    """GPTQ as optimal brain quantisation: after each column the inverse Hessian is reduced."""
    _, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    scale = (block_scale.double() / global_scale).repeat_interleave(16, 1)
    W = weight.double()
    result = torch.zeros_like(W)
    damping = 0.01 * gram.diag().mean()
    inverse = (gram + damping * torch.eye(len(gram))).double().inverse()
    for j in gram.diag().argsort(descending=True):
        result[:, j] = nearest(W[:, j], scale[:, j])
        of_column = inverse[j] / inverse[j, j]
        W = W - torch.outer(W[:, j] - result[:, j], of_column)
        inverse = inverse - torch.outer(inverse[:, j], of_column)
    return result.float()


def test_gptq_equals_the_textbook():
    """In three groups of columns, the last of which is smaller."""
    weight, x = correlated()
    gram = x.T @ x
    ours = decoded(*gptq.quantize_gptq(weight, gram, group=48))
    agree = torch.isclose(ours, textbook_gptq(weight, gram), rtol=1e-5)
    assert agree.float().mean() > 0.99              # float32 decides a near tie otherwise


def test_awq_finds_the_scale_with_the_least_output_error():
    """By running the inputs themselves through each of the 20 candidates."""
    weight, x = correlated()
    x[:, :3] *= 30                                                 # salient channels
    layer = stacked_layer("bf16", [weight])
    seen = calibration.Inputs(layer)
    padded = F.pad(x, (0, 0, 0, 5), value=1e6)                     # padding counts nowhere
    seen.kept = torch.arange(len(x))
    layer(padded[None])

    def error(s):
        rounded = decoded(*qerl.quantize_nvfp4(weight * s)) / s
        return F.linear(x, rounded - weight).norm().item()

    def candidate(a):
        s = x.abs().mean(0).pow(a / 20).clamp(min=1e-4)
        return s / (s.max() * s.min()).sqrt()
    first, *others = map(candidate, range(20))
    best = min(others, key=error)
    assert error(best) < error(first)
    assert_close(awq.awq_scale(layer, seen), best, rtol=1e-3, atol=1e-5)


def test_codes_are_found_with_a_block_in_memory_at_a_time(qwen, asked):
    model = fast.load_model(qwen, "bf16", reader_class=calibration.LeftInFiles)
    layers = model.quantized_layers()
    in_memory = []
    for layer in layers:
        def read(read_file=layer.weight.read):
            in_memory.append(sum(type(layer.weight) is not calibration.Unread for layer in layers))
            return read_file()
        layer.weight.read = read
    gptq.choose_codes(model, asked[-1])
    assert in_memory == [0, 1, 2, 3] * len(model.blocks)               # each is read once


def test_codes_are_found_by_one_process(qwen, cache):
    """The others wait for it. What a killed process has left is removed."""
    made = []

    def make(path):
        made.append(path)
        time.sleep(0.3)

    def find(_):
        return quantizers.cached_folder(qwen, "slow", ["key"], make)
    first = find(0)
    os.rename(first, f"{first}.tmp")
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(find, range(3))) == {first}
    assert os.listdir(cache) == [os.path.basename(first)]
    assert f"{os.path.basename(qwen)}-slow-" in first
    assert len(made) == 2


@pytest.mark.parametrize("name", ["gptq", "awq", "four-over-six"])
def test_a_seed_has_its_own_codes_where_they_are_fitted_to_questions(qwen, data, cache, monkeypatch, name):
    """Without a seed they are those of seed 0, whose order of the questions stays."""
    monkeypatch.setattr(quantizers, "CALIBRATION_TOKENS", 2000)
    questions = read_questions(data, "train*.jsonl")

    def codes(*seed):
        folder = quantizers.quantized_folder(qwen, name, questions, ChatText(qwen, ""), "cpu", *seed)
        return fast.load_model(folder).quantized_layers()[0].weight.parts[0]
    assert codes().equal(codes(0))
    assert codes().equal(codes(1)) == (name == "four-over-six")


def test_a_run_is_measured_on_other_questions_with_its_own_codes(quick, data, tmp_path, cache):
    """Also where they are among those that its codes were fitted to."""
    asked = read_jsonl(f"{data}/train.jsonl")[:3]
    write_jsonl(tmp_path / "asked.jsonl", asked)
    run_main(*quick, "--steps 1 --skip-eval-before --quantizer gptq")
    run_main(*quick, "--quantizer gptq --resume --eval-only --validation 2 --eval", tmp_path / "asked.jsonl")
    assert len(os.listdir(cache)) == 1


# --------------------------------------------------------------------------------------------------
# Training on worked answers

@pytest.mark.parametrize("scheme,whole", [("answer", 1.0), ("paper", 2.2)])
def test_worked_answers_are_what_the_reward_asks_for(qwen, scheme, whole):
    text = ChatText(qwen, SYSTEM[scheme])
    *tokens, last = text.worked_answer("She has 3*4=<<3*4=12>>12 eggs.", "1,200")
    answer = text.decode(tokens)
    assert last in text.eos and "<<" not in answer
    assert train_gsm8k.find_reward(scheme)(answer, {"right": 1200}) == whole


def test_worked_answers_may_have_no_steps():
    """MATH's have none. They end with so many tokens as are asked for."""
    question = {"question": "ab", "answer": "\\frac12"}
    sequence, = worked.worked_sequences([question] * 2, WordText(), tokens=10)
    written = WordText().decode(sequence.prompt + sequence.answer)
    assert written == "ab\n<think></think><answer>\\frac12</answer>"


TWO = [
    worked.Worked([1, 2, 3], [4, 5]),
    worked.Worked([6], [7, 8, 9, 10, 11]),
]
ANSWERS = torch.tensor([4, 5, 7, 8, 9, 10, 11])


def by_transformers(model):
    """(final hidden states of TWO, log π of the tokens at ANSWERS), each text by itself."""
    hidden = []
    logprobs = []
    for prompt, answer in TWO:
        found = model(torch.tensor([prompt + answer]), output_hidden_states=True)
        hidden.append(found.hidden_states[-1][0])
        logits = found.logits[0, len(prompt) - 1:-1]
        logprobs.append(logits.log_softmax(-1))
    return torch.cat(hidden), torch.cat(logprobs)


def test_losses_and_straight_through_gradients_equal_transformers(made_qwen, tmp_path):
    """RILQ's has the final hidden states of all tokens and the answers' cross-entropy, QAT's is KL.

    The parameters of transformers' student are the decoded weights.
    """
    folder, theirs = made_qwen
    theirs = copy.deepcopy(theirs).requires_grad_(True)
    parameters = dict(theirs.named_parameters())
    for name, p in parameters.items():
        if name.endswith("_proj.weight"):
            p.data = decoded(*qerl.quantize_nvfp4(p.data))
    other, their_teacher = make_folder(tmp_path, seed=1)
    student = qat.fake_quantised(folder)
    teacher = fast.load_model(other, "bf16")
    rows = worked.rows_of(TWO, "cpu")
    hidden, q = by_transformers(theirs)
    wanted, p = by_transformers(their_teacher)
    cross_entropy = F.nll_loss(q, ANSWERS)
    found = rilq.rilq_loss(student, teacher.hidden(rows.tokens), rows)
    assert_close(found, 0.5 * F.mse_loss(hidden, wanted) + 0.5 * cross_entropy, rtol=1e-4, atol=0)
    loss = qat.answer_loss(student, teacher, rows)
    expected = (p.exp() * (p - q)).sum(-1).mean()
    assert_close(loss, expected, rtol=1e-4, atol=0)
    loss.backward()
    expected.backward()
    for layer in student.quantized_layers():
        gradients = [parameters[f"{name}.weight"].grad for name in layer.names]
        assert relative(layer.master.grad, torch.cat(gradients)) < 1e-3


def test_rilq_keeps_the_best_adapter_and_stops(qwen, asked):
    """At a rate at which the loss is NaN at once the start stays, after PATIENCE validations."""
    sequences = asked[-1][:10]
    teacher = fast.load_model(qwen, "bf16")
    model = fast.load_model(qwen, lora_rank=4)
    start = export.trained_copy(model)
    losses = rilq.compensate(model, teacher, sequences, lr=10.0)
    assert len(losses) == 1 + rilq.PATIENCE
    for name, p in export.trained_copy(model).items():
        assert start[name].equal(p)
    losses = rilq.compensate(model, teacher, sequences, lr=1e-3, steps=16)
    assert losses[-1] == min(losses) < losses[0]


def test_qat_starts_at_the_quantised_model_and_ends_in_its_bytes(qwen, asked, tmp_path, cache):
    """A folder in 4 bits keeps its codes."""
    questions, text, sequences = asked
    start = quantizers.quantized_folder(qwen, "gptq", questions, text, "cpu")
    assert quantizers.quantized_folder(start, "awq", questions, text, "cpu") == start
    student = qat.fake_quantised(start)
    ordinary = fast.load_model(start)
    teacher = fast.load_model(qwen, "bf16")
    rows = worked.rows_of(sequences, "cpu")

    def loss(model):
        return qat.answer_loss(model, teacher, rows).item()
    before = loss(ordinary)
    assert loss(student) == pytest.approx(before, rel=1e-4)
    qat.cold_start(student, teacher, sequences, lr=3e-4, steps=6, batch=8)
    export.write_folder(qwen, qat.packed_tensors(student), tmp_path)
    trained = fast.load_model(str(tmp_path))
    assert loss(trained) == pytest.approx(loss(student), rel=1e-4)
    assert loss(trained) < before
    for layer, first in zip(trained.quantized_layers(), ordinary.quantized_layers()):
        same = list(map(torch.equal, layer.weight.parts, first.weight.parts))
        assert same == [False, True, True]             # other codes under the same scales
