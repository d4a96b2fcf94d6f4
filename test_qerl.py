"""Tests against oracles that no one here wrote: transformers, compressed-tensors, bitsandbytes, peft, trl.

    python -m pytest -n auto                                     CPU, minutes; tests marked `gpu` skip without a GPU
    TRITON_INTERPRET=1 python -m pytest -k kernel                the kernels in Triton's interpreter (the first also does it)
"""
import contextlib
import copy
import errno
import glob
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from decimal import Decimal
from functools import partial

if "PYTEST_XDIST_WORKER" in os.environ:                   # of several processes, and what they start, each takes one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib.figure
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import bench
import fp4_kernels
import methods
import qerl
import train_gsm8k
from harness import branches, calibration, checkpoint, checks, claims, claims_pictures, compare, cross_compile
from harness import demonstration, eight_bit, entropy, factorial, fp8_blocks, fp8_layers, keeper, lora_starts, memory
from harness import math_data, packed_folder, quantizers, questions, report, run_folder, small_policy, stops, study, trained_codes
from harness import worked
from harness import cache as cache_folder
from harness.answers import answered_number, final_number, last_box, parse_number, stated_number
from harness.batches import Batch, cut_rows
from harness.chat_text import check_tokens
from harness.checkpoint import load_adapter, read_checkpoint, save_adapter
from harness.flags import full_name, parse_flags
from harness.full_weights import train_all_weights
from harness.instruments import flat
from harness.math_data import is_equal, math_questions
from harness.mismatch import describe_mismatch
from harness.questions import read_questions
from harness.ranks import Ranks
from harness.run_folder import choose_folder, read_jsonl, read_log, write_jsonl
from harness.small_policy import ByteText, made_up_problems, warm_start
from methods import awq, deep_grpo, flashrl, four_over_six, gptq, jetrl, maspo, qat, qurl, rilq
from methods import rollout_correction

HERE = os.path.dirname(os.path.abspath(__file__))
CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
runs_kernels = pytest.mark.skipif(not (CUDA or fp4_kernels.INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")

SIZES = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=262, max_position_embeddings=512, eos_token_id=256, bos_token_id=257, pad_token_id=256)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=48),
    "qwen3-bias": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    "wide": lambda: transformers.Qwen2Config(**{**SIZES, "hidden_size": 256, "intermediate_size": 512}, tie_word_embeddings=True),
    "llama-yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)),
}


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def make_folder(path, name="qwen2", seed=0, **save):
    """A Hugging Face folder with a random model and a byte-level tokenizer; returns (path, the model)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.06 if p.dim() > 1 else p.data + 0.1 * torch.randn_like(p)
    model.save_pretrained(path, **save)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(path)
    return str(path), model


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("qwen"))


# A vocabulary in which a policy that knows nothing answers, and now and then rightly.
BOXED = {5: 1, 6: 2}                                # token -> the number that it answers
TAGGED = {7: 1, 8: 2}                               # the same in the paper's format
QUIZ_EOS = 4
QUIZ_TOKENS = ["a", "b", "c", "1", "<eos>", *(rf"\boxed{{{n}}}" for n in BOXED.values()),
               *(f"<think></think><answer>{n}</answer>" for n in TAGGED.values())]


@pytest.fixture(scope="module")
def quiz(tmp_path_factory):
    """A folder with a tiny random policy and problems of which it gets about a third right: a signal.

    Ten questions to train on and six held out, of one to four letters; the answer is 1 or 2.
    """
    folder = tmp_path_factory.mktemp("quiz")
    torch.manual_seed(5)
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=len(QUIZ_TOKENS), max_position_embeddings=64,
        eos_token_id=QUIZ_EOS, bos_token_id=QUIZ_EOS, tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for p in model.parameters():
        p.data = 0.2 * torch.randn_like(p) if p.dim() > 1 else p.data + 0.3 * torch.randn_like(p)
    model.save_pretrained(folder)
    vocabulary = {token: i for i, token in enumerate(QUIZ_TOKENS)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), eos_token="<eos>",
        chat_template="{{ messages[1]['content'] }}",
    )
    tokenizer.save_pretrained(folder)
    rng = random.Random(0)
    questions = []
    for letters, count in ((1, 2), (2, 4), (3, 5), (4, 5)):
        words = ["".join(word) for word in itertools.product("abc", repeat=letters)]
        questions += rng.sample(words, count)
    rng.shuffle(questions)
    problems = [{"question": q, "answer": f"#### {1 + len(q) % 2}"} for q in questions]
    write_jsonl(folder / "train.jsonl", problems[:10])
    write_jsonl(folder / "test.jsonl", problems[10:])
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    train, held_out = made_up_problems()
    for name, problems in (("train", train[:64]), ("test_first", held_out[:6])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def plain_curves():
    """Learning curves without tick labels and layout, which take most of a short run's time.

    Everything else of them is drawn. Runs in processes of their own, and other pictures, are not touched.
    """
    save_figure = keeper.save_figure

    def save_plain(*picture):
        without_labels = {"xtick.labelbottom": False, "ytick.labelleft": False}
        with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context(without_labels):
            patch.setattr(matplotlib.figure.Figure, "set_layout_engine", lambda self, *args, **options: None)
            save_figure(*picture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "save_figure", save_plain)
        yield


def with_lora(folder, seed=1, **options):
    """A model whose LoRA is not zero, so that it matters."""
    torch.manual_seed(seed)
    model = qerl.load_model(folder, lora_rank=4, **options)
    for p in qerl.trainable(model).values():
        p.data += 0.05 * torch.randn_like(p)
    return model


# ------------------------------------------------------------------------------------------------- 1. number formats

WEIGHTS = {
    "gaussian": lambda: torch.randn(48, 192),
    "one row": lambda: torch.randn(1, 64),
    "odd rows": lambda: torch.randn(37, 320) * 0.02,
    "zeros": lambda: torch.zeros(5, 64),
    "zero blocks": lambda: torch.randn(6, 128) * (torch.arange(128) // 64),
    "wide range": lambda: torch.randn(16, 128) * 10.0 ** torch.randint(-6, 4, (16, 128)),
    "subnormal scales": lambda: torch.randn(8, 128) * torch.tensor([1.0] + [1e-5] * 127),
    "huge": lambda: torch.randn(8, 128) * 1e30,
    "tiny": lambda: torch.randn(8, 128) * 1e-30,
    "ties": lambda: torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]).repeat(4, 4),
}


def compressed_tensors_nvfp4(weight):
    """The library's own observer arithmetic and compressor: its packed bytes, scales and decompressed weight."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    global_scale = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
    state = NVFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}, scheme)
    return state, NVFP4PackedCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_nvfp4_bytes_equal_compressed_tensors(kind, dtype):
    torch.manual_seed(0)
    weight = WEIGHTS[kind]().to(dtype)
    packed, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    state, decompressed = compressed_tensors_nvfp4(weight)
    assert packed.dtype == torch.uint8 and block_scale.dtype == torch.float8_e4m3fn and global_scale.shape == (1,)
    assert torch.equal(global_scale, state["weight_global_scale"])
    assert torch.equal(block_scale.view(torch.uint8), state["weight_scale"].view(torch.uint8))
    assert torch.equal(packed, state["weight_packed"])
    ours = qerl.dequantize_nvfp4(packed, block_scale, global_scale, torch.float32)
    torch.testing.assert_close(ours, decompressed.float(), rtol=1e-2, atol=0)          # the library decodes in 16 bit


def test_e2m1_rounds_to_nearest_even():
    values = qerl.E2M1[:8]
    x = torch.cat([torch.linspace(-7, 7, 20002), (values[1:] + values[:-1]) / 2, -(values[1:] + values[:-1]) / 2])
    packed = qerl.encode_e2m1(x[None], torch.ones(1, 1))[0].int()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten()
    for value, code in zip(x.tolist(), codes.tolist()):
        distance = (values - abs(value)).abs()
        nearest = [c for c in range(8) if distance[c] == distance.min()]
        assert (code & 7) == next((c for c in nearest if len(nearest) == 1 or c % 2 == 0))
        assert (code >> 3) == (value < 0)


def test_packing_puts_even_indices_low():
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert qerl.pack_nibbles(codes)[0].tolist() == [low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2))]
    decoded = qerl.dequantize_blocks(qerl.pack_nibbles(codes), qerl.E2M1, torch.ones(1, 1), torch.float32)
    assert torch.equal(decoded[0], qerl.E2M1)


@pytest.mark.parametrize("kind", ["gaussian", "odd rows", "zero blocks", "wide range"])
def test_mxfp4_equals_compressed_tensors(kind):
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    packed, e8m0, _ = qerl.quantize_mxfp4(weight)
    amax = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    live = amax > 0
    assert torch.equal(e8m0[live].float(), generate_mx_scales(amax)[live])
    error = (qerl.dequantize_mxfp4(packed, e8m0, None, torch.float32) - weight).unflatten(1, (-1, 32)).abs().amax(-1)
    assert (error <= torch.exp2(e8m0.float() - 127) * 2).all()                       # at most saturation from 7 to 6, or half of 4..6


@pytest.mark.parametrize("kind", ["gaussian", "odd rows", "zero blocks", "wide range"])
def test_nf4_codes_equal_bitsandbytes(kind):
    import bitsandbytes.functional as bnb
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    packed, absmax, _ = qerl.quantize_nf4(weight)
    theirs, state = bnb.quantize_nf4(weight, blocksize=64)
    theirs = theirs.view(packed.shape)
    live = (absmax > 0).repeat_interleave(32, 1)
    assert torch.equal((packed << 4 | packed >> 4)[live], theirs[live])                # they put even indices in the high nibble
    assert torch.equal(absmax.flatten(), state.absmax)
    torch.testing.assert_close(qerl.dequantize_nf4(packed, absmax, None, torch.float32), bnb.dequantize_nf4(theirs.view(-1, 1), state))


@pytest.mark.parametrize("name,low,high", [("nvfp4", 0.085, 0.105), ("mxfp4", 0.1, 0.13), ("nf4", 0.085, 0.1), ("bf16", 0, 0)])
def test_relative_error_on_gaussian_weights(name, low, high):
    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    format = qerl.FORMATS[name]
    assert low <= relative(format.dequantize(*format.quantize(weight), torch.float32), weight) <= high


def test_small_float16_weights_are_quantised_as_well_as_others():
    class Half(qerl.Checkpoint):
        def has(self, name):
            return name == "a.weight"

        def read(self, name, shape):
            return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.008).half()
    checkpoint = Half({})
    weight = checkpoint.read("a.weight", (64, 128))
    assert weight.abs().max() < 0.041                                         # 6 * 448 over it is beyond float16
    assert relative(qerl.dequantize_nvfp4(*checkpoint.quantized("a", 64, 128, "nvfp4"), torch.float32), weight) < 0.1


def test_nf4_double_quantisation_costs_little():
    torch.manual_seed(0)
    weight = torch.randn(64, 1024)
    error = [relative(format.dequantize(*format.quantize(weight), torch.float32), weight)
             for format in (bench.FORMATS["nf4"], bench.FORMATS["nf4 double"])]
    assert error[0] < error[1] < error[0] * 1.05


# ------------------------------------------------------------------------------------------ 2. quantised linear, LoRA

def stacked_layer(weights, dense, bias=None, **lora):
    """A QuantLinear of dense layers over one input, each quantised by itself."""
    format = qerl.FORMATS[weights]
    parts = [(p, s, g.expand(len(w), -1).reshape(len(w), -1)) for w in dense for p, s, g in [format.quantize(w)]]
    weight = qerl.PackedWeight(format, *(torch.cat(p) for p in zip(*parts)))
    return qerl.QuantLinear(list("abc"[:len(dense)]), [len(w) for w in dense], dense[0].shape[1], weight, bias, **lora)


@pytest.mark.parametrize("weights", qerl.FORMATS)
def test_linear_and_its_gradients(weights):
    torch.manual_seed(0)
    dense = [torch.randn(48, 128), torch.randn(16, 128)]
    layer = stacked_layer(weights, dense, torch.randn(64), lora_rank=4, lora_alpha=8)
    format = qerl.FORMATS[weights]
    frozen = torch.cat([format.dequantize(*format.quantize(w), torch.float32) for w in dense])
    x = torch.randn(3, 5, 128, requires_grad=True)
    torch.testing.assert_close(layer(x), F.linear(x, frozen, layer.bias))                # B starts at zero
    layer.lora_B.data.normal_()
    A, B = (t.detach().clone().requires_grad_() for t in (layer.lora_A, layer.lora_B))
    z = x.detach().clone().requires_grad_()
    delta = 2.0 * torch.cat([B[:48] @ A[:4], B[48:] @ A[4:]])
    expected, upstream = F.linear(z, frozen + delta, layer.bias), torch.randn(3, 5, 64)
    torch.testing.assert_close(layer(x), expected)
    layer(x).backward(upstream)
    expected.backward(upstream)
    for ours, theirs in ((x, z), (layer.lora_A, A), (layer.lora_B, B)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_no_dequantised_weight_is_kept_for_backward():
    weight = torch.randn(96, 64)
    layer = stacked_layer("nvfp4", [weight], lora_rank=2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert kept and all(math.prod(shape) < weight.numel() for shape in kept)


@pytest.mark.parametrize("weights", qerl.FORMATS)
def test_decoding_a_layer_is_its_forward(weights):
    """Stacked pieces, LoRA, with and without bias and residual, in plain PyTorch."""
    torch.manual_seed(0)
    x, residual = torch.randn(3, 128), torch.randn(3, 64)
    for bias in (None, torch.randn(64)):
        layer = stacked_layer(weights, [torch.randn(48, 128), torch.randn(16, 128)], bias, lora_rank=4, lora_alpha=8)
        layer.lora_B.data.normal_()
        for layer.use_adapter in (True, False):
            layer.prepare_decoding(torch.float32)
            with torch.no_grad():
                torch.testing.assert_close(layer.decode(x), layer(x), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(layer.decode(x, residual), layer(x) + residual, rtol=1e-4, atol=1e-4)


def quantize_int8(weight):
    """A format of a reader's own: 8 bits, the absolute maximum of each 32 weights becomes 127."""
    blocks = weight.float().unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1).clamp_min(1e-30) / 127
    return (blocks / scale[..., None]).round().to(torch.int8).flatten(1), scale, torch.ones(1, device=weight.device)


def dequantize_int8(codes, scale, global_scale, dtype):
    return (codes.unflatten(1, (-1, 32)).float() * scale[..., None]).flatten(1).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_new_format_takes_a_few_lines(tmp_path, monkeypatch, device):
    """No tiles, no kernels: it is loaded, sampled from and trained like the others."""
    monkeypatch.setitem(qerl.FORMATS, "int8", qerl.Format(quantize_int8, dequantize_int8, block=32))
    folder, theirs = make_folder(tmp_path, "wide")
    model = with_lora(folder, weights="int8", device=device, dtype=torch.float32)
    plain = qerl.load_model(folder, weights="int8", device=device, dtype=torch.float32)
    assert isinstance(model.blocks[0].mlp.down.weight, qerl.PackedWeight)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative(plain(tokens.to(device)).cpu(), theirs(tokens).logits) < 0.05
    rollout = qerl.generate(model, PROMPTS, 8, 2)
    prompts = [p for p in PROMPTS for _ in range(2)]
    logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].max() < 1e-3
    optimizer = torch.optim.AdamW(qerl.trainable(model).values(), 1e-2)
    weights = qerl.token_weights(rollout.mask)
    loss, _ = qerl.policy_loss(logprobs, logprobs.detach(), torch.arange(8.0, device=device) - 3.5, weights)
    loss.backward()
    optimizer.step()
    after = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
    gain = ((after - logprobs) * weights).sum(1).detach()
    assert gain[4:].mean() > gain[:4].mean()                                             # the better half became likelier


# -------------------------------------------------------------------------------------------------- 3. RMSNorm and AQN

def test_noise_equals_multiplicative_noise_on_weights(qwen):
    """Appendix G: w + Z in the norm is 1 + Z/w on the input channels of the layers that read it, shared by q, k and v."""
    model = qerl.load_model(qwen[0], weights="bf16")
    norm, qkv = model.blocks[0].attention_norm, model.blocks[0].attention.qkv
    x = torch.randn(4, 128)
    with qerl.adaptive_quantization_noise(model, 0.1, torch.Generator().manual_seed(3)):
        noisy = qkv(norm(x))
        z = norm.noisy_weight - norm.weight
    row_noise = 1 + z / norm.weight
    torch.testing.assert_close(noisy, F.linear(norm(x), qkv.weight.dequantize(torch.float32) * row_noise, qkv.bias), rtol=1e-4, atol=1e-4)
    assert 0.05 < z.std() < 0.2 and norm.noisy_weight is None


def test_noise_is_drawn_anew_and_only_inside(qwen):
    model, tokens = qerl.load_model(qwen[0]), torch.arange(20)[None]
    clean, generator, draws = model(tokens), torch.Generator().manual_seed(0), []
    for sigma in (0.0, 0.05, 0.05):
        with qerl.adaptive_quantization_noise(model, sigma, generator):
            draws.append(model(tokens))
    assert torch.equal(draws[0], clean) and torch.equal(model(tokens), clean)
    assert not torch.equal(draws[1], clean) and not torch.equal(draws[1], draws[2])


def scales(model):
    """All RMSNorms of a model."""
    return [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]


def test_noise_is_normal_around_the_scale_as_it_is(qwen):
    """w + sigma z with z ~ N(0, 1), whatever w is: no factor of w, no one sign, no draw twice."""
    model = qerl.load_model(qwen[0], lora_rank=2, train_norms=True)
    trained = torch.linspace(-1, 9, 128)                        # not as loaded, and some of it near 0
    for norm in scales(model):
        norm.weight.data = trained
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(400):
        with qerl.adaptive_quantization_noise(model, 0.02, generator):
            draws.append(torch.stack([norm.noisy_weight - trained for norm in scales(model)]))
    z = torch.stack(draws) / 0.02                               # (draws, norms, channels)
    assert z.shape == (400, 5, 128) and not z.requires_grad
    # Six standard errors are allowed, of figures over many draws.
    of_a_channel = z.flatten(0, 1)                              # (2000, 128)
    assert of_a_channel.mean(0).abs().max() < 6 / 2000 ** 0.5
    assert (of_a_channel.std(0) - 1).abs().max() < 6 / 4000 ** 0.5
    tails = [(z < -1.96).float().mean(), (z > 1.96).float().mean()]
    assert all(abs(tail - 0.025) < 0.002 for tail in tails) and z.abs().max() > 4
    products = [
        z[1:] * z[:-1],                                         # of one draw and the next
        z[:, 1:] * z[:, :-1],                                   # of one norm and the next
        z[..., 1:] * z[..., :-1],                               # of one channel and the next
    ]
    for product in products:
        assert product.mean().abs() < 6 / product.numel() ** 0.5


@pytest.mark.parametrize("name,norms", [("qwen2", 2 * 2 + 1), ("qwen3", 2 * 4 + 1)])
def test_noise_is_on_every_norm_and_ends_with_the_rollout(tmp_path, name, norms):
    """Every norm's scale, Qwen3's q_norm and k_norm among them; it is over even after an error."""
    model = qerl.load_model(make_folder(tmp_path, name)[0])
    assert len(scales(model)) == norms
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(KeyError):
        with qerl.adaptive_quantization_noise(model, 0.1, generator):
            assert all((norm.noisy_weight != norm.weight).all() for norm in scales(model))
            raise KeyError
    assert all(norm.noisy_weight is None for norm in scales(model))
    drawn = []
    for seed in (7, 7, 8):
        torch.manual_seed(len(drawn))                           # of which the noise takes nothing
        with qerl.adaptive_quantization_noise(model, 0.1, torch.Generator().manual_seed(seed)):
            drawn.append(model.norm.noisy_weight)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine", "logarithmic"])
def test_noise_schedules(schedule):
    sigma = [qerl.noise_sigma(step, 100, 10, 1e-2, 5e-4, schedule) for step in range(100)]
    assert sigma[:10] == [0.0] * 10 and len(set(sigma)) == 10
    assert sigma[10] == pytest.approx(1e-2) and sigma[99] == pytest.approx(5e-4)
    assert all(a >= b for a, b in zip(sigma[10:], sigma[11:]))
    if schedule == "exponential":                                                        # Eq. 8
        assert sigma[50] == pytest.approx(1e-2 * (5e-4 / 1e-2) ** (4 / 8))
    assert [qerl.noise_sigma(s, 3, 1, schedule=schedule) for s in range(3)] == [0, 0, 0]
    assert [qerl.noise_sigma(s, 20, 10, 0, 0, schedule) for s in range(20)] == [0] * 20
    assert qerl.noise_sigma(1, 2, 2, 0.1, 0.01, schedule) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule,expected", [
    ("exponential", [16, 8, 4, 2, 1]),
    ("linear", [16, 12.25, 8.5, 4.75, 1]),
    ("cosine", [16, 16 - 15 * (1 - 0.5 ** 0.5) / 2, 8.5, 16 - 15 * (1 + 0.5 ** 0.5) / 2, 1]),
    ("logarithmic", [16] + [16 - 15 * math.log(stage, 5) for stage in (2, 3, 4)] + [1]),
])
def test_noise_schedules_by_hand(schedule, expected):
    """Five noisy stages from 16 to 1, two steps each, after one without noise (Figure 9)."""
    sigma = [qerl.noise_sigma(step, 12, 6, 16, 1, schedule) for step in range(12)]
    assert sigma[::2] == sigma[1::2] == pytest.approx([0, *expected])
    with pytest.raises(AssertionError):
        qerl.noise_sigma(0, 12, schedule="quadratic")


# ------------------------------------------------------------------------------------------------------ 4. transformer

def test_logits_equal_transformers(family):
    folder, theirs = family
    tokens = torch.randint(0, 262, (3, 150))
    with torch.no_grad():
        ours = qerl.load_model(folder, weights="bf16", lora_rank=2)(tokens)
        assert ours.shape == (3, 150, 262) and relative(ours, theirs(tokens).logits) < 1e-4


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4"])
def test_quantised_model_equals_transformers_with_the_decoded_weights(qwen, weights):
    folder, theirs = qwen
    ours, state = qerl.load_model(folder, weights=weights), {k: v.clone() for k, v in theirs.state_dict().items()}
    format = qerl.FORMATS[weights]
    for name, tensor in state.items():
        if name.endswith("_proj.weight"):
            tensor.copy_(format.dequantize(*format.quantize(tensor), torch.float32))
    decoded = transformers.AutoModelForCausalLM.from_config(theirs.config)
    decoded.load_state_dict(state)
    tokens = torch.randint(0, 262, (2, 40))
    with torch.no_grad():
        assert relative(ours(tokens), decoded.eval()(tokens).logits) < 1e-4


def test_sharded_folder(qwen, tmp_path):
    folder, theirs = make_folder(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.arange(30)[None]
    assert torch.equal(qerl.load_model(folder)(tokens), qerl.load_model(qwen[0])(tokens))


@pytest.mark.parametrize("shards", [dict(max_shard_size="200KB"), {}])
def test_only_the_weights_of_the_model_are_read(qwen, tmp_path, shards):
    """Other files with the same tensor names, before and behind the model's in the alphabet, say nothing."""
    folder, theirs = make_folder(tmp_path, **shards)
    names = ["a.safetensors", "consolidated.safetensors", "z.safetensors"] + ["model.safetensors"] * bool(shards)
    for name in names:
        save_file({k: torch.full_like(v, 9) for k, v in theirs.state_dict().items() if k != "lm_head.weight"}, tmp_path / name)
    tokens = torch.arange(30)[None]
    assert torch.equal(qerl.load_model(folder)(tokens), qerl.load_model(qwen[0])(tokens))


def test_a_tensor_comes_from_the_file_that_the_index_says(qwen, tmp_path):
    folder, theirs = make_folder(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for name in set(index.values()):                                    # each shard has all tensors, but the others' are wrong
        right = load_file(tmp_path / name)
        wrong = {k: torch.full_like(v, 9) for k, v in theirs.state_dict().items() if k in index}
        save_file(wrong | right, tmp_path / name)
    tokens = torch.arange(30)[None]
    assert torch.equal(qerl.load_model(folder)(tokens), qerl.load_model(qwen[0])(tokens))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("index,message", [
    (lambda i: "{", f"{INDEX}: cannot be read"),
    (lambda i: "[]", f"{INDEX}: cannot be read"),
    (lambda i: "[" * 100_000, f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"metadata": {}}), f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": [1]}), f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": {"model.norm.weight": 3, "b": "c"}}), f"{INDEX}: cannot be read"),
    (lambda i: json.dumps({"weight_map": i | {"model.norm.weight": "gone.safetensors"}}), "gone.safetensors: cannot be read"),
    (lambda i: json.dumps({"weight_map": i | {"model.norm.weight": i["model.embed_tokens.weight"]}}), "tensor model.norm.weight is missing"),
    (lambda i: json.dumps({"weight_map": i | {"model.norm.weight": "tokenizer.json"}}), "tokenizer.json: cannot be read"),
])
def test_a_damaged_index_is_named(tmp_path, index, message):
    folder, _ = make_folder(tmp_path, max_shard_size="200KB")
    path = tmp_path / INDEX
    path.write_text(index(json.loads(path.read_text())["weight_map"]))
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load_model(folder)
    assert "\n" not in str(error.value) and "fetch the model again" in str(error.value)


def test_compressed_tensors_folder_is_read_as_it_is(qwen, tmp_path):
    """NVFP4A16 made with the library, each of q, k, v and gate, up with its own global scale."""
    folder, theirs = qwen
    tensors, decoded = {}, {}
    for name, tensor in theirs.state_dict().items():
        if name.endswith("_proj.weight") and "layers.1.mlp.down" not in name:            # one layer is left in 16 bit
            state, decoded[name] = compressed_tensors_nvfp4(tensor)
            tensors.update({f"{name.removesuffix('weight')}{k}": v for k, v in state.items() if k.startswith("weight_")})
        elif name != "lm_head.weight":
            tensors[name] = decoded[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((open(f"{folder}/config.json")).read())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = qerl.load_model(str(tmp_path))
    q = tensors["model.layers.0.self_attn.q_proj.weight_packed"]
    packed, _, global_scale = model.blocks[0].attention.qkv.weight.parts
    assert torch.equal(packed[:len(q)], q)
    assert len(global_scale.unique()) == 3
    theirs = transformers.AutoModelForCausalLM.from_config(theirs.config, dtype=torch.float32).eval()
    theirs.load_state_dict({k: v.float() for k, v in decoded.items()}, strict=False)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative(model(tokens), theirs(tokens).logits) < 5e-3                     # the library decodes in 16 bit


def break_tensor(folder, tmp_path, edit, config_edit=None):
    tensors = load_file(f"{folder}/model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads(open(f"{folder}/config.json").read())
    (config_edit or (lambda c: None))(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


UP = "model.layers.1.mlp.up_proj.weight"


def packed_layer(tensors, part, dtype=None, negate=False):
    """Store UP as NVFP4, one of its three parts in another dtype or with one element negative."""
    parts = list(qerl.quantize_nvfp4(tensors.pop(UP)))
    parts[part] = parts[part].to(dtype or parts[part].dtype)
    if negate:
        parts[part] = (parts[part].float() * torch.cat([-torch.ones(1), torch.ones(parts[part].numel() - 1)]).view_as(parts[part])).to(
            parts[part].dtype)
    tensors.update(zip((f"{UP}_packed", f"{UP}_scale", f"{UP}_global_scale"), parts))


@pytest.mark.parametrize("edit,config_edit,message", [
    (lambda t: t[UP].view(-1)[7].fill_(float("nan")), None, f"tensor {UP} holds NaN"),
    (lambda t: t.pop(UP), None, f"tensor {UP} is missing"),
    *[(lambda t, dtype=dtype: t.update({UP: t[UP].to(dtype)}), None, f"tensor {UP} is {dtype}")
      for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)],
    (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e5m2)}), None, "tensor model.norm.weight is"),
    (lambda t: packed_layer(t, 0, torch.float32), None, "weight_packed is torch.float32"),
    (lambda t: packed_layer(t, 0, torch.int8), None, "weight_packed is torch.int8"),
    (lambda t: packed_layer(t, 1, torch.float32), None, "weight_scale is torch.float32"),
    (lambda t: packed_layer(t, 1, negate=True), None, "block scales are at least 0"),
    (lambda t: packed_layer(t, 2, negate=True), None, "block scales are at least 0"),
    (lambda t: t.update({UP: t[UP][:, :64]}), None, rf"tensor {UP} has shape \(192, 64\)"),
    (lambda t: None, lambda c: c.update(intermediate_size=200), "down_proj has 200 input features, not divisible by nvfp4's block of 16"),
    (lambda t: None, lambda c: c.update(model_type="gpt2"), "architecture gpt2 is not supported"),
    (lambda t: None, lambda c: c.update(model_type="no-such"), "config.json cannot be used"),
    (lambda t: None, lambda c: c.update(quantization_config={"quant_method": "gptq"}), "gptq are not supported"),
    (lambda t: None, lambda c: c.update(use_sliding_window=True, sliding_window=8), "sliding-window"),
    (lambda t: None, lambda c: c.update(num_hidden_layers=1, layer_types=["full_attention"]), "of a layer that config.json does not ask for"),
    (lambda t: t.update({UP.replace("weight", "bias"): torch.ones(192)}), None, "has a bias, which config.json does not ask for"),
])
def test_unusable_models_are_named(qwen, tmp_path, edit, config_edit, message):
    def widen(tensors):
        edit(tensors)
        if config_edit and "200" in message:
            for name in list(tensors):
                if "gate_proj" in name or "up_proj" in name:
                    tensors[name] = F.pad(tensors[name], (0, 0, 0, 8))
    folder = break_tensor(qwen[0], tmp_path, widen, config_edit)
    with pytest.raises(qerl.UserError, match=message) as error:
        qerl.load_model(folder)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(qerl.UserError, match="config.json cannot be used") as error:
        qerl.load_model(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("activations,said", [(None, False), ({"num_bits": 4, "type": "float"}, True)])
def test_quantised_activations_are_said_to_stay(qwen, tmp_path, capsys, activations, said):
    stored = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": activations}}}
    folder = break_tensor(qwen[0], tmp_path, lambda t: packed_layer(t, 0), lambda c: c.update(quantization_config=stored))
    checks.say_what_stays(qerl.load_model(folder).config)
    assert ("activations stay 16 bit" in capsys.readouterr().out) == said


def test_pickles_are_never_loaded(qwen, tmp_path):
    (tmp_path / "config.json").write_text(open(f"{qwen[0]}/config.json").read())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(qerl.UserError, match="never loaded"):
        qerl.load_model(str(tmp_path))


@pytest.mark.parametrize("train_norms", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_adapter_loads_in_peft_with_the_same_logits(tmp_path, name, train_norms):
    from peft import PeftModel
    folder, theirs = make_folder(tmp_path / "base", name)
    ours = with_lora(folder, weights="bf16", train_norms=train_norms, lora_alpha=6)
    save_adapter(ours, str(tmp_path / "adapter"), folder)
    tokens = torch.randint(0, 262, (2, 30))
    with torch.no_grad():
        assert relative(ours(tokens), theirs(tokens).logits) > 1e-2
        peft = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))
        assert relative(ours(tokens), peft(tokens).logits) < 1e-4
        again = qerl.load_model(folder, weights="bf16", lora_rank=4, lora_alpha=6, train_norms=train_norms)
        load_adapter(again, str(tmp_path / "adapter"))
        assert torch.equal(again(tokens), ours(tokens))


def test_reference_policy_is_the_model_without_adapters(qwen):
    tokens = torch.arange(20)[None]
    plain, tuned = qerl.load_model(qwen[0]), with_lora(qwen[0], train_norms=True)
    fresh = qerl.load_model(qwen[0], lora_rank=4)
    assert torch.equal(fresh(tokens), plain(tokens))            # where training starts
    assert not torch.allclose(tuned(tokens), plain(tokens))
    with qerl.adapters_off(tuned):
        assert torch.equal(tuned(tokens), plain(tokens))
    assert not torch.allclose(tuned(tokens), plain(tokens))


# ---------------------------------------------------------------------------------------------------------- 5. sampler

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]


@pytest.mark.parametrize("slots", [2, 5, 100])
def test_greedy_completions_equal_transformers(family, slots):
    folder, theirs = family
    model = qerl.load_model(folder, weights="bf16")
    rollout = qerl.generate(model, PROMPTS, 12, group_size=2, temperature=0, slots=slots)
    assert rollout.tokens.shape == (8, 12) and not rollout.finished.any()
    for i, prompt in enumerate(PROMPTS):
        expected = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12,
                                   do_sample=False, eos_token_id=None)[0, len(prompt):]
        assert rollout.tokens[2 * i].tolist() == rollout.tokens[2 * i + 1].tolist() == expected.tolist()


def test_logprobs_and_entropy_are_the_policys(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 20, 3, temperature=0.7, eos=range(40), slots=4, generator=torch.Generator().manual_seed(0))
    assert rollout.finished.any() and rollout.length.max() <= 20 and rollout.length.min() >= 1
    for i in range(12):
        prompt, n = PROMPTS[i // 3], int(rollout.length[i])
        completion = rollout.tokens[i, :n].tolist()
        assert all(t >= 40 for t in completion[:-1]) and (completion[-1] < 40) == bool(rollout.finished[i])
        assert rollout.finished[i] or n == 20
        logits = model(torch.tensor([prompt + completion]))[0, len(prompt) - 1:-1] / 0.7
        logp = logits.log_softmax(-1)
        torch.testing.assert_close(rollout.logprobs[i, :n], logp[range(n), completion], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rollout.entropy[i, :n], -(logp.exp() * logp).sum(-1), rtol=1e-4, atol=1e-4)
    assert (rollout.logprobs[~rollout.mask] == 0).all() and int(rollout.mask.sum()) == int(rollout.length.sum())


def test_training_logprobs_equal_the_samplers(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=torch.Generator().manual_seed(1))
    prompts = [p for p in PROMPTS for _ in range(2)]
    for chunk in (7, 4096):
        logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length, chunk=chunk)
        torch.testing.assert_close(logprobs, rollout.logprobs, rtol=1e-4, atol=1e-4)
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert abs(kl) < 1e-6 and 1 <= ratio < 1.001
    assert 1 < rollout.length.min() < rollout.length.max()                               # with padding, and the tokens' gradients, too
    one_by_one = qerl.token_logprobs_one_by_one(model, prompts, rollout.tokens, rollout.length)
    torch.testing.assert_close(one_by_one, logprobs, rtol=1e-5, atol=1e-5)
    parameters = list(qerl.trainable(model).values())
    for expected, found in zip(*(torch.autograd.grad(t.square().sum(), parameters) for t in (one_by_one, logprobs)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_is_printed_as_shapes():
    batch = Batch([[1, 2]] * 3, torch.zeros(3, 4, dtype=torch.long), *[torch.zeros(3)] * 4)
    assert repr(batch).startswith("Batch of 3 prompts: tokens torch.int64 [3, 4], length torch.float32 [3]") and "old_" not in repr(batch)


def test_packing_holds_each_prompt_once():
    prompts, length = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [4, 5]], torch.tensor([2, 4, 5, 1, 3])
    rows = [p + [10 * i + k for k in range(n)] for i, (p, n) in enumerate(zip(prompts, length.tolist(), strict=True), 1)]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True, padding_value=-1)
    packing = qerl.pack(prompts, length)
    line = tokens.flatten()[packing.origin]
    assert len(line) == 3 + 2 + 1 + 15 and (line >= 0).all()
    assert packing.place.shape == tokens.shape and ((line[packing.place] == tokens) | (tokens == -1)).all()


def test_noise_shows_as_mismatch(qwen):
    model = with_lora(qwen[0])
    with qerl.adaptive_quantization_noise(model, 0.05, torch.Generator().manual_seed(0)):
        rollout = qerl.generate(model, PROMPTS, 16, 2, generator=torch.Generator().manual_seed(1))
    logprobs = qerl.token_logprobs(model, [p for p in PROMPTS for _ in range(2)], rollout.tokens, rollout.length).detach()
    kl, ratio = qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)
    assert kl > 1e-4 and ratio > 1.05
    assert qerl.truncated_importance(logprobs, rollout.logprobs, 1.02).max().item() == pytest.approx(1.02)


def test_samples_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0]).repeat(40000, 1)
    for temperature, top_p, expected in ((1.0, 1.0, (logits[0]).softmax(-1)), (0.5, 1.0, (logits[0] / 0.5).softmax(-1)),
                                         (1.0, 0.7, torch.tensor([math.e, 1.0, 0, 0, 0]) / (math.e + 1)), (1.0, 1e-9, torch.eye(5)[0])):
        token, logprob, _ = qerl.sample(logits, temperature, top_p, torch.Generator().manual_seed(0))
        frequency = torch.bincount(token, minlength=5) / len(token)
        assert (frequency - expected).abs().max() < 0.01
        assert torch.allclose(logprob, (logits / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0])


@pytest.mark.parametrize("top_p,kept", [(0.3, [2]), (0.5, [2]), (0.51, [0, 2]), (0.79, [0, 2]),
                                        (0.81, [0, 2, 3]), (0.99, [0, 1, 2, 3])])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
    probs = torch.tensor([[0.3, 0.05, 0.5, 0.15], [0.0, 1.0, 0.0, 0.0]])
    cut = qerl.nucleus(probs, top_p)
    assert cut[0].nonzero()[:, 0].tolist() == kept and torch.equal(cut[0, kept], probs[0, kept])
    assert torch.equal(cut[1], probs[1])


def test_top_p_and_temperature_reach_the_sampler(qwen):
    """Only the likeliest token is left by a tiny top-p, or by a tiny temperature."""
    model = qerl.load_model(qwen[0])
    greedy = qerl.generate(model, PROMPTS, 8, temperature=0).tokens
    for options in (dict(top_p=1e-6), dict(temperature=1e-6)):
        assert torch.equal(qerl.generate(model, PROMPTS, 8, **options).tokens, greedy)
    assert not torch.equal(qerl.generate(model, PROMPTS, 8).tokens, greedy)


# ------------------------------------------------------------------------------------------------------- 6. objectives

def trl_trainer(folder, tmp_path, **options):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    config = GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, bf16=False, use_cpu=True,
                        report_to=[], gradient_checkpointing=False, epsilon=0.2, epsilon_high=0.28, steps_per_generation=1,
                        use_bias_correction_kl=False, **options)
    return GRPOTrainer(model=transformers.AutoModelForCausalLM.from_pretrained(folder), reward_funcs=lambda completions, **_: [0.0] * len(completions),
                       args=config, train_dataset=Dataset.from_dict({"prompt": ["a"]}),
                       processing_class=transformers.AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("algorithm,beta", [("grpo", 0.0), ("grpo", 0.04), ("dapo", 0.0)])
def test_loss_and_gradient_equal_trl(qwen, tmp_path, algorithm, beta):
    folder = qwen[0]
    trainer = trl_trainer(folder, tmp_path, loss_type=algorithm, beta=beta)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(0)
    length, prompts = torch.tensor([9, 4, 7, 1]), [[5, 6, 7, 8]] * 4
    completions = torch.randint(20, 250, (4, 9))
    mask = torch.arange(9) < length[:, None]
    completions = completions * mask
    ours = qerl.load_model(folder, weights="bf16", lora_rank=2, train_norms=True)         # norms: gradients to compare
    logprobs = qerl.token_logprobs(ours, prompts, completions, length)
    old = (logprobs.detach() + 0.3 * torch.randn(4, 9)) * mask                           # some ratios are clipped
    reference = (logprobs.detach() + 0.3 * torch.randn(4, 9)) * mask
    advantages = qerl.group_advantages(torch.tensor([[2.2, 0.0, 0.2, 2.0]]))[0]
    loss, kl = qerl.policy_loss(logprobs, old, advantages, qerl.token_weights(mask, algorithm), 0.2, 0.28,
                                reference if beta else None, beta)
    loss.backward()
    theirs = trainer._compute_loss(trainer.model, {
        "prompt_ids": torch.tensor(prompts), "prompt_mask": torch.ones(4, 4, dtype=torch.long), "completion_ids": completions,
        "completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum()})
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    for norm in (m for m in ours.modules() if isinstance(m, qerl.RMSNorm)):
        their_grad = trainer.model.get_parameter(f"{norm.name}.weight").grad
        assert relative(norm.weight.grad, their_grad) < 1e-3
    if beta:
        assert kl.item() > 0


def test_an_advantage_of_zero_is_no_loss_whatever_the_ratio():
    logprobs = torch.tensor([[0.0, -1.0], [-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0], [-1.5, -2.0]])
    advantages = torch.tensor([0.0, 1.0])
    loss, _ = qerl.policy_loss(logprobs, old, advantages, torch.full((2, 2), 0.25))
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 + 1) / 4) and logprobs.grad.tolist() == [[0, 0], [0, -0.25]]


@pytest.mark.parametrize("options", [dict(top_p=0.0), dict(top_p=-1.0), dict(temperature=-0.1)])
def test_what_nothing_can_be_drawn_by_is_refused(qwen, options):
    with pytest.raises(ValueError, match="top_p must be above 0, and the temperature at least 0"):
        qerl.generate(qerl.load_model(qwen[0]), [[1]], 2, **options)


def test_advantages_are_group_relative():
    rewards = torch.tensor([[1.0, 0, 0, 1], [2, 2, 2, 2], [0, 0, 0, 5]])
    advantages = qerl.group_advantages(rewards)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (torch.tensor([[r.std()] for r in rewards]) + 1e-4)
    torch.testing.assert_close(advantages, expected)
    assert (advantages[1] == 0).all()
    assert (qerl.group_advantages(torch.full((1, 8), 0.2)) == 0).all()                   # whatever the mean rounds to


def test_token_weights_by_hand():
    """Four tokens, two tokens, and a completion of which none counts."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    grpo = torch.tensor([[1 / 12] * 4, [1 / 6, 1 / 6, 0, 0], [0] * 4])
    torch.testing.assert_close(qerl.token_weights(mask, "grpo"), grpo)
    assert torch.equal(qerl.token_weights(mask, "dapo"), mask / 6)
    assert qerl.token_weights(mask[2:], "dapo").tolist() == [[0] * 4]      # and not NaN


def test_mismatch_and_its_correction_by_hand():
    """Ratios π_old / π_rollout of 2, 1/3 and 1, and padding that counts nowhere."""
    old = torch.tensor([[2.0, 1 / 3], [1.0, 1e9]]).log() - 1.5
    rollout = torch.full((2, 2), -1.5)
    mask = torch.tensor([[True, True], [True, False]])
    kl, ratio = qerl.mismatch(old, rollout, mask)
    assert kl == pytest.approx((2 - 1 - math.log(2) + 1 / 3 - 1 + math.log(3)) / 3, rel=1e-5)
    assert ratio == pytest.approx(3, rel=1e-5)
    weights = qerl.truncated_importance(old, rollout, 1.5)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1 / 3], [1.0, 1.5]]))


@pytest.mark.parametrize("advantage,ratio,gain,slope", [
    (1.0, 1.2, 1.2, 1.2), (1.0, 1.5, 1.28, 0), (1.0, 0.5, 0.5, 0.5),
    (-2.0, 1.5, -3.0, -3.0), (-2.0, 0.9, -1.8, -1.8), (-2.0, 0.5, -1.6, 0),
])
def test_the_clipped_gain_by_hand(advantage, ratio, gain, slope):
    """Eq. 3 without KL: beyond the clip range a step that makes it worse still has a gradient."""
    logprobs = torch.tensor([[math.log(ratio) - 1]], requires_grad=True)
    loss, kl = qerl.policy_loss(
        logprobs, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.tensor([[0.5]]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-gain / 2) and kl.item() == 0
    assert logprobs.grad.item() == pytest.approx(-slope / 2)


def test_kl_by_hand():
    """e^x - x - 1 with x = log 2, for π_ref twice π_θ; importance weighs the gain alone."""
    logprobs = torch.tensor([[-2.0]], requires_grad=True)
    loss, kl = qerl.policy_loss(
        logprobs, logprobs.detach(), torch.tensor([3.0]), torch.tensor([[0.5]]),
        ref_logprobs=logprobs.detach() + math.log(2), beta=0.1, importance=torch.tensor([[0.25]]),
    )
    loss.backward()
    expected = 1 - math.log(2)
    assert kl.item() == pytest.approx(expected / 2) and not kl.requires_grad
    assert loss.item() == pytest.approx((0.1 * expected - 3 * 0.25) / 2)
    assert logprobs.grad.item() == pytest.approx((0.1 * (1 - 2) - 3 * 0.25) / 2)


def test_micro_batches_add_up_to_the_batch(qwen):
    model = with_lora(qwen[0])
    rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=torch.Generator().manual_seed(1))
    prompts, advantages = [p for p in PROMPTS for _ in range(2)], torch.randn(8)
    weights, gradients = qerl.token_weights(rollout.mask, "dapo"), []
    for rows in ([range(8)], [[0, 5], [1, 2, 3], [4], [7, 6]]):
        model.zero_grad()
        for i in map(list, rows):
            logprobs = qerl.token_logprobs(model, [prompts[r] for r in i], rollout.tokens[i], rollout.length[i])
            qerl.policy_loss(logprobs, rollout.logprobs[i], advantages[i], weights[i])[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()]))
    assert relative(gradients[0], gradients[1]) < 1e-4


def test_recomputed_blocks_give_the_same_gradient(qwen):
    model, gradients = with_lora(qwen[0]), []
    for recompute in (False, True):
        if recompute:
            model.recompute_in_backward()
        model.zero_grad()
        model(torch.arange(60).view(2, 30)).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()]))
    assert torch.equal(*gradients)


def test_recomputed_blocks_leave_out_what_nobody_reads(qwen):
    """The product that ends a block is computed in forward and not again in backward; without recomputation it always is."""
    model = with_lora(qwen[0])
    found = []
    for block in model.blocks:
        block.mlp.down.register_forward_hook(lambda layer, x, y: found.append(bool(y.any())))
    for _ in range(2):
        model(torch.arange(60).view(2, 30)).square().mean().backward()
        model.recompute_in_backward()
    count = len(model.blocks)
    assert found == [True] * count + [True] * count + [False] * count


def test_gradient_is_the_same_each_time_on_several_threads(qwen):
    model, gradients = with_lora(qwen[0]), []
    completions = torch.randint(0, 60, (512, 2), generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        model.zero_grad()
        qerl.token_logprobs(model, [[1, 2, 3]] * 512, completions, torch.full((512,), 2)).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()]))
    assert all(torch.equal(gradients[0], g) for g in gradients[1:])


def test_recomputed_blocks_decode_each_weight_once_a_pass(qwen, monkeypatch):
    """Forward, and the recomputation that backward needs: two times, and what forward decoded is not kept until then."""
    import weakref
    model, decoded = with_lora(qwen[0]), []
    model.recompute_in_backward()
    dequantize = qerl.PackedWeight.dequantize

    def counted(packed, dtype):
        weight = dequantize(packed, dtype)
        decoded.append(weakref.ref(weight))
        return weight
    monkeypatch.setattr(qerl.PackedWeight, "dequantize", counted)
    loss = model(torch.arange(60).view(2, 30)).square().mean()
    layers = len(model.quantized_layers())
    assert len(decoded) == layers and not any(ref() is not None for ref in decoded)
    loss.backward()
    assert len(decoded) == 2 * layers


def test_idle_slots_are_given_up_at_the_end(qwen, monkeypatch):
    """40 completions of very different length: half of the slots go once they idle, and no token changes."""
    model, rows = qerl.load_model(qwen[0]), []
    prompts = [[i, 3, 2 * i + 1] for i in range(40)]
    eos = set(qerl.generate(model, prompts, 24, temperature=0).tokens[:24, 3].tolist())   # 24 or more end here or before
    step = qerl.Sampler.step
    monkeypatch.setattr(qerl.Sampler, "step", lambda self: (rows.append(len(self.completion)), step(self)))
    kept = qerl.generate(model, prompts, 24, temperature=0, eos=eos, slots=4)
    assert set(rows) == {4}
    rows.clear()
    given_up = qerl.generate(model, prompts, 24, temperature=0, eos=eos, slots=40)
    assert rows[0] == 40 and rows[-1] == 20 and kept.length.max() > 4
    assert torch.equal(kept.tokens, given_up.tokens) and torch.equal(kept.length, given_up.length)


def test_no_completion_is_lost_with_an_odd_number_of_slots(qwen, monkeypatch):
    """33 slots, of which 16 idle at once: 17 completions cannot go on in 16."""
    model, start = qerl.load_model(qwen[0]), qerl.Sampler.__init__

    def cut(self, *args):
        start(self, *args)
        self.limit[:16] = 2
    monkeypatch.setattr(qerl.Sampler, "__init__", cut)
    rollout = qerl.generate(model, [[i, 3] for i in range(33)], 8, slots=33)
    assert rollout.length.tolist() == [2] * 16 + [8] * 17


def test_output_layer_runs_in_chunks(qwen):
    """No tensor of more than `chunk` rows of the vocabulary is ever made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Rows(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and t.dim() and t.shape[-1] == 262:
                    self.most = max(self.most, t.numel() // 262)
            return out
    model, length = with_lora(qwen[0]), torch.tensor([30, 20])
    with Rows() as rows:
        qerl.token_logprobs(model, [[1, 2]] * 2, torch.randint(0, 262, (2, 30)), length, chunk=8).sum().backward()
    assert 0 < rows.most <= 128                                                          # 128: the lm_head's own transpose


# -------------------------------------------------------------------------------------------------------- train_gsm8k

def test_word_problems_are_gsm8k_shaped_and_disjoint():
    train, held_out = made_up_problems()
    assert not {p["question"] for p in train} & {p["question"] for p in held_out}
    for problem in train[:300]:
        for left, right in (c.split("=") for c in re.findall(r"<<(.*?)>>", problem["answer"])):
            assert eval(left) == int(right)
        assert problem["answer"].endswith(f"#### {right}")
    careless = made_up_problems(careless=1.0)[0]
    right = {p["question"]: p["answer"] for p in train}
    assert any(p["question"] in right and right[p["question"]] != p["answer"] for p in careless)


@pytest.mark.parametrize("text,number", [
    ("18", "18"), ("$1,250.00", "1250"), ("\\boxed{42}", "42"), ("-3", "-3"), ("-$7.50", "-7.5"), ("it is 5 + 3 = 8 apples.", "8"),
    (".5", "0.5"), ("70,000", "70000"), ("20%", "20"), ("12.", "12"),
    ("3-5", "5"), ("Total-5", "5"), ("$-5", "-5"), ("wait...18", "18"), ("3,4", "4"), ("\u22123", "-3"), ("x=-5", "-5"),
    ("1/2", "None"), ("\\frac{1}{2}", "None"), ("\\dfrac{1}{2}", "None"), ("(3)/(4)", "None"), ("3/4 of 20 is 15", "15"), ("1{,}042", "1042")])
def test_tolerant_numbers(text, number):
    assert parse_number(text) == (None if number == "None" else Decimal(number))


def test_rewards():
    good = "<think>6 * 7 = 42</think>\n<answer>$42.00</answer>"
    reward = train_gsm8k.reward
    assert reward(good, Decimal(42), "paper") == (2.2, True)
    assert reward(good, Decimal(41), "paper") == (0.2, False)
    assert reward("<answer>42</answer>", Decimal(42), "paper") == (2.0, True)
    assert reward("the answer is 42", Decimal(42), "paper") == (0.0, False)
    assert reward(good + " and more", Decimal(42), "paper") == (2.0, True)
    assert reward(good, Decimal(42), "answer") == (1.0, True)
    assert reward(good, Decimal(41), "answer") == (0.0, False)
    assert reward("so \\boxed{42}", Decimal(42), "answer") == (1.0, True)
    assert parse_number("none") is None
    assert final_number({"answer": "so 12\n#### 1,200 m2"}) == 1200
    assert stated_number("so \\boxed{1,042} it is, in 2 days") == 1042
    assert stated_number("so 12, no, 13.") == 13


# What is not 5, though a 5 is its last digit.
NOT_FIVE = [
    "1e5", "5E5", "0x5", "{1}/{5}", "1\u20445", "\u00bd5", "5\u00bd", "5\u00b2", "2^5", "1,5", "0,005", "5.5.5", "3:5", "3-5",
    "\\sqrt{5}", "\\frac{1}{5}", "\\frac15", "\\frac{x}{5}", "x/5", "5\\pi", "\\pm 5", "\\log 5", "2 \\times 5", "x_5", "5k",
    "- 5", "\u20135", "\u22125", "-{5}", "-(5)", "-\\$5", "\\$-5", "- $5", "negative 5", "x = - 5",
    "x+5", "x - 5", "(x + 5)", "5x", "3, 5", "3;5", "3\n5", "4 or 5", "3 and 5", "1 2 5", "1 005", "x = 3 or x = 5", "3 apples, 5 pears",
]
FIVE = [
    "5", "5.00", "5e0", "$5.00", "\\$5", "5%", "5\\%", "05", "+5", "5.", "5!", "{5}", "(5)", "$5$", "\\(5\\)", "**5**", "x=5", "5=x",
    "5 dollars", "5 apples, no more", "\\text{5 apples}", "5 \\text{ apples}", "5\\,\\text{cm}", "\\mathbf{5}", "\\boxed{5}",
    "5\\text{ cm}^3", "5 \\mathrm{ft}^{2}",
    "5 m\u00b2", "5 km/h", "5^\\circ", "\u20ac5", "US$5", "Total: 5", "Answer - 5", "\\approx 5",
    "2 + 3 = 5 apples.", "90-85=5", "1/4 of 20 is 5",
]


@pytest.mark.parametrize("text,five", [(text, False) for text in NOT_FIVE] + [(text, True) for text in FIVE])
def test_only_one_clear_number_is_rewarded(text, five):
    for answer in (f"<answer>{text}</answer>", f"so \\boxed{{{text}}}", f"<answer>after 3 tries \\boxed{{{text}}}</answer>"):
        assert train_gsm8k.reward(answer, Decimal(5), "answer") == (five, five)


@pytest.mark.parametrize("text,number", [
    ("<answer>1,250.00</answer>", 1250), ("\\boxed{1{,}250}", 1250), ("\\boxed{1\\,250}", 1250), ("\\boxed{1 250}", 1250),
    ("\\boxed{1e5}", 100000), ("\\boxed{\\text{\\$1,250}}", 1250), ("\\boxed{- 5}", -5), ("\\boxed{x=-5}", -5),
    ("\\boxed{5} or \\boxed{6", 5), ("<answer>5</answer> <answer>6", 5), ("<answer>3 <answer>5</answer> 7</answer>", 5), ("5", None)])
def test_answered_number(text, number):
    assert answered_number(text) == number


@pytest.mark.parametrize("gold,number", [
    ("18", 18), ("-18", -18), ("$18", 18), ("18 dollars", 18), ("1,250,000", 1250000), ("3.0e5", 300000), ("1e3", 1000), ("1 000", 1000),
    ("1,200 m2", 1200), ("5 km/h", 5), ("5 m^2", 5), ("5 t-shirts", 5), ("1,00", None), ("1 00", None), ("3:30", None), ("2-3", None), ("1/2", None), ("3 5", None)])
def test_right_answers_are_read_or_refused(tmp_path, gold, number):
    line = json.dumps({"question": "q", "answer": f"so 7\n#### {gold}\n8"})
    (tmp_path / "train.jsonl").write_text('{"question": "p", "answer": "#### 1"}\n' + line + "\n")
    if number is not None:
        assert final_number(read_questions(tmp_path, "train.jsonl")[1]) == number
    else:
        with pytest.raises(qerl.UserError, match=re.escape(f"train.jsonl:2: '{gold}' behind")):
            read_questions(tmp_path, "train.jsonl")


LONG_UNITS = ["<answer>", "</answer>", "\\boxed{", "\\boxed{{}", "{", "5", "1,", ",000", "1 000 ", "5e", "1e1,", "\\frac{", "1/ ", " ", "=",
              "5=", "5 or ", "is ", "- ", "^ ", "<think>", "</think><answer>"]


@pytest.mark.parametrize("unit", LONG_UNITS)
@pytest.mark.parametrize("frame", ["{}", "<think></think><answer>{}0</answer>", "1{}0"])
def test_long_texts_are_graded_in_no_time(unit, frame):
    """100,000 characters take some 20 ms of a CPU; what grows with the square took seconds."""
    text = frame.replace("{}", unit * (100_000 // len(unit)))
    for read in (answered_number, stated_number, parse_number, train_gsm8k.FORMAT.fullmatch):
        start = time.process_time()
        read(text)
        assert time.process_time() - start < 0.5


def test_cut_rows_covers_every_row_within_the_budget():
    rng = random.Random(0)
    prompts, lengths = [[k // 4] * (9 + k // 4) for k in range(80)], [rng.randint(1, 90) for _ in range(79)] + [700]
    order = rng.sample(range(80), 80)
    prompts, lengths = [prompts[i] for i in order], [lengths[i] for i in order]
    pieces = cut_rows(prompts, lengths, 400)
    assert sorted(i for piece in pieces for i in piece) == list(range(80))
    for piece in pieces:
        packing = qerl.pack([prompts[i] for i in piece], torch.tensor([lengths[i] for i in piece]))
        assert len(piece) == 1 or len(packing.origin) <= 400 and packing.place.numel() <= 1600
    assert len(pieces) < 1.3 * (sum(lengths) + sum(map(len, map(list, set(map(tuple, prompts)))))) / 400 + 2


def test_cut_rows_by_hand():
    """A prompt of 50 tokens counts once in a piece; padded, its rows have at most four budgets."""
    prompts = [[1] * 50] * 8
    assert cut_rows(prompts, [10] * 8, 130) == [list(range(8))]
    assert cut_rows(prompts, [10] * 8, 129) == [list(range(7)), [7]]
    assert cut_rows(prompts, [10] * 8, 30) == [[i] for i in range(8)]
    assert cut_rows(prompts, [50] + [1] * 7, 150) == [list(range(6)), [6, 7]]        # 6 rows of 100


def test_dynamic_sampling_replaces_groups_without_variance():
    draws = iter([[[1, 1], [0, 1]], [[0, 0], [1, 1]], [[1, 0], [0, 0]], None])

    def draw():
        rewards = torch.tensor(next(draws)).float()
        tokens = torch.zeros(4, random.randint(1, 3), dtype=torch.long)
        rollout = qerl.Rollout(tokens, tokens.float(), tokens.float(), torch.ones(4, dtype=torch.long), torch.ones(4, dtype=torch.bool))
        return train_gsm8k.Samples([{"prompt": [1]}] * 2, rollout, list("abcd"), rewards, rewards)
    samples = train_gsm8k.dynamic_sampling(draw(), draw)
    assert samples.rewards.tolist() == [[0, 1], [1, 0]] and samples.texts == ["c", "d", "a", "b"]
    assert len(samples.rollout.tokens) == 4
    assert len(samples.draws) == 3 and samples.draws[1].rewards.tolist() == [[0, 0], [1, 1]]


def test_a_completions_text_is_of_its_own_tokens():
    """Without the padding behind it, and without its end."""
    tokens = torch.tensor([[65, 66, 67], [68, 260, 69], [70, 71, 72]])
    length = torch.tensor([3, 2, 1])
    rollout = qerl.Rollout(tokens, None, None, length, None)
    assert train_gsm8k.decode_all(ByteText(), rollout) == ["ABC", "D", "F"]


def test_dynamic_sampling_gives_up_after_four_draws():
    """Groups without a signal then fill the batch, in the order in which they were drawn."""
    drawn = []

    def draw():
        rewards = torch.zeros(2, 2)
        rewards[1, 1] = float(len(drawn) == 2)                  # one group of the third draw
        drawn.append(rewards)
        rows = torch.full((4, len(drawn)), len(drawn))
        finished = torch.ones(4, dtype=torch.bool)
        rollout = qerl.Rollout(rows, rows.float(), rows.float(), rows[:, 0], finished)
        questions = [{"prompt": [len(drawn), i]} for i in range(2)]
        return train_gsm8k.Samples(questions, rollout, list("abcd"), rewards, rewards)
    samples = train_gsm8k.dynamic_sampling(draw(), draw)
    assert len(drawn) == len(samples.draws) == 4
    assert [q["prompt"] for q in samples.questions] == [[3, 1], [1, 0]]
    assert samples.rollout.tokens.tolist() == [[3, 3, 3, 0]] * 2 + [[1, 0, 0, 0]] * 2
    assert samples.rollout.length.tolist() == [3, 3, 1, 1] and samples.texts == list("cdab")
    assert samples.rewards.tolist() == samples.correct.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("count", [3, 10, 25])
def test_questions_come_once_a_pass_in_a_new_order_each(count):
    questions = [{"question": str(i)} for i in range(10)]

    def asked(seed, of=questions):
        draws = [train_gsm8k.next_questions(of, i, count, seed) for i in range(0, 300, count)]
        return [int(q["question"]) for draw in draws for q in draw][:300]
    order = asked(0)
    passes = [order[i:i + 10] for i in range(0, 300, 10)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len(set(map(tuple, passes))) == 30 and asked(0) == order and asked(1)[:10] != order[:10]


def test_the_learning_rate_rises_linearly_then_falls_as_a_cosine():
    rates = [train_gsm8k.learning_rate(step, 13, 2.0, 0.25) for step in range(13)]
    falling = [1 + math.cos(math.pi * k / 10) for k in range(10)]
    assert rates == pytest.approx([2 / 3, 4 / 3, 2.0, *falling])
    assert [train_gsm8k.learning_rate(step, 2, 1.0, 0.0) for step in range(2)] == [1.0, 1.0]
    assert train_gsm8k.learning_rate(0, 1, 1.0, 0.5) == 1.0


# The loop is held to a second one, without packing, pieces or PyTorch's optimiser, on a run in which
# each step has something to learn.

def words_of(tokens):
    """A completion of the quiz as a list of tokens, without its end."""
    return [t for t in tokens if t != QUIZ_EOS]


def quiz_verdict(tokens):
    """(the number that a completion answers, or None; whether in the paper's format), by its tokens."""
    words = words_of(tokens)
    answers = [t for t in words if t in TAGGED] or [t for t in words if t in BOXED]
    number = {**BOXED, **TAGGED}[answers[-1]] if answers else None
    return number, bool(words) and words[0] in TAGGED and words[-1] in TAGGED


def quiz_stated(tokens):
    """The number that evaluation takes: without an answer, the last run of the token 1."""
    number, _ = quiz_verdict(tokens)
    runs = re.findall("1+", "".join(QUIZ_TOKENS[t] for t in words_of(tokens)))
    return number if number or not runs else int(runs[-1])


def quiz_number(prompt):
    """The right answer of a question, given as tokens."""
    return 1 + len(prompt) % 2


def flat_policy(policy):
    return torch.cat([p.flatten() for p in policy.values()])


def recorded(monkeypatch):
    """A list that fills with each call of `generate`: the policy, its noise, what was drawn how."""
    calls = []
    generate = qerl.generate
    draw = qerl.sample

    def recorded_sample(logits, temperature, top_p, generator):
        calls[-1].drawn_with.add((temperature, top_p))
        return draw(logits, temperature, top_p, generator)

    def recorded_generate(model, prompts, *args, **options):
        policy = {name: p.detach().clone() for name, p in qerl.trainable(model).items()}
        call = types.SimpleNamespace(
            number=len(calls), prompts=prompts, policy=policy, drawn_with=set(),
        )
        call.noise = [
            None if norm.noisy_weight is None else norm.noisy_weight - norm.weight.detach()
            for norm in scales(model)
        ]
        calls.append(call)
        call.rollout = generate(model, prompts, *args, **options)
        return call.rollout
    monkeypatch.setattr(qerl, "sample", recorded_sample)
    monkeypatch.setattr(qerl, "generate", recorded_generate)
    return calls


def policy_of(settings, policy):
    """The model of a run with these trained parameters."""
    model = qerl.load_model(
        settings.model, lora_rank=settings.lora_rank, lora_alpha=settings.lora_alpha,
        train_norms=settings.train_norms,
    )
    for name, p in qerl.trainable(model).items():
        p.data.copy_(policy[name])
    return model


def completions_of(call, settings):
    """The completions of a call of `generate`, each with its question, its verdict and its reward."""
    found = []
    for i, length in enumerate(call.rollout.length.tolist()):
        prompt = call.prompts[i // settings.group]
        tokens = call.rollout.tokens[i, :length].tolist()
        number, in_format = quiz_verdict(tokens)
        correct = number == quiz_number(prompt)
        reward = 2.0 * correct + 0.2 * in_format if settings.reward == "paper" else 1.0 * correct
        found.append(types.SimpleNamespace(
            prompt=prompt, tokens=tokens, correct=correct, reward=reward,
            finished=tokens[-1] == QUIZ_EOS, rollout_logprobs=call.rollout.logprobs[i, :length],
            entropy=call.rollout.entropy[i, :length], clipped=[],
        ))
    return found


def logits_of(model, row):
    """The logits from which a completion's tokens were drawn: of a line of its own, without padding."""
    return model(torch.tensor([row.prompt + row.tokens]))[0, len(row.prompt) - 1:-1]


def logprobs_of(model, row):
    return logits_of(model, row).log_softmax(-1)[range(len(row.tokens)), row.tokens]


def loss_of(model, row, settings):
    """(Eq. 3's loss at each token of a completion, the KL at each, which ratios were clipped)."""
    logprobs = logprobs_of(model, row)
    ratio = (logprobs - row.old).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * row.advantage, clipped * row.advantage)
    is_clipped = (gain < ratio * row.advantage).tolist()
    if settings.tis:
        gain = gain * (row.old - row.rollout_logprobs).exp().clamp(max=settings.tis)
    log_ratio = row.reference - logprobs
    kl = log_ratio.exp() - 1 - log_ratio
    return settings.beta * kl - gain, kl.detach(), is_clipped


def minibatch_loss(model, rows, settings):
    """(loss, KL) of a minibatch: GRPO's mean of means, DAPO's mean over the tokens of the finished."""
    counted = [row for row in rows if row.finished or settings.algo == "grpo"]
    tokens = sum(len(row.tokens) for row in counted)
    loss = kl = 0
    for row in counted:
        losses, kls, row.clipped = loss_of(model, row, settings)
        share = 1 / tokens if settings.algo == "dapo" else 1 / len(row.tokens) / len(rows)
        loss = loss + losses.sum() * share
        kl += kls.sum().item() * share
    return loss, kl


def adamw(parameters, moments, lr, settings):
    """One step of AdamW as its paper has it, on the clipped gradient; returns the norm before that."""
    norm = sum(p.grad.square().sum() for p in parameters.values()).sqrt().item()
    for name, p in parameters.items():
        count, mean, square = moments.get(name, (0, torch.zeros_like(p), torch.zeros_like(p)))
        grad = p.grad * settings.gradient_clip / max(norm, settings.gradient_clip)
        count += 1
        mean = 0.9 * mean + 0.1 * grad
        square = 0.99 * square + 0.01 * grad ** 2
        moments[name] = count, mean, square
        decay = settings.weight_decay if p.dim() > 1 else 0
        step = (mean / (1 - 0.9 ** count)) / ((square / (1 - 0.99 ** count)).sqrt() + 1e-8)
        p.data = p.data - lr * decay * p.data - lr * step
        p.grad = None
    return norm


def draws_of_a_step(rollouts, settings):
    """(calls of generate, their completions in groups, of each group whether its rewards differ).

    GRPO draws once; DAPO until as many groups as there are prompts have a signal, four times at most.
    """
    draws = []
    groups = []
    teaches = []
    while not draws or (settings.algo == "dapo" and len(draws) < 4 and sum(teaches) < settings.prompts):
        draws.append(next(rollouts))
        rows = completions_of(draws[-1], settings)
        more = [rows[i:i + settings.group] for i in range(0, len(rows), settings.group)]
        groups += more
        teaches += [len({row.reward for row in group}) > 1 for group in more]
    return draws, groups, teaches


def assert_sampled_by(model, noise, rows):
    """A rollout's log-probabilities and entropies are the model's with this noise, at temperature 1."""
    for norm, z in zip(scales(model), noise):
        norm.noisy_weight = norm.weight.detach() + z
    for row in rows:
        distribution = logits_of(model, row).detach().log_softmax(-1)
        logprobs = distribution[range(len(row.tokens)), row.tokens]
        entropy = -(distribution.exp() * distribution).sum(-1)
        torch.testing.assert_close(row.rollout_logprobs, logprobs, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(row.entropy, entropy, rtol=1e-3, atol=1e-3)
    for norm in scales(model):
        norm.noisy_weight = None


def set_advantages(group):
    """Eq. 4 of one group of completions; 0 if all have the same reward."""
    rewards = torch.tensor([row.reward for row in group])
    for row in group:
        row.advantage = 0.0
        if rewards.min() < rewards.max():
            row.advantage = ((row.reward - rewards.mean()) / (rewards.std() + 1e-4)).item()


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def logged_of(rows, everything):
    """What the log has to say of the rows that a step learned from, and of everything that it drew."""
    x = torch.cat([row.old - row.rollout_logprobs for row in rows])
    return {
        "reward": mean(row.reward for row in everything),
        "accuracy": mean(row.correct for row in everything),
        "entropy": torch.cat([row.entropy for row in rows]).mean().item(),
        "mismatch_kl": (x.exp() - 1 - x).mean().item(),
        "mismatch_max_ratio": x.abs().max().exp().item(),
        "length": mean(len(row.tokens) for row in rows),
        "truncated": mean(not row.finished for row in rows),
    }


LOOP = dict(
    device="cpu", dtype="float32", prompts=4, group=4, max_new_tokens=6, lora_rank=4, steps=4, updates=2,
    stages=4, lr=0.03, reward="paper", sigma_start=0.3, sigma_end=0.075, micro_tokens=24, save_every=3,
    seed=12, quantizer="rtn",
)
GRPO_LOOP = dict(beta=0.3, tis=1.1, train_norms=True, warm_up=0.5, weight_decay=0.5, gradient_clip=0.5)
DAPO_LOOP = dict(
    algo="dapo", reward="answer", warm_up=0.0, gradient_clip=1.1, max_new_tokens=12, lora_alpha=6.0,
    schedule="linear",
)


@pytest.mark.parametrize("options,rates,sigmas", [
    # Two steps of warm-up, then half a cosine to zero; and without warm-up.
    (GRPO_LOOP, [0.5, 1, 1, 0.5], [0, 0.3, 0.15, 0.075]),
    (DAPO_LOOP, [1, 1, 0.75, 0.25], [0, 0.3, 0.1875, 0.075]),
])
def test_a_run_is_what_the_equations_say(quiz, tmp_path, monkeypatch, options, rates, sigmas):
    """Every update of a run, computed again from its completions, each in a line of its own."""
    settings = train_gsm8k.Settings(model=quiz, data=quiz, out=str(tmp_path), **{**LOOP, **options})
    calls = recorded(monkeypatch)
    train_gsm8k.train(settings)
    rollouts = iter(calls[2:-2])                    # the others are the two of each evaluation
    log = read_jsonl(tmp_path / "metrics.jsonl")
    torch.manual_seed(settings.seed)
    model = qerl.load_model(
        quiz, lora_rank=4, lora_alpha=settings.lora_alpha, train_norms=settings.train_norms,
    )
    reference = qerl.load_model(quiz)               # without adapters
    parameters = qerl.trainable(model)
    moments = {}
    asked = []
    norms = []
    clipped = []
    importances = []
    noises = []
    for step, (sigma, rate) in enumerate(zip(sigmas, rates)):
        # Sampled at temperature 1 and without top-p, by the policy of this step with one draw of noise.
        draws, groups, teaches = draws_of_a_step(rollouts, settings)
        everything = sum(groups, [])
        noises.append(torch.cat(draws[0].noise))
        for call in draws:
            asked += call.prompts
            assert call.drawn_with == {(1.0, 1.0)}
            assert flat_policy(call.policy).equal(flat_policy(draws[0].policy))
            assert torch.cat(call.noise).equal(noises[-1])
        assert_sampled_by(model, draws[0].noise, everything)
        assert all(row.finished or len(row.tokens) == settings.max_new_tokens for row in everything)

        # What is learned from; DAPO prefers groups with a signal. The advantages.
        kept = [0, 1, 2, 3]
        if settings.algo == "dapo":
            kept = sorted(range(len(groups)), key=lambda k: not teaches[k])[:4]
        assert any(teaches[k] for k in kept)
        rows = sum((groups[k] for k in kept), [])
        for k in kept:
            set_advantages(groups[k])
        for row in rows:
            row.old = logprobs_of(model, row).detach()
            row.reference = logprobs_of(reference, row).detach()
            importances += (row.old - row.rollout_logprobs).exp().tolist()

        # The updates.
        before = flat_policy(parameters).detach().clone()
        kls = []
        for minibatch in (rows[:8], rows[8:]):
            loss, kl = minibatch_loss(model, minibatch, settings)
            loss.backward()
            norms.append(adamw(parameters, moments, settings.lr * rate, settings))
            kls.append(kl)
            clipped += [(row.advantage > 0, x) for row in minibatch for x in row.clipped]
        change = flat_policy(parameters).detach() - before
        following = calls[draws[-1].number + 1].policy
        assert change.norm() > 0
        assert relative(flat_policy(following) - flat_policy(draws[0].policy), change) < 5e-4

        expected = {
            "step": step + 1,
            "sigma": sigma,
            "kl": mean(kls) if settings.beta else 0,
            "gradient_norm": norms[-1],
            "lr": settings.lr * rate,
            "draws": len(draws),
            **logged_of(rows, everything),
        }
        logged = {name: log[step][name] for name in expected}
        assert logged == pytest.approx(expected, rel=5e-4, abs=1e-6)
        drawn_tokens = log[step]["tokens_per_s"] * log[step]["seconds"]["rollout"]
        assert drawn_tokens == pytest.approx(sum(len(row.tokens) for row in everything))
    assert next(rollouts, None) is None and len(log) == 4

    # The noise: none, then a fresh draw in each step. Its law has a test of its own.
    assert not noises[0].any()
    for noise, sigma in zip(noises[1:], sigmas[1:]):
        assert noise.std().item() == pytest.approx(sigma, rel=0.25)
        assert noise.mean().abs() < 0.35 * sigma
    a, b, c = [noise / noise.norm() for noise in noises[1:]]
    assert max(abs(a @ b), abs(b @ c), abs(a @ c)) < 0.4
    # The questions: each of the ten once, before any comes again.
    assert len(asked) >= 16 and len(set(map(tuple, asked[:10]))) == 10
    assert all(prompt in asked[:10] for prompt in asked)
    # It was a run in which all of this mattered.
    assert min(norms) < settings.gradient_clip < max(norms)
    assert {(True, True), (False, True), (True, False)} <= set(clipped)
    assert settings.algo != "dapo" or max(m["draws"] for m in log) > 1
    assert not settings.tis or min(importances) < settings.tis < max(importances)


def test_evaluation_is_one_sample_and_the_likeliest(quiz, tmp_path, monkeypatch):
    """Temperature 0.6 and top-p 0.95, then greedy, of the policy as trained and without its noise."""
    options = {**LOOP, "steps": 2, "stages": 2, "eval_questions": 5, "lr": 0.1, "slots": 2}
    settings = train_gsm8k.Settings(model=quiz, data=quiz, out=str(tmp_path), **options)
    calls = recorded(monkeypatch)
    train_gsm8k.train(settings)
    trained = load_file(tmp_path / "checkpoint.safetensors")
    trained = {name: trained[f"model.{name}"] for name in calls[0].policy}
    assert flat_policy(trained).norm() != flat_policy(calls[0].policy).norm()
    held_out = read_jsonl(f"{quiz}/test.jsonl")[:5]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_questions"] == 5
    for when, pair, policy in (("before", calls[:2], calls[0].policy), ("after", calls[-2:], trained)):
        answers = read_jsonl(tmp_path / f"answers_{when}.jsonl")
        assert [a["question"] for a in answers] == [q["question"] for q in held_out]
        for call, kind, how in zip(pair, ("accuracy", "greedy"), ((0.6, 0.95), (0.0, 1.0))):
            assert call.drawn_with == {how} and all(noise is None for noise in call.noise)
            assert flat_policy(call.policy).equal(flat_policy(policy))
            assert call.prompts == [list(map(QUIZ_TOKENS.index, q["question"])) for q in held_out]
            generator = torch.Generator().manual_seed(settings.seed)
            expected = qerl.generate(
                policy_of(settings, policy), call.prompts, settings.max_new_tokens,
                temperature=how[0], top_p=how[1], eos=[QUIZ_EOS], slots=2, generator=generator,
            )
            assert call.rollout.tokens.equal(expected.tokens)
            rows = zip(call.rollout.tokens.tolist(), call.rollout.length, call.prompts)
            stated = [quiz_stated(tokens[:n]) == quiz_number(prompt) for tokens, n, prompt in rows]
            assert [a[kind]["correct"] for a in answers] == stated
            assert summary[f"{kind}_{when}"] == sum(stated) / 5
    # What is drawn depends on the seed alone, not on what was drawn before.
    first = calls[0].rollout.tokens
    model, tokenizer, _, held_out = train_gsm8k.load_all(settings, methods.Method(settings))
    for seed, same in ((settings.seed, True), (settings.seed, True), (settings.seed + 1, False)):
        settings.seed = seed
        train_gsm8k.evaluate(model, tokenizer, held_out, settings, "now")
        again = calls[-2].rollout.tokens
        assert (again.shape == first.shape and again.equal(first)) == same


def test_the_seed_decides_all_that_is_drawn(quiz, tmp_path, monkeypatch):
    """LoRA's A, questions, completions and noise: the same with the same seed, others with another."""
    calls = recorded(monkeypatch)
    drawn = []
    for i, seed in enumerate((3, 3, 4)):
        calls.clear()
        (tmp_path / str(i)).mkdir()
        options = {**LOOP, "steps": 2, "stages": 2, "eval_questions": 1, "seed": seed}
        settings = train_gsm8k.Settings(model=quiz, data=quiz, out=str(tmp_path / str(i)), **options)
        torch.manual_seed(i)                        # which decides nothing
        train_gsm8k.train(settings)
        first, second = calls[2:4]
        # Of the same policy after the same prompts.
        model = policy_of(settings, {name: torch.zeros_like(p) for name, p in first.policy.items()})
        generator = torch.Generator().manual_seed(seed)
        alike = qerl.generate(model, first.prompts, 6, 4, eos=[QUIZ_EOS], generator=generator)
        assert alike.tokens.equal(first.rollout.tokens)
        drawn.append([flat_policy(first.policy), first.prompts, torch.cat(second.noise)])
    for a, b, c in zip(*drawn):
        if isinstance(a, list):
            assert a == b and a != c
        else:
            assert a.equal(b) and not a.equal(c)


LEARNING = ("--prompts", 4, "--group", 4, "--lr", 0.02)     # behind QUICK: each step has a signal


def assert_learned(log, calls=None):
    """Each step of a run without KL had groups whose rewards differ, and changed the adapter.

    log: of metrics.jsonl; calls: see recorded.
    """
    assert all(m["gradient_norm"] > 0 and m["lr"] > 0 for m in log)
    if calls:
        policies = [flat_policy(call.policy) for call in calls]
        assert sum(not a.equal(b) for a, b in zip(policies, policies[1:])) == len(log)


@pytest.mark.parametrize("options", [
    ("--algo", "grpo", "--train-norms", "--warm-up", 0.6), ("--algo", "dapo"),
])
def test_a_stopped_run_goes_on_with_everything(quiz, tmp_path, monkeypatch, options):
    """Adapter, AdamW's moments, both generators, the questions' order: all of it after each step."""
    options = ("--model", quiz, "--data", quiz, *QUICK, *LEARNING, "--save-every", 1, "--tis", 2,
               "--sigma-start", 0.2, "--sigma-end", 0.1, *options)
    calls = recorded(monkeypatch)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"), calls)
    whole = files_below(tmp_path / "whole")
    save = keeper.save_checkpoint

    def stopped(*given):
        if given[-2]["step"] == step:
            raise KeyboardInterrupt
        save(*given)
    for step in range(1, 6):                        # in step 1 there is only the checkpoint before it
        resume = ("--resume",) if step > 1 else ()
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "save_checkpoint", stopped)
            with pytest.raises(SystemExit):
                run_main(patch, *options, "--out", tmp_path / "run", *resume)
    calls.clear()
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume")
    assert len({flat_policy(call.policy).norm().item() for call in calls}) == 2    # one step was left
    run = files_below(tmp_path / "run")
    for name in ("adapter/adapter_model.safetensors", "samples.jsonl", "answers_before.jsonl",
                 "answers_after.jsonl"):
        assert run[name] == whole[name], name
    logs = [without_times(tmp_path / name / "metrics.jsonl") for name in ("whole", "run")]
    assert logs[0] == logs[1] and len(logs[0]) == 5
    stored = load_file(tmp_path / "run" / "checkpoint.safetensors")
    expected = load_file(tmp_path / "whole" / "checkpoint.safetensors")
    assert stored.keys() == expected.keys()
    assert all(stored[name].equal(expected[name]) for name in expected)
    model = qerl.load_model(quiz, lora_rank=2, train_norms="--train-norms" in options)
    load_adapter(model, tmp_path / "run" / "adapter")
    for name, p in qerl.trainable(model).items():
        assert p.equal(stored[f"model.{name}"])


def command(*args):
    return [sys.executable, f"{HERE}/train_gsm8k.py", *map(str, args)]


def run_main(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["train_gsm8k.py", *map(str, args)])
    train_gsm8k.main()


QUICK = ("--prompts", 2, "--group", 2, "--updates", 1, "--steps", 5, "--max-new-tokens", 8, "--lora-rank", 2, "--lr", 1e-3,
         "--save-every", 2, "--device", "cpu", "--quantizer", "rtn")


def without_times(path):
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "tokens_per_s", "peak_memory_gb")}
            for line in open(path)]


@pytest.mark.parametrize("algo", ["grpo", "dapo"])
def test_resume_after_kill_is_bit_for_bit(quiz, tmp_path, algo, monkeypatch):
    options = ("--model", quiz, "--data", quiz, "--algo", algo, "--tis", 2, *QUICK, *LEARNING)
    calls = recorded(monkeypatch)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"), calls)
    process = subprocess.Popen(command(*options, "--out", tmp_path / "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "killed" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    with log.open("a") as f:
        f.write('{"step": 9, "rew')                                                     # a line torn by the kill
    run_main(monkeypatch, *options, "--out", tmp_path / "killed", "--resume")
    whole, killed = (without_times(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed"))
    assert [m["step"] for m in killed] == [1, 2, 3, 4, 5] and whole == killed
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes()
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    assert (tmp_path / "whole" / "curve.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit) as stop:                                              # other settings are refused by name
        run_main(monkeypatch, *options, "--lr", 2e-3, "--out", tmp_path / "killed", "--resume")
    assert stop.value.code == 2


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_killed_before_the_first_checkpoint_starts_over(qwen, data, tmp_path, monkeypatch, resume):
    (tmp_path / "run").mkdir()
    for name in ("metrics.jsonl", "lock"):
        (tmp_path / "run" / name).write_text("")
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--out", tmp_path / "run", *resume)
    assert [m["step"] for m in without_times(tmp_path / "run" / "metrics.jsonl")] == [1]


def refused(monkeypatch, capsys, *args):
    """The one line with which a command ends, exit status 2."""
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, *args)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(lines) == 1
    return lines[0]


def files_below(folder):
    """{name: bytes} of all files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(qwen, data, tmp_path_factory):
    """(command line, folder) of a run of two steps, which a test copies before it breaks it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2)
    with pytest.MonkeyPatch.context() as patch:
        run_main(patch, *options, "--out", out)
    return options, out


def copied(finished, tmp_path):
    """(command line with --resume, folder) of a copy of the finished run."""
    options, out = finished
    shutil.copytree(out, tmp_path / "run")
    return (*options, "--out", tmp_path / "run", "--resume"), tmp_path / "run"


def test_a_run_without_its_checkpoint_is_not_begun_anew(finished, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    (out / "checkpoint.safetensors").unlink()
    for kept in ("adapter", "metrics.jsonl", "samples.jsonl", "summary.json", "answers_after.jsonl"):
        before = files_below(out)
        error = refused(monkeypatch, capsys, *options)
        assert "has no checkpoint.safetensors" in error and "another --out" in error and files_below(out) == before
        shutil.rmtree(out / kept) if kept == "adapter" else (out / kept).unlink()


def test_a_damaged_checkpoint_does_not_cost_the_adapter(finished, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    for stored in (b"", (out / "checkpoint.safetensors").read_bytes()[:-9]):
        (out / "checkpoint.safetensors").write_bytes(stored)
        before = files_below(out)
        error = refused(monkeypatch, capsys, *options)
        assert "not a readable checkpoint" in error and "another --out" in error and "remove" not in error
        assert files_below(out) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "answers_now.jsonl", "adapter/adapter_config.json", "summary.json",
                                  "curve.png", "report.html", "eval.json", "checkpoint.safetensors", "lock"])
def test_no_file_of_a_run_is_overwritten(data, tmp_path, monkeypatch, capsys, name):
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine\n")
    error = refused(monkeypatch, capsys, "--data", data, *QUICK, "--out", tmp_path / "out")
    assert ("lock is not a run's" if name == "lock" else "already holds a run") in error and "another folder" in error
    assert file.read_text() == "mine\n"
    if name == "lock":
        refused(monkeypatch, capsys, "--data", data, *QUICK, "--out", tmp_path / "out", "--resume")
        assert file.read_text() == "mine\n"


def scored_by_letters(monkeypatch):
    """Rewards of which most differ, so that an untrained model's completions have a signal."""
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, number, scheme: (float(sum(map(ord, text)) % 7), 0.0))


def losses_times(monkeypatch, *factors):
    """Multiply the first losses by these factors, the others by the last."""
    policy_loss, left = qerl.policy_loss, list(factors)

    def multiplied(*args):
        loss, kl = policy_loss(*args)
        return loss * (left.pop(0) if len(left) > 1 else left[0]), kl
    monkeypatch.setattr(qerl, "policy_loss", multiplied)


def test_float16_gradients_do_not_vanish(qwen, data, tmp_path, monkeypatch):
    """A loss of a 100,000th has gradients that float16 cannot hold; after a step they are a 100,000th of the others."""
    scored_by_letters(monkeypatch)
    norms = {}
    for dtype, factor in itertools.product(("float16", "float32"), (1, 1e-5)):
        with monkeypatch.context() as patch:
            losses_times(patch, factor)
            out = tmp_path / f"{dtype}-{factor}"
            run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--dtype", dtype, "--out", out)
        (logged,) = read_jsonl(out / "metrics.jsonl")
        norms[dtype, factor] = logged["gradient_norm"]
        assert logged.get("loss_scale") == (65536 if dtype == "float16" else None)
        assert json.loads((out / "summary.json").read_text())["settings"]["dtype"] == dtype
        trained = load_file(out / "adapter/adapter_model.safetensors")
        assert all(t.dtype == torch.float32 and t.isfinite().all() for t in trained.values())
        assert any(t.any() for name, t in trained.items() if "lora_B" in name)
    for (dtype, factor), norm in norms.items():
        assert norm == pytest.approx(factor * norms["float32", 1], rel=0.05), (dtype, factor)


def test_a_float16_gradient_that_overflows_costs_its_step_alone(qwen, data, tmp_path, monkeypatch):
    """The first gradient overflows. The run goes on with half the scale, and after a stop as if there had been none."""
    scored_by_letters(monkeypatch)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1, "--dtype", "float16")
    save, adapters = keeper.save_checkpoint, []

    def stopped(folder, model, optimizer, generators, state, settings):
        save(folder, model, optimizer, generators, state, settings)
        adapters.append([p.detach().clone() for p in qerl.trainable(model).values()])
        if state["step"] == stop_at:
            raise KeyboardInterrupt
    monkeypatch.setattr(keeper, "save_checkpoint", stopped)
    for stop_at, name in ((None, "whole"), (2, "cut")):
        with monkeypatch.context() as patch:
            losses_times(patch, 1e9, 1)
            if stop_at is None:
                run_main(monkeypatch, *options, "--out", tmp_path / name)
            else:
                with pytest.raises(SystemExit):
                    run_main(monkeypatch, *options, "--out", tmp_path / name)
    run_main(monkeypatch, *options, "--out", tmp_path / "cut", "--resume")
    logged = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert [m["loss_scale"] for m in logged] == [32768] * 3 and logged[0]["gradient_norm"] == 0 < logged[1]["gradient_norm"]
    before, first, second = adapters[:3]
    assert all(map(torch.equal, before, first)) and not all(map(torch.equal, first, second))
    assert without_times(tmp_path / "whole" / "metrics.jsonl") == without_times(tmp_path / "cut" / "metrics.jsonl")
    whole, cut = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert json.loads(safe_open(tmp_path / "cut/checkpoint.safetensors", "pt").metadata()["state"])["scaler"]["_growth_tracker"] == 2


def test_an_infinite_gradient_ends_a_run_that_scales_no_loss():
    for options in (dict(enabled=False), dict(init_scale=1.0)):
        with pytest.raises(qerl.UserError, match="gradient norm inf"):
            train_gsm8k.require_finite_update([(0.5, 0.0)], torch.tensor(math.inf), torch.amp.GradScaler("cpu", **options))
    train_gsm8k.require_finite_update([(0.5, 0.0)], torch.tensor(math.inf), torch.amp.GradScaler("cpu"))
    with pytest.raises(qerl.UserError, match="loss nan"):
        train_gsm8k.require_finite_update([(math.nan, 0.0)], torch.tensor(1.0), torch.amp.GradScaler("cpu"))


def test_the_dtype_that_suits_the_device(monkeypatch):
    def chosen(*argv):
        return train_gsm8k.arguments([*argv, "--device", "cpu"]).dtype
    assert chosen() == "float32" and chosen("--dtype", "bfloat16") == "bfloat16"
    monkeypatch.setattr(fp4_kernels, "default_dtype", lambda device: torch.float16)
    assert chosen() == "float16"


def test_weights_stay_decoded_where_there_is_room(qwen, data, tmp_path, monkeypatch):
    """With room each weight is decoded once, as it is loaded; without for each token. The results are the same."""
    scored_by_letters(monkeypatch)
    monkeypatch.setattr(train_gsm8k, "keep_decoded", lambda model, collect: memory.keep_decoded(model, collect, small=0))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--slots", 4)
    decoded, adapters = {}, {}
    for name, free in (("room", 10 ** 9), ("none", 10 ** 5)):
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        counted, dequantize = [], qerl.dequantize_nvfp4
        monkeypatch.setitem(qerl.FORMATS, "nvfp4", replace(qerl.FORMATS["nvfp4"], dequantize=lambda *a: counted.append(1) or dequantize(*a)))
        run_main(monkeypatch, *options, "--out", tmp_path / name)
        decoded[name] = len(counted)
        adapters[name] = (tmp_path / name / "adapter/adapter_model.safetensors").read_bytes()
    assert decoded["room"] == 8 and decoded["none"] > 500 and adapters["room"] == adapters["none"]
    assert without_times(tmp_path / "room/metrics.jsonl") == without_times(tmp_path / "none/metrics.jsonl")


@pytest.mark.parametrize("weights,kept", [("nvfp4", 3), ("nf4", 3), ("bf16", 0)])
def test_what_is_kept_decoded_is_weighed(qwen, monkeypatch, weights, kept):
    model = qerl.load_model(qwen[0], weights, dtype=torch.bfloat16)
    before = {id(layer): layer.weight for layer in model.quantized_layers()}
    size = sum(2 * layer.weight.dequantize(torch.bfloat16).numel() for layer in model.quantized_layers())
    for free in (2 * size - 2, 2 * size):
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        memory.keep_decoded(model)                                                        # it is small: it stays as it is
        assert all(layer.weight is before[id(layer)] for layer in model.quantized_layers())
        memory.keep_decoded(model, small=0)
        same = [layer.weight is before[id(layer)] for layer in model.quantized_layers()]
        assert all(same) or (free == 2 * size and kept and not any(same))
    for layer in model.quantized_layers():
        weight = layer.weight.dequantize(torch.bfloat16)
        assert torch.equal(weight, before[id(layer)].dequantize(torch.bfloat16))
        assert not kept or weight is layer.weight.dequantize(torch.bfloat16)


def test_slots_are_what_memory_holds(family, monkeypatch, capsys):
    model = qerl.load_model(family[0])
    cache = qerl.KVCache(model, 3, 100)
    cache.reserve(100)
    size = sum(piece.nbytes for pieces in cache.pieces for piece in pieces)
    monkeypatch.setattr(memory, "free_memory", lambda device: size)
    assert memory.slots_that_fit(model, 100, share=1.0) == 3
    assert "--slots 3: so many sequences of 100 tokens" in capsys.readouterr().out
    assert memory.slots_that_fit(model, 10 ** 6) == 1 and memory.slots_that_fit(model, 1, share=1.0) == 256


def test_a_run_keeps_its_slots(qwen, data, tmp_path, monkeypatch):
    """What memory held when it began; otherwise a resumed run would draw other numbers and add in another order."""
    used, generate = [], qerl.generate
    budgets, cut = set(), Batch.micro_batches
    monkeypatch.setattr(Batch, "micro_batches", lambda batch, budget: budgets.add(budget) or cut(batch, budget))

    def watched(*args, **options):
        used.append(options["slots"])
        return generate(*args, **options)
    monkeypatch.setattr(qerl, "generate", watched)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--out", tmp_path / "run")
    monkeypatch.setattr(memory, "free_memory", lambda device: 10 ** 6)
    run_main(monkeypatch, *options)
    first = used[0]
    assert 1 < first < 256 and set(used) == {first} and budgets == {512}
    monkeypatch.setattr(memory, "free_memory", lambda device: 10 ** 9)
    for more, slots in ((["--eval-only"], first), ([], first), (["--slots", 5], 5)):
        used.clear()
        run_main(monkeypatch, *options, "--resume", *more)
        assert set(used) == {slots} and budgets == {512}, more


def test_pieces_are_what_memory_holds(family, monkeypatch, capsys):
    model = with_lora(family[0])
    config = model.config
    trained = 12 * sum(p.numel() for p in qerl.trainable(model).values())                 # two moments and a gradient, float32
    logits = 3 * 2048 * config.vocab_size * 4
    d, wide = config.hidden_size, config.intermediate_size
    for recompute, values in ((False, len(model.blocks) * (5 * d + 3 * wide)), (True, (10 + len(model.blocks)) * d + 5 * wide)):
        model.recompute_blocks = recompute
        monkeypatch.setattr(memory, "free_memory", lambda device: trained + logits + 1000 * 4 * values)
        assert memory.micro_tokens_that_fit(model, share=1.0) == 1000
        assert "--micro-tokens 1000: so many tokens" in capsys.readouterr().out
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    assert memory.micro_tokens_that_fit(model) == 512
    monkeypatch.setattr(memory, "free_memory", lambda device: 1e15)
    assert memory.micro_tokens_that_fit(model) == 16384 and not capsys.readouterr().out.endswith("16384")


def test_free_memory_knows_a_containers_limit(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    free = memory.free_memory(cpu)
    assert 0 < free < 2 ** 50
    monkeypatch.setattr(memory, "CONTAINER", str(tmp_path))
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_anon 5\ninactive_file 1000\n")
    for limit, least, most in (("max", 1, 2 ** 50), (str(2 ** 62), 1, 2 ** 50), ("5000000", 2001000, 2001000), ("1", 0, 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert least <= memory.free_memory(cpu) <= most
    (tmp_path / "memory.max").write_text("5000000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert memory.free_memory(cpu) == 667000
    monkeypatch.setattr(memory, "HOST", str(tmp_path / "no such file"))
    assert memory.free_memory(cpu) == memory.UNKNOWN


NO_NUMBER = re.compile("NaN|Infinity")


@pytest.mark.parametrize("options,message,steps", [
    (["--lr", 1e30, "--steps", 1, "--updates", 1], "after this update a vector of logits holds NaN or infinity", 0),
    (["--lr", 1e30, "--steps", 1, "--updates", 2], "gradient norm nan", 0),
    (["--sigma-start", 1e38], "the policy's logits are NaN or infinite", 1),
    (["--lora-alpha", "inf"], "--lora-alpha inf: must be positive and finite", None),
])
def test_nan_ends_a_run_before_it_is_stored(qwen, data, tmp_path, monkeypatch, capsys, options, message, steps):
    out = tmp_path / "out"
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, number, scheme: (float(sum(map(ord, text)) % 7), 0.0))
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--save-every", 1, *options, "--out", out)
    assert message in error
    if steps is None:
        assert not out.exists()
        return
    stored = load_file(out / "checkpoint.safetensors")
    assert all(t.isfinite().all() for t in stored.values())
    log = out / "metrics.jsonl"
    assert len(read_jsonl(log)) == steps and (steps == 0 or not NO_NUMBER.search(log.read_text()))


@pytest.mark.parametrize("options", [(), ("--eval-only",)])
def test_a_model_that_gives_nan_is_refused(qwen, data, tmp_path, monkeypatch, capsys, options):
    (tmp_path / "model").mkdir()
    folder = break_tensor(qwen[0], tmp_path / "model", lambda t: t["model.norm.weight"].fill_(3e38))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{qwen[0]}/{file}", folder)
    out = tmp_path / "out"
    error = refused(monkeypatch, capsys, "--model", folder, "--data", data, *QUICK, "--out", out, *options)
    assert "logits are NaN or infinite" in error and "undamaged model" in error and not out.exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_log_takes_no_nan(tmp_path, value):
    with pytest.raises(ValueError):
        keeper.append_jsonl(tmp_path / "log.jsonl", {"kl": value})
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_other_data_are_noticed_at_resume(finished, data, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    other = [json.loads(line) for line in open(f"{data}/train.jsonl")]
    other[3]["answer"] += "0"
    monkeypatch.setattr(train_gsm8k, "load_questions", lambda *_: (other, made_up_problems()[1][:6]))
    before = files_below(out)
    assert "other questions, answers or prompts" in refused(monkeypatch, capsys, *options) and files_below(out) == before


def test_a_flipped_bit_in_a_checkpoint_is_noticed(finished, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    monkeypatch.setattr(train_gsm8k, "load_all", lambda *_: pytest.fail("it was believed"))
    path = out / "checkpoint.safetensors"
    stored = path.read_bytes()
    header = 8 + int.from_bytes(stored[:8], "little")
    places = [*range(0, header - 8, 97), *range(header, len(stored), len(stored) // 40), len(stored) - 1]
    for place in places:                                                # the spaces that end a header say nothing
        path.write_bytes(stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1:])
        assert f"{path}: " in refused(monkeypatch, capsys, *options)
    path.write_bytes(stored)
    settings = json.loads(safe_open(path, "pt").metadata()["settings"])
    assert checkpoint.read_checkpoint(str(out), settings)[0]["step"] == 2


def test_another_models_checkpoint_is_refused(qwen, tmp_path):
    tensors = {f"model.{name}": p for name, p in qerl.trainable(with_lora(qwen[0])).items()}
    model = qerl.load_model(qwen[0], lora_rank=8)
    with pytest.raises(qerl.UserError, match="not this model's"):
        checkpoint.restore(tensors, model)
    tensors.popitem()
    with pytest.raises(qerl.UserError, match="not this model's"):
        checkpoint.restore(tensors, with_lora(qwen[0]))


@pytest.mark.parametrize("edit,message", [
    (lambda t, m: t.pop("rng.1"), "lacks the tensor rng.1"),
    (lambda t, m: t.pop(min(n for n in t if n.endswith("exp_avg"))), "lacks the tensor optimizer."),
    (lambda t, m: t.pop(min(n for n in t if n.startswith("model."))), "not this model's"),
    (lambda t, m: m.update(settings="{"), "its settings or its state are broken"),
    (lambda t, m: m.update(settings="[]"), "its settings or its state are broken"),
    (lambda t, m: m.update(settings="[" * 100_000), "its settings or its state are broken"),
    (lambda t, m: m.update(state="3"), "its settings or its state are broken"),
    (lambda t, m: m.update(state="{}"), "its settings or its state are broken, or another version's (no data)"),
    (lambda t, m: m.pop("state"), "not a checkpoint of this version"),
])
def test_a_checkpoint_that_lacks_something_is_named(finished, tmp_path, monkeypatch, capsys, edit, message):
    """Its hash is right: whatever wrote it was not this program."""
    options, out = copied(finished, tmp_path)
    path = out / "checkpoint.safetensors"
    tensors, metadata = load_file(path), safe_open(path, "pt").metadata()
    edit(tensors, metadata)
    metadata["sha256"] = checkpoint.content_hash({"state": "", "settings": ""} | metadata, tensors)
    save_file(tensors, path, metadata)
    before = files_below(out)
    assert message in refused(monkeypatch, capsys, *options) and files_below(out) == before


def test_a_checkpoint_from_before_start_seeds_goes_on(finished, tmp_path, monkeypatch, capsys):
    """It began with the policy of seed 0; a checkpoint of another seed is refused, also where it is only measured."""
    options, out = copied(finished, tmp_path)
    path = out / "checkpoint.safetensors"
    tensors, metadata = load_file(path), safe_open(path, "pt").metadata()
    settings = json.loads(metadata["settings"])

    def store(settings):
        metadata["settings"] = json.dumps(settings)
        metadata["sha256"] = checkpoint.content_hash({k: metadata[k] for k in ("state", "settings")}, tensors)
        save_file(tensors, path, metadata)

    del settings["start_seed"]
    store(settings)
    run_main(monkeypatch, *options)
    store({**settings, "start_seed": 3})
    for more in ((), ("--eval-only",)):
        assert "was started with start_seed = 3, now it is 0" in refused(monkeypatch, capsys, *options, *more)


def logged_steps(*numbers):
    """What metrics.jsonl and samples.jsonl need to hold of the steps with these numbers."""
    figures = dict(accuracy=0.5, reward=1.0, entropy=0.1, length=3.0, sigma=0.01)
    return [{"step": number, **figures, "completions": []} for number in numbers]


def test_a_log_line_nested_too_deeply_is_left_out(tmp_path):
    first, second = logged_steps(1, 2)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(first) + "\n" + "[" * 100_000 + "\n" + json.dumps(second) + "\n")
    assert read_log(str(tmp_path), 2) == [first, second]


def test_a_lost_log_is_a_warning(finished, qwen, data, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    (out / "metrics.jsonl").unlink()
    run_main(monkeypatch, *options)
    assert "lacks 2 of the 2 steps" in capsys.readouterr().err
    adapter = "adapter/adapter_model.safetensors"
    assert (out / adapter).read_bytes() == (finished[1] / adapter).read_bytes() and (out / "report.html").exists()
    assert read_log(str(out), 2) == []
    steps = logged_steps(1, 2, 3)
    write_jsonl(out / "metrics.jsonl", [*steps, 4, {}])
    assert read_log(str(out), 2) == steps[:2] == read_jsonl(out / "metrics.jsonl")


def broken_model(folder, path, config=None, tokenizer=None, generation=None):
    """A copy of a model's folder whose json files are edited (a function) or replaced (anything else)."""
    shutil.copytree(folder, path)
    edits = {"config.json": config, "tokenizer_config.json": tokenizer, "generation_config.json": generation}
    for name, edit in edits.items():
        if edit is not None:
            stored = json.loads((path / name).read_text())
            edited = edit if isinstance(edit, str) else json.dumps(stored | edit)
            (path / name).write_text(edited)
    return path


YARN = dict(rope_type="yarn", rope_theta=1e4, factor="four", original_max_position_embeddings=128)


@pytest.mark.parametrize("files,message", [
    (dict(tokenizer={"chat_template": ""}), "empty prompt"),
    (dict(generation={"eos_token_id": [[1]]}), "eos_token_id [1] is no token"),
    (dict(generation={"eos_token_id": 2.5}), "eos_token_id 2.5 is no token"),
    (dict(generation={"eos_token_id": 10 ** 6}), "eos_token_id gives token 1000000, its vocabulary has 262"),
    (dict(generation={"eos_token_id": -1}), "eos_token_id gives token -1"),
    (dict(config={"num_attention_heads": 0}), "config.json cannot be used"),
    (dict(config={"rope_parameters": YARN}), "config.json cannot be used"),
    (dict(config="[" * 100_000), "recursion depth"),
])
def test_broken_model_files_are_named(qwen, data, tmp_path, monkeypatch, capsys, files, message):
    model = broken_model(qwen[0], tmp_path / "model", **files)
    assert message in refused(monkeypatch, capsys, "--model", model, "--data", data, *QUICK, "--out", tmp_path / "out")


def test_tokens_beyond_the_vocabulary_are_named():
    with pytest.raises(qerl.UserError, match="tokenizer gives token 300, its vocabulary has 262"):
        check_tokens([{"prompt": [1, 2]}, {"prompt": [300]}], {256}, 262)


def test_deeply_nested_data_is_one_line(qwen, tmp_path, monkeypatch, capsys):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("[" * 100_000 + "\n")
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", tmp_path, *QUICK, "--out", tmp_path / "out")
    assert "nested too deeply" in error or "train.jsonl:1" in error


def test_odd_names_of_folders(tmp_path, monkeypatch, capsys):
    assert "holds a NUL" in refused(monkeypatch, capsys, "--out", "a\0b")
    for name in ("small-1", "small-1²", "small-2x"):
        (tmp_path / name).mkdir()
    assert choose_folder(f"{tmp_path}/small", resume=False) == f"{tmp_path}/small-2"


@pytest.mark.parametrize("edit,message", [
    (lambda t: t.update({"model.layers.0.mlp.up_proj.weight_packed": torch.zeros(192, 64, dtype=torch.uint8)}), "not in 16 bit"),
    (lambda t: [t.pop(name) for name in list(t) if "_proj" in name], "not in 16 bit"),
    (lambda t: t.update({UP: t[UP][:, :127]}), "(192, 127), not divisible by a block of 64"),
])
def test_bench_formats_names_what_it_cannot_measure(qwen, tmp_path, monkeypatch, edit, message):
    folder = break_tensor(qwen[0], tmp_path, edit)
    monkeypatch.setattr(bench, "gaussian_layers", lambda: [torch.randn(64, 64)])
    with pytest.raises(qerl.UserError, match=re.escape(message)):
        list(bench.bench_formats(types.SimpleNamespace(model=[folder], device="cpu")))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no such signals")
def test_ctrl_c_while_importing_is_one_line(tmp_path):
    (tmp_path / "tqdm.py").write_text("import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n")
    done = subprocess.run(command("--help"), env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))     # a background job has it ignored
    assert done.returncode == 130 and done.stderr == "\nstopped\n" and not done.stdout


def test_a_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command("--help"), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


def test_a_full_disk_is_called_so(qwen, data, tmp_path, monkeypatch, capsys):
    written = []

    def fsync(file):
        written.append(file)
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "out"
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", out)
    assert f"{out}" in error and "the disk is full" in error and f"--resume --out {out}" in error and "remove" not in error
    assert not list(out.rglob("*.tmp"))


def test_a_broken_warm_start_is_made_again(qwen, tmp_path, monkeypatch, capsys):
    made = []

    def train_policy(seed):
        made.append(seed)
        return qwen[1]
    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path))
    monkeypatch.setattr(small_policy, "train_policy", train_policy)
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    folder = small_policy.warm_start()
    assert small_policy.warm_start() == folder and len(made) == 1
    weights = os.path.join(folder, "model.safetensors")
    for broken in (b"", open(weights, "rb").read()[:-5], None):
        os.remove(weights)
        if broken is not None:
            open(weights, "wb").write(broken)
        assert small_policy.warm_start() == folder and "is made again" in capsys.readouterr().out
        qerl.load_model(folder)
    assert len(made) == 4 and os.listdir(tmp_path) == [os.path.basename(folder)]


def killed_at(event, number, when, *args):
    """Run the training in a child that a SIGKILL ends; event: a function's (module, name), `when` its call `number` is done.

    when: "before", "after" or "amid" the call (half a line is written). Returns how often the event came; None if it was killed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        torch.set_num_threads(1)
        module, name = event
        original, calls = getattr(module, name), []

        def counted(*given):
            calls.append(given)
            if len(calls) == number and when == "amid":
                with open(given[0], "a") as f:
                    f.write('{"step": 1, "rew')
            if len(calls) == number and when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            original(*given)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        setattr(module, name, counted)
        sys.argv = ["train_gsm8k.py", *map(str, args)]
        try:
            train_gsm8k.main()
            os.write(writer, str(len(calls)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as f:
        count = f.read()
    return int(count) if count else None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
def test_a_kill_at_any_rename_or_log_line_resumes_bit_for_bit(quiz, tmp_path):
    """A run of two steps is killed before and after each rename, and around each line of its logs."""
    importlib.import_module("matplotlib.pyplot")                        # once, not in each child
    options = ("--model", quiz, "--data", quiz, *QUICK, *LEARNING, "--steps", 2, "--save-every", 1,
               "--eval-questions", 2)
    rename, line = (os, "replace"), (keeper, "append_jsonl")
    renames = killed_at(rename, 0, "before", *options, "--out", tmp_path / "whole")
    assert renames >= 12
    kills = [(rename, n, "before") for n in range(1, renames + 1)] + [(rename, n, "after") for n in (2, 5, 7, renames)]
    kills += [(line, n, when) for n in (1, 2) for when in ("before", "amid", "after")]
    whole = files_below(tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    for event, number, when in kills:
        out = tmp_path / f"{event[1]}-{number}-{when}"
        assert killed_at(event, number, when, *options, "--out", out) is None
        assert killed_at(rename, 0, "before", *options, "--out", out, "--resume") is not None, out
        again = files_below(out)
        for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "samples.jsonl",
                     "answers_before.jsonl", "answers_after.jsonl"):
            assert again[name] == whole[name], (out, name)
        assert without_times(out / "metrics.jsonl") == without_times(tmp_path / "whole" / "metrics.jsonl"), out
        assert again.keys() == whole.keys(), out
        stored, expected = (load_file(f / "checkpoint.safetensors") for f in (out, tmp_path / "whole"))
        assert all(torch.equal(stored[name], expected[name]) for name in expected), out


def test_the_lock_is_closed_at_the_end(monkeypatch, tmp_path):
    locks = []
    open_run = train_gsm8k.open_run
    monkeypatch.setattr(train_gsm8k, "open_run", lambda settings: locks.append(open_run(settings)) or locks[-1])
    monkeypatch.setattr(train_gsm8k, "train", lambda settings: None)
    run_main(monkeypatch, "--out", tmp_path / "run")
    monkeypatch.setattr(train_gsm8k, "train", lambda settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_main(monkeypatch, "--out", tmp_path / "run")
    assert [lock.closed for lock in locks] == [True, True]


def held_open():
    """The files that this process has open or mapped into its memory."""
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:                                                 # the listing's own
            pass
    with open("/proc/self/maps") as maps:
        return opened + [line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") >= 5 and "/" in line]


@pytest.fixture
def windows(monkeypatch):
    """What Windows does otherwise: no fcntl, locks by msvcrt, and no open or mapped file is replaced, renamed or removed."""
    locked = {}

    def locking(fd, mode, count):
        file = os.readlink(f"/proc/self/fd/{fd}")
        owner = locked.get(file, fd)                                    # a number that comes again was closed in between
        if owner != fd and os.path.exists(f"/proc/self/fd/{owner}") and os.readlink(f"/proc/self/fd/{owner}") == file:
            raise PermissionError(errno.EACCES, "Permission denied")
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0 and count == 1         # all lock the same byte
        locked[file] = fd
    for module in (run_folder, cache_folder):
        monkeypatch.setattr(module, "fcntl", None)
    monkeypatch.setattr(run_folder, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2), raising=False)
    for name in ("replace", "rename", "remove", "unlink"):
        def strict(*paths, original=getattr(os, name), **options):
            for path in paths:
                if os.path.abspath(path) in held_open():
                    raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))
            return original(*paths, **options)
        monkeypatch.setattr(os, name, strict)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="sees open files by Linux's /proc")
def test_no_open_file_is_replaced(qwen, data, tmp_path, monkeypatch, capsys, windows):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1, "--eval-questions", 2)
    save = keeper.save_checkpoint

    def stopped(folder, model, optimizer, generators, state, settings):
        save(folder, model, optimizer, generators, state, settings)
        if state["step"] == 2:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "save_checkpoint", stopped)
        with pytest.raises(SystemExit) as stop:
            run_main(monkeypatch, *options, "--out", tmp_path / "run")
    assert stop.value.code == 130
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume")
    assert [m["step"] for m in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume", "--eval-only")
    missing = refused(monkeypatch, capsys, *options, "--data", tmp_path / "none", "--out", tmp_path / "fails")
    assert "no such folder" in missing and not (tmp_path / "fails").exists()


@pytest.mark.skipif(run_folder.fcntl is None, reason="Windows locks otherwise")
def test_a_file_system_without_locks_ends_no_run(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    run_folder.open_folder(str(tmp_path / "run"), False).close()
    assert "cannot be locked (Function not implemented); start no second run there" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="sees open files by Linux's /proc")
def test_a_folder_in_use_is_refused_without_fcntl(qwen, data, tmp_path, monkeypatch, capsys, windows):
    lock = run_folder.open_folder(str(tmp_path / "run"), False)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--out", tmp_path / "run")
    assert "in use by a running process" in refused(monkeypatch, capsys, *options)
    lock.close()
    run_main(monkeypatch, *options)


def test_a_file_that_may_not_be_written_is_not_to_be_removed(qwen, data, tmp_path, monkeypatch, capsys):
    def denied(*paths):
        raise PermissionError(errno.EACCES, "Permission denied", str(paths[1]))
    monkeypatch.setattr(os, "replace", denied)
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run")
    assert "answers_before.jsonl" in error and "close the program" in error and "remove" not in error


def test_a_file_that_may_not_be_read_is_to_be_read(tmp_path, monkeypatch):
    path = tmp_path / "train.jsonl"
    path.write_text("")
    error = PermissionError(errno.EACCES, "Permission denied", str(path))
    assert "let it be written" in stops.what_failed(error, None)
    monkeypatch.setattr(os, "access", lambda file, mode: mode != os.R_OK)
    assert stops.what_failed(error, None).endswith("train.jsonl'; let it be read")


def test_an_error_of_the_system_leaves_no_empty_folder(qwen, data, tmp_path, monkeypatch, capsys):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(data))
    monkeypatch.setattr(train_gsm8k, "load_questions", denied)
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run")
    assert "Permission denied" in error and "--resume" not in error and not (tmp_path / "run").exists()


def test_questions_with_different_answers_are_left_out(tmp_path, capsys):
    lines = [("a", "so\n#### 1"), ("b", "#### 1"), ("a ", "#### 2"), ("b", "#### 10"), ("c", "#### 3"), ("c", "or\n#### 3.0")]
    write_jsonl(tmp_path / "train.jsonl", [{"question": question, "answer": answer} for question, answer in lines])
    kept = questions.read_questions(str(tmp_path), "train*.jsonl")
    assert [q["question"] for q in kept] == ["c", "c"] and "4 of 6 questions stand there with different" in capsys.readouterr().out
    write_jsonl(tmp_path / "train.jsonl", [{"question": question, "answer": answer} for question, answer in lines[:4]])
    with pytest.raises(qerl.UserError, match="each question stands there with different answers"):
        questions.read_questions(str(tmp_path), "train*.jsonl")


def bad_jsonl(tmp_path, line='{"question": "q"}'):
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n' + line + "\n")
    (tmp_path / "test.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    return tmp_path


def used_folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize("options,message", [
    (lambda t: ["--model", "./no/such/folder"], "model ./no/such/folder: no such folder"),
    (lambda t: ["--data", bad_jsonl(t)], "train.jsonl:2: not a line of"),
    (lambda t: ["--data", bad_jsonl(t, '{"question": "q", "answer": "#### 1,00"}')], "train.jsonl:2: '1,00' behind"),
    (lambda t: ["--data", t], "no file matches"),
    (lambda t: ["--max-new-tokens", 600], "--max-new-tokens 600: the model has 512 positions"),
    (lambda t: ["--max-new-tokens", 511], "no prompt fits into 1 tokens"),
    (lambda t: ["--sigma-start", "inf"], "--sigma-start inf: must not be"),
    (lambda t: ["--out", used_folder(t)], "already holds a run"),
    (lambda t: ["--resume"], "out: no such folder"),
    (lambda t: ["--step", 3], "unrecognized arguments: --step 3"),
    (lambda t: ["--device", "cuda:99"], "no such CUDA GPU here"),
    (lambda t: ["--device", "mps"], "--device mps: Apple's GPUs have no float8"),
    (lambda t: ["--device", "mps:0"], "use --device cpu"),
    (lambda t: ["--device", "meta"], "--device meta: unknown"),
    (lambda t: ["--device", "cpu:5"], "--device cpu:5: a CPU has no number; use --device cpu"),
    (lambda t: ["--eval-only", "--out", used_folder(t)], "already holds a run"),
    (lambda t: ["--weights", "int3"], "invalid choice: 'int3'"),
    (lambda t: ["--group", 1], "--group 1"),
    (lambda t: ["--device", "gpu"], "--device gpu: unknown"),
    (lambda t: ["--lr", -1], "--lr -1.0"),
    (lambda t: ["--lora-rank", 65], "--lora-rank 65: the smallest layer has 64 features"),
    (lambda t: ["--seed", 2 ** 70], "below 2**63"),
    (lambda t: ["--prompts", 3, "--updates", 2], "not divisible by --updates"),
    (lambda t: ["--sigma-end", 0], "needs both sigmas positive"),
    (lambda t: ["--lr", 1e30], "lower --lr"),
])
def test_bad_input_is_one_line_and_exit_2(qwen, data, tmp_path, monkeypatch, capsys, options, message):
    base = ["--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "out"]
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, *base, *options(tmp_path))
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(error) == 1 and message in error[0]


WITHOUT = """
import os, sys, types
sys.modules["triton"] = None
import torch, transformers

*options, out = sys.argv[1:]
torch.set_num_threads(1)
for system in ("macos", "windows"):
    child = os.fork()                  # torch and transformers are imported once; what is the project's, in each child
    if child:
        if os.waitpid(child, 0)[1]:
            sys.exit(system + " failed")
        continue
    if system == "windows":
        sys.modules["fcntl"] = sys.modules["resource"] = None
        sys.modules["msvcrt"] = types.SimpleNamespace(locking=lambda *lock: None, LK_NBLCK=2)
    import train_gsm8k
    print(system, train_gsm8k.arguments([]).device, flush=True)
    sys.argv[1:] = [*options, "--out", os.path.join(out, system)]
    train_gsm8k.main()
    sys.exit()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
def test_a_run_without_the_modules_of_linux(qwen, data, tmp_path):
    """macOS has no Triton, Windows no fcntl and resource either: the rest does without."""
    options = ["--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--eval-questions", 1, tmp_path]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", WITHOUT, *map(str, options)], cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "macos cpu\n" in done.stdout and "windows cpu\n" in done.stdout
    peaks = {}
    for system in ("macos", "windows"):
        assert (tmp_path / system / "report.html").exists()
        peaks[system] = read_jsonl(tmp_path / system / "metrics.jsonl")[0]["peak_memory_gb"]
    assert peaks["macos"] > 0.05 and peaks["windows"] == 0


def test_a_folder_in_use_is_refused(qwen, data, tmp_path, monkeypatch, capsys):
    settings = train_gsm8k.arguments(["--out", str(tmp_path / "run")])
    lock = train_gsm8k.open_run(settings)
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run")
    assert stop.value.code == 2 and "in use" in capsys.readouterr().err
    lock.close()


def test_out_of_memory_names_the_flags(monkeypatch, capsys, tmp_path):
    def explode(settings):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(train_gsm8k, "train", explode)
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, "--out", tmp_path / "run")
    assert stop.value.code == 2 and "--micro-tokens" in capsys.readouterr().err


def test_long_prompts_are_counted_and_skipped(capsys):
    problems = [{"question": "q" * n, "answer": "#### 1"} for n in (5, 50, 500)]
    kept = train_gsm8k.with_prompts(problems, ByteText(), 60)
    assert [len(p["question"]) for p in kept] == [5, 50] and "1 of 3 prompts" in capsys.readouterr().out


def test_paper_defaults_with_model():
    settings = train_gsm8k.arguments(["--model", "Qwen/Qwen2.5-3B-Instruct", "--preset", "paper", "--device", "cpu"])
    table4 = dict(prompts=128, group=8, updates=4, lr=1e-5, lora_rank=32, sigma_start=1e-2, sigma_end=5e-4, max_new_tokens=4096,
                  clip_low=0.2, clip_high=0.28, weights="nvfp4", schedule="exponential")
    assert {k: getattr(settings, k) for k in table4} == table4
    assert train_gsm8k.arguments(["--model", "Qwen2.5-3B"]).model == "Qwen/Qwen2.5-3B-Instruct"
    paper_bf16 = ["--model", "Qwen2.5-3B", "--preset", "paper", "--weights", "bf16"]
    assert train_gsm8k.arguments(paper_bf16).lr == 5e-6


def test_every_setting_is_a_flag_and_its_help_tells_remark_and_defaults(monkeypatch, capsys):
    settings = fields(train_gsm8k.Settings)
    for f in settings:
        flag = "--" + f.name.replace("_", "-")
        value = (f.metadata["choices"] or {bool: [True], int: [7], float: [0.5], str: ["x"], list: [["x", "y"]]}[f.type])[0]
        values = value if f.type is list else [str(value)]
        argv = [flag] if f.type is bool else [flag, *values]
        assert parse_flags(train_gsm8k.Settings, "", {}, argv) == {f.name: value}
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, "--help")
    assert stop.value.code == 0
    entries = re.findall(r"^  --([\w-]+)(.*(?:\n {10,}.*)*)", capsys.readouterr().out, re.MULTILINE)
    told = {flag.replace("-", "_"): help_text for flag, help_text in entries}
    assert told.keys() == {f.name for f in settings}
    for f in settings:
        assert f.metadata["remark"] in told[f.name]
        if f.default is not None and f.type is not bool:
            assert re.search(rf"\(default {re.escape(str(f.default))}[;)]", told[f.name])
    for preset, values in train_gsm8k.PRESETS.items():
        for name, value in values.items():
            assert re.search(rf"[(; ]{preset} {re.escape(str(value))}[;)]", told[name])


@pytest.mark.parametrize("argv,expected", [
    ([], dict(steps=50, lr=3e-3, prompts=16, beta=0.04, reward="paper", quantizer="rtn")),
    (["--steps", "7", "--lr", "5e-5"], dict(steps=7, lr=5e-5, prompts=16)),
    (["--prompts", "64", "--beta", "0"], dict(prompts=64, beta=0.0, steps=50)),       # given, though it is the default
    (["--model", "a/b"], dict(prompts=64, steps=300, lr=1e-4, beta=0.0, reward="answer", quantizer="gptq")),
    (["--model", "a/b", "--weights", "bf16"], dict(lr=1e-4, quantizer="rtn")),        # there is nothing to choose
    (["--model", "a/b", "--weights", "nf4"], dict(quantizer="rtn")),
    (["--model", "a/b", "--shard"], dict(quantizer="rtn")),
    (["--model", "a/b", "--shard", "--quantizer", "awq"], dict(quantizer="awq")),
    (["--model", "a/b", "--method", "flashrl"], dict(quantizer="rtn", weights="bf16")),
    (["--model", "a/b", "--method", "awq"], dict(quantizer="awq")),
    (["--model", "a/b", "--preset", "paper"], dict(quantizer="awq", lr=1e-5)),
    (["--model", "a/b", "--preset", "small"], dict(prompts=16, lr=3e-3)),
    (["--model", "a/b", "--preset", "paper", "--weights", "bf16"], dict(lr=5e-6, beta=0.0, prompts=128, quantizer="rtn")),
    (["--model", "a/b", "--preset", "paper", "--weights", "bf16", "--lr", "1e-3"], dict(lr=1e-3, prompts=128)),
    (["--model", "a/b", "--preset", "paper", "--method", "fp16", "--weights", "bf16"], dict(lr=5e-6)),
    (["--model", "a/b", "--preset", "paper", "--method", "flashrl"], dict(lr=5e-6, weights="bf16")),      # which chooses bf16
    (["--algo", "dapo"], dict(beta=0.0, lr=3e-3)),
    (["--algo", "dapo", "--beta", "0.1"], dict(beta=0.1)),
    (["--algo", "dapo", "--preset", "paper", "--model", "a/b"], dict(beta=0.0, prompts=128)),
])
def test_flags_win_over_the_preset_and_it_over_the_defaults(argv, expected):
    settings = train_gsm8k.arguments([*argv, "--device", "cpu"])
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize("options,fitted", [(["--quantizer", "gptq"], True), (["--method", "awq"], True), (["--method", "qat:sft"], True),
                                            (["--quantizer", "four-over-six"], False), ([], False)])
def test_codes_fitted_to_questions_are_evaluated_with_the_same(monkeypatch, options, fitted):
    def read_saved(settings, must_agree):
        assert ("data" in must_agree) == fitted and "quantizer" in must_agree
    monkeypatch.setattr(train_gsm8k, "read_saved", read_saved)
    settings = train_gsm8k.arguments(["--device", "cpu", "--eval-only", "--resume", "--out", "run", *options])
    with pytest.raises(qerl.UserError, match="no checkpoint to evaluate"):
        train_gsm8k.evaluate_only(settings)


def test_a_study_without_git_has_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert study.commit() is None


# A question with whatever ends a line or a record somewhere, and what JSON has to escape.
AWKWARD = 'one\ntwo\r\nthree\u2028four\u2029five\x85six\x0b\x0c\x1c\x1d\x1eseven\t---\n{"step": 9}\\ "eight" \x00 ####'


def test_samples_jsonl_holds_a_group_and_is_cut_at_resume(qwen, tmp_path, monkeypatch, capsys):
    for name, question in (("train", AWKWARD), ("test", "another")):
        problem = json.dumps({"question": question, "answer": "#### 1"}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(problem * 2)
    options = ("--model", qwen[0], "--data", tmp_path, *QUICK, "--prompts", 4, "--group", 4)
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, number, scheme: (float(len(text) % 2),) * 2)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    stored = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    samples = [json.loads(line) for line in stored.decode().splitlines()]
    assert [s["step"] for s in samples] == [1, 2, 4, 5] and samples == read_jsonl(tmp_path / "whole" / "samples.jsonl")
    for sample in samples:
        assert sample["question"] == AWKWARD and sample["number"] == "1"
        assert len(sample["completions"]) == 4
        assert len({c["reward"] for c in sample["completions"]}) == 2
        for c in sample["completions"]:
            parts = ("tokens", "entropy", "rollout_logprobs", "training_logprobs")
            assert 1 <= len(c["tokens"]) <= 8 and len({len(c[part]) for part in parts}) == 1
            assert c["reward"] == float(c["correct"]) and all(isinstance(t, str) for t in c["tokens"])
            assert min(c["entropy"]) > 0 and max(c["rollout_logprobs"] + c["training_logprobs"]) < 0
        assert abs(sum(c["advantage"] for c in sample["completions"])) < 1e-3

    def stopped(folder, model, optimizer, generators, state, settings):
        if state["step"] == 5:
            raise KeyboardInterrupt
        save(folder, model, optimizer, generators, state, settings)
    save = keeper.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "save_checkpoint", stopped)
        with pytest.raises(SystemExit) as stop:
            run_main(monkeypatch, *options, "--out", tmp_path / "cut")
    assert stop.value.code == 130 and f"--resume --out {tmp_path / 'cut'}" in capsys.readouterr().err
    log = tmp_path / "cut" / "samples.jsonl"
    assert [s["step"] for s in read_jsonl(log)] == [1, 2, 4, 5]                          # the last checkpoint is of step 4
    with log.open("a") as f:
        f.write('{"step": 9, "quest')
    run_main(monkeypatch, *options, "--out", tmp_path / "cut", "--resume")
    assert log.read_bytes() == stored


def test_answers_before_and_after_and_the_report(qwen, data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    reported = []
    monkeypatch.setattr(keeper, "report_on", lambda folder: reported.append((folder, sorted(os.listdir(folder)))))
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--eval-questions", 5, "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    held_out = made_up_problems()[1][:5]
    for when in ("before", "after"):
        answers = read_jsonl(out / f"answers_{when}.jsonl")
        assert [a["question"] for a in answers] == [p["question"] for p in held_out]
        assert [a["number"] for a in answers] == [str(final_number(p)) for p in held_out]
        for kind in ("accuracy", "greedy"):
            for answer in answers:
                assert answer[kind]["correct"] == (stated_number(answer[kind]["text"]) == Decimal(answer["number"]))
            assert summary[f"{kind}_{when}"] == sum(a[kind]["correct"] for a in answers) / 5
    (folder, files), = reported                                                          # once, when all else is there
    assert folder == str(out) and {"summary.json", "curve.png", "answers_after.jsonl", "samples.jsonl", "metrics.jsonl"} <= set(files)


DAPO_PROMPT = ("Solve the following math problem step by step. The last line of your response should be of the form Answer: "
               "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on "
               'its own line after "Answer:".')
FOREIGN_ROWS = {
    "bigmath": [{"problem": "Half of ten?", "answer": "5", "source": "orca", "domain": ["Arithmetic"], "llama8b_solve_rate": 0.9}],
    "dapo-math": [{"data_source": "math_dapo", "ability": "MATH", "prompt": [{"content": DAPO_PROMPT.format(question), "role": "user"}],
                   "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "0"}}
                  for question in ["Five ducks.\n\nAnd so on?"] * 3],
    "math-500": [{"problem": "Convert $(0,3)$.", "solution": "So \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.", "subject": "Precalculus",
                  "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "level": 2, "unique_id": "test/precalculus/807.json"}],
    "aime24": [{"id": 60, "problem": "Aya walks.", "solution": "... \\boxed{204}.", "answer": "204", "url": "", "year": "2024"}],
    "aime25": [{"problem": "Sum of bases?", "answer": "70", "id": "0"}],
    "amc23": [{"id": 0, "answer": "27.0", "url": "", "question": "Cities A and B?"}],
    "solutions": [{"problem": "Twice $x$?", "solution": "It is \\boxed{2x}.", "level": "Level 1", "type": "Algebra"}],
}
FOREIGN_QUESTIONS = {
    "bigmath": ("Half of ten?", "5"),
    "dapo-math": ("Five ducks.\n\nAnd so on?", "34"),
    "math-500": ("Convert $(0,3)$.", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    "aime24": ("Aya walks.", "204"),
    "aime25": ("Sum of bases?", "70"),
    "amc23": ("Cities A and B?", "27.0"),
    "solutions": ("Twice $x$?", "2x"),
}


@pytest.mark.parametrize("kind", FOREIGN_ROWS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_foreign_questions_are_read(tmp_path, kind, ending):
    path = tmp_path / f"{kind}.{ending}"
    if ending == "jsonl":
        write_jsonl(path, FOREIGN_ROWS[kind])
    else:
        pytest.importorskip("datasets").Dataset.from_list(FOREIGN_ROWS[kind]).to_parquet(str(path))
    found = math_questions(str(path))
    assert [(q["question"], q["answer"]) for q in found] == [FOREIGN_QUESTIONS[kind]]


@pytest.mark.parametrize("row", [
    {"question": "a", "answer": "x #### 2-3"}, {"question": "a", "answer": "#### "}, {"question": "a", "answer": "#### 5 million"},
    {"question": 5, "answer": "5"}, {"question": ["a"], "answer": "5"}, {"question": [{"role": "user"}], "answer": "5"}, {"question": {"a": 1}},
    {"question": " ", "answer": "5"}, {"question": "a", "answer": [1, 2]}, {"question": "a", "answer": math.nan},
    {"question": "a", "reward_model": 5}, {"question": "a\ud800b", "answer": "5"}, b"\xff{}",
    {"problem": "a", "solution": "so it is 5"}, {"question": "a", "answer": "#### 5 #### 6"},
    {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "answer": "5"}])
def test_what_is_no_question_is_refused_by_its_line(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "fine", "answer": "5"}\n' + (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
    with pytest.raises(qerl.UserError, match="rows.jsonl:2: "):
        math_questions(str(path))


@pytest.mark.parametrize("gold", [
    "2 hours 30 minutes", "5 x 10^3", "5 \\times 10^3", "1 in 4", "5 out of 6", "3 squared", "x + 5", "5x", "3 ± 1", "5 π", "5 k", "1 . 5", "5 ,000",
    "2 - 3", "3 to 4", "3 and 4", "5 or 6", "5 (or 6)", "1 1/2", "5 million", "4 = 5"])
def test_unclear_gold_answers_are_no_number(gold):
    assert final_number({"answer": f"so\n#### {gold}"}) is None


@pytest.mark.parametrize("box", ["5 million", "5 thousand", "\\neq 5", "≠5", ">5", "<5", "\\geq 5"])
def test_other_magnitudes_and_bounds_earn_nothing(box):
    assert train_gsm8k.reward(f"\\boxed{{{box}}}", Decimal(5), "answer") == (0.0, 0.0)


@pytest.mark.parametrize("flag", ["--lr", "--tis", "--clip-high", "--beta", "--weight-decay", "--lora-alpha"])
def test_numbers_beyond_float32_are_refused(qwen, data, tmp_path, monkeypatch, capsys, flag):
    assert "at most 1e30" in refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, flag, 1e38, "--out", tmp_path / "run")


def test_a_torn_line_costs_no_other(tmp_path, capsys):
    lines = [json.dumps(step) for step in logged_steps(2, "a", None, 3)]
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("\n".join(["torn{", *lines, ""]))
    assert read_log(str(tmp_path), 2) == logged_steps(2) == read_jsonl(tmp_path / "samples.jsonl")
    assert "lacks 1 of the 2 steps" in capsys.readouterr().err


@pytest.mark.parametrize("study,options,message", [
    (claims, ["--lrs", "nan"], "--lrs nan"), (claims, ["--seeds", "-1"], "--seeds -1"), (compare, ["--lrs", "-1"], "--lrs -1.0"),
    (entropy, ["--sigmas", "-1"], "--sigmas -1.0"), (entropy, ["--sigmas", "nan"], "--sigmas nan")])
def test_studies_refuse_what_cannot_be_meant(tmp_path, study, options, message):
    with pytest.raises(qerl.UserError, match=message):
        study.main([*options, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_gsm8k_by_name_is_fetched(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    held_out = [{"question": "test"}]
    monkeypatch.setattr(questions, "gsm8k", lambda folder: ([{"question": str(folder)}], held_out))
    assert questions.load_questions("gsm8k", None, None) == ([{"question": "None"}], held_out)
    (tmp_path / "gsm8k").mkdir()
    assert questions.load_questions("gsm8k", None, None) == ([{"question": "gsm8k"}], held_out)      # a folder of that name


def test_datasets_are_asked_for_by_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append((*args, options)) or FOREIGN_ROWS["aime25"])
    assert math_questions("aime25")[0]["source"] == "aime25" and len(math_questions("somebody/else")) == 1
    assert asked == [("math-ai/aime25", {"split": "test"}), ("somebody/else", {"split": "train"})]


@pytest.mark.parametrize("right,answer", [
    ("5", "5"), ("27.0", "27"), ("\\frac{3}{4}", "0.75"), ("(3, \\frac{\\pi}{2})", "\\left(3,\\frac{\\pi}{2}\\right)"),
    ("p - q", "-q+p"), ("3,5,7", "7, 5, 3"), ("1000", "1,000"), ("\\text{Evelyn}", "Evelyn"), ("90^\\circ", "90")])
def test_mathematics_is_compared_and_not_its_spelling(right, answer):
    pytest.importorskip("math_verify")
    assert is_equal(f"So \\boxed{{1}}, no, \\boxed{{{answer}}}.", right)
    assert not is_equal(f"So {answer}.", right) and not is_equal(f"\\boxed{{{answer}}} or \\boxed{{x + 1}}", right)


@pytest.mark.parametrize("answer,right", [
    *((answer, "5") for answer in ["3, 5", "4 or 5", "- 5", "5^2", "x", "", "5" * 2000, "x + 5", "5x"]),
    ("5", "x+5"), ("2", "2x"), ("3", "3!"), ("5", "(5,\\infty)"), ("7b", "7a"), ("5", "5\\theta"), ("5", "f(5)")])
def test_other_mathematics_earns_nothing(answer, right):
    pytest.importorskip("math_verify")
    assert not is_equal(f"\\boxed{{{answer}}}", right)


@pytest.mark.parametrize("text,box", [
    ("\\boxed{1} \\boxed {\\frac{3^{\\frac{1}{2}}}{2}} } \\boxed{2", "\\frac{3^{\\frac{1}{2}}}{2}"), ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("\\boxed{\\boxed{5}}", "\\boxed{5}"), ("\\boxed{}", ""), ("} boxed{5}", None), ("\\boxed{" * 10 ** 5, None)])
def test_the_last_box_of_any_depth(text, box):
    assert last_box(text) == box


def test_foreign_columns_of_a_file_steer_nothing(tmp_path):
    line = {"question": "a", "answer": "#### 5", "source": ["b"], "begun": "\\boxed{5}", "right": 3}
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", [line])
    assert questions.gsm8k(str(tmp_path)) == ([{"question": "a", "answer": "#### 5"}],) * 2


def test_a_limit_of_held_out_questions_holds_for_each_set():
    both = [{"source": name, "number": number} for name in "ab" for number in range(5)]
    assert questions.first_of_each(both, 2) == both[:2] + both[5:7] and questions.first_of_each(both, 0) == both
    assert questions.first_of_each([{}] * 3, 2) == [{}] * 2


def test_held_out_questions_are_not_trained_on(tmp_path, capsys):
    rows = [{"question": f"how many {i}?", "answer": str(i)} for i in range(4)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "exam.jsonl", rows[2:])
    data, exam = str(tmp_path / "train.jsonl"), str(tmp_path / "exam.jsonl")
    train, held_out = questions.load_questions(data, [exam], None)
    assert [q["answer"] for q in train] == ["0", "1"] and [q["answer"] for q in held_out] == ["2", "3"]
    assert "2 of 4 training questions are held out, too, and are left out" in capsys.readouterr().out
    with pytest.raises(qerl.UserError, match="all of its questions are held out"):
        questions.load_questions(data, [data], None)


def test_a_run_on_foreign_questions_with_two_sets_held_out(qwen, tmp_path, monkeypatch, capsys):
    for kind in ("bigmath", "aime25", "amc23"):
        write_jsonl(tmp_path / f"{kind}.jsonl", FOREIGN_ROWS[kind] * 2)
    out = tmp_path / "run"
    options = ("--model", qwen[0], *QUICK, "--steps", 1, "--prompts", 1, "--data", tmp_path / "bigmath.jsonl")
    assert "--eval" in refused(monkeypatch, capsys, *options, "--out", out)
    texts = iter(["\\boxed{5}", "5", "\\boxed{70}", "27", "70", "no"])
    monkeypatch.setattr(train_gsm8k, "decode_all", lambda _, rollout: [next(texts) for _ in rollout.length])
    run_main(monkeypatch, *options, "--eval", tmp_path / "aime25.jsonl", tmp_path / "amc23.jsonl", "--skip-eval-before", "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    metrics, = without_times(out / "metrics.jsonl")
    assert metrics["accuracy"] == 0.5                                                    # of "\\boxed{5}" and "5"
    assert summary["accuracy_after"] == 1.0 and summary["greedy_after"] == 0.5
    assert summary["greedy_aime25_after"] == 1.0 and summary["greedy_amc23_after"] == 0.0


def test_full_fine_tuning_has_the_gradients_of_transformers(qwen):
    """All linear layers, their biases and the norms, through Eq. 2's product without LoRA."""
    folder, theirs = qwen
    model = qerl.load_model(folder, "bf16", train_norms=True)
    train_all_weights(model)
    prompts, completions = [[1, 2, 3], [4, 5]], torch.tensor([[6, 7, 8], [9, 10, 0]])
    length = torch.tensor([3, 2])
    model.recompute_in_backward()
    qerl.token_logprobs(model, prompts, completions, length).sum().backward()
    theirs = copy.deepcopy(theirs).requires_grad_(True)
    for prompt, completion, n in zip(prompts, completions, length):
        tokens = torch.tensor([prompt + completion[:n].tolist()])
        logprobs = theirs(tokens).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        logprobs.gather(1, completion[:n, None]).sum().backward()
    expected = dict(theirs.named_parameters())
    for layer in model.quantized_layers():
        for name, weight, bias in zip(layer.names, layer.master.grad.split(layer.sizes), layer.bias.grad.split(layer.sizes)
                                      if layer.bias is not None else [None] * len(layer.sizes)):
            torch.testing.assert_close(weight, expected[f"{name}.weight"].grad, rtol=1e-4, atol=1e-5)
            if bias is not None:
                torch.testing.assert_close(bias, expected[f"{name}.bias"].grad, rtol=1e-4, atol=1e-5)
    for norm in (m for m in model.modules() if isinstance(m, qerl.RMSNorm)):
        torch.testing.assert_close(norm.weight.grad, expected[f"{norm.name}.weight"].grad, rtol=1e-4, atol=1e-5)
    assert len(qerl.trainable(model)) == sum(1 + (layer.bias is not None) for layer in model.quantized_layers()) + sum(
        isinstance(m, qerl.RMSNorm) for m in model.modules())


def test_full_fine_tuning_samples_what_it_trains(qwen, data, tmp_path, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--weights", "bf16", "--lora-rank", 0, "--lr", 1e-3,
               "--sigma-start", 0, "--sigma-end", 0)
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))     # differs within a group
    run_main(monkeypatch, *options, "--out", tmp_path / "run")
    metrics = without_times(tmp_path / "run" / "metrics.jsonl")
    assert all(m["gradient_norm"] > 0 and m["mismatch_kl"] < 1e-9 for m in metrics)      # it sampled from the newest weights
    start = dict(qerl.load_model(qwen[0], "bf16").named_parameters())["norm.weight"]
    state, tensors = read_checkpoint(str(tmp_path / "run"), {}, must_agree=["no such setting"])
    assert state["step"] == 5 and not torch.equal(tensors["model.norm.weight"], start)
    assert not (tmp_path / "run" / "adapter").exists()
    assert "--weights bf16" in refused(monkeypatch, capsys, *options, "--weights", "nvfp4", "--out", tmp_path / "a")
    assert "--beta 0" in refused(monkeypatch, capsys, *options, "--beta", 0.1, "--out", tmp_path / "b")


def test_pass_at_1_is_the_mean_of_so_many_answers_to_each_question(qwen, data, tmp_path, monkeypatch):
    """The grader is replaced by one that finds two of three answers to each question right."""
    out = tmp_path / "run"
    numbers = iter([final_number(p) for p in made_up_problems()[1][:5] for _ in range(3)] * 2)
    graded = []

    def two_of_three(text):
        graded.append(text)
        return None if len(graded) <= 15 and len(graded) % 3 == 0 and next(numbers) else next(numbers)

    monkeypatch.setattr(train_gsm8k, "stated_number", two_of_three)
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--eval-questions", 5,
             "--eval-samples", 3, "--skip-eval-before", "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    assert len(graded) == 5 * 3 + 5 and len(set(graded[:3])) > 1                         # three answers, then a greedy one
    assert summary["accuracy_after"] == 10 / 15
    assert "accuracy_before" not in summary and not (out / "answers_before.jsonl").exists()
    assert [a["accuracy"]["text"] for a in read_jsonl(out / "answers_after.jsonl")] == graded[:15:3]
    assert (out / "report.html").exists() and (out / "curve.png").exists()


@pytest.mark.parametrize("tracker,package", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_log_gets_each_steps_numbers_or_names_the_missing_package(qwen, data, tmp_path, monkeypatch, capsys, tracker, package):
    out = tmp_path / "run"
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--out", out, "--log", tracker)
    monkeypatch.setitem(sys.modules, package, None)                                      # importing it is an ImportError
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, *options)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(error) == 1 and f"pip install {tracker}" in error[0]
    assert not out.exists()                                                              # nothing was measured before

    opened, written = [], {}

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            opened.append(folder)
            assert purge_step is None

        def add_scalar(self, key, value, step):
            written.setdefault(step, {})[key] = value

        def flush(self):
            pass

    def init(dir, **options):
        assert options["config"]["lora_rank"] == 2
        opened.append(dir)
        return types.SimpleNamespace(log=lambda numbers, step: written.update({step: numbers}), id="a1")
    fake = types.ModuleType(package)
    fake.SummaryWriter, fake.init = SummaryWriter, init
    monkeypatch.setitem(sys.modules, package, fake)
    run_main(monkeypatch, *options)
    assert opened == [str(out)]
    assert written == {m["step"]: flat(m) for m in read_jsonl(out / "metrics.jsonl")} and written.keys() == {1, 2}
    assert {"reward", "accuracy", "kl", "sigma", "seconds/rollout"} <= written[2].keys()
    assert all(isinstance(value, (int, float)) for numbers in written.values() for value in numbers.values())


@pytest.mark.parametrize("tracker,package", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_resumed_run_goes_on_in_its_tracker(qwen, data, tmp_path, monkeypatch, tracker, package):
    """Killed after step 3, resumed after step 2: TensorBoard forgets step 3, wandb is given the id of its run again."""
    calls = []

    class SummaryWriter:
        add_scalar = flush = lambda self, *scalar: None

        def __init__(self, folder, purge_step):
            calls.append(purge_step)

    def init(dir, id, resume, **options):
        calls.append((id, resume))
        return types.SimpleNamespace(log=lambda numbers, step: None, id=id or f"new{len(calls)}")
    fake = types.ModuleType(package)
    fake.SummaryWriter, fake.init = SummaryWriter, init
    monkeypatch.setitem(sys.modules, package, fake)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 4, "--out", tmp_path / "run", "--log", tracker)

    def log(self, logged):
        original(self, logged)
        if logged["step"] == 3:
            raise KeyboardInterrupt
    original = keeper.Keeper.log
    with monkeypatch.context() as patch:
        patch.setattr(keeper.Keeper, "log", log)
        with pytest.raises(SystemExit):
            run_main(monkeypatch, *options)
    run_main(monkeypatch, *options, "--resume")
    run_main(monkeypatch, *options[:-4], "--out", tmp_path / "another", "--log", tracker)
    assert calls == ([None, 3, None] if tracker == "tensorboard" else [(None, "allow"), ("new1", "allow"), (None, "allow")])


def test_a_tracker_that_cannot_be_reached_is_one_line(qwen, data, tmp_path, monkeypatch, capsys):
    def init(**options):
        raise RuntimeError("no API key configured\nhere")
    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run", "--log", "wandb")
    assert "--log wandb: no run could be opened (no API key configured)" in error and not (tmp_path / "run").exists()


REPORT_TOKENS = ["<think>", " 6", "*", "7", "\n\n", "\ufffd", "\x00", "  ", ""]
REPORT_METRICS = {
    "sigma": 0.01,
    "reward": 0.5,
    "accuracy": 0.25,
    "entropy": 0.3,
    "length": 9.0,
    "kl": 0.01,
    "mismatch_kl": float("nan"),
    "gradient_norm": 0.1,
}
REPORT_SUMMARY = {
    "accuracy_before": 0.5,
    "accuracy_after": 0.75,
    "greedy_before": 0.25,
    "greedy_after": 0.5,
    "held_out_questions": 4,
    "seconds": 61.2,
}
REPORT_SETTINGS = {
    "algo": "grpo",
    "beta": 0.04,
    "weights": "nvfp4",
    "gradient_clip": 0.2,
    "sigma_start": 0.01,
}


def recorded_answer(token, reward, advantage, length):
    """A completion as samples.jsonl has it: REPORT_TOKENS and one more token, `length` times."""
    tokens = (REPORT_TOKENS + [token]) * length
    return {
        "text": "".join(tokens),
        "reward": reward,
        "correct": reward > 1,
        "advantage": advantage,
        "tokens": tokens,
        "entropy": [0.05, 0.2, 0.5, 0.9, 1.2, 2.0, 0.0, 0.0, 0.0, 0.3] * length,
        "rollout_logprobs": [-3.0] * len(tokens),
        "training_logprobs": [-2.5] * len(tokens),
    }


def held_out_answers(text, verdicts):
    """answers_before.jsonl or answers_after.jsonl: one question for each verdict."""
    lines = []
    for i, correct in enumerate(verdicts):
        answer = {"text": text, "correct": correct}
        question = {"question": f"{text} {i}", "number": "42"}
        lines.append({**question, "accuracy": answer, "greedy": answer})
    return lines


def made_up_run(folder, steps=9, text="42", length=1):
    """The files of a run, with `text` wherever a model's or a data set's text can stand."""
    samples = []
    for step in range(1, steps + 1):
        worse = recorded_answer(text, 0.2, -0.9, length)
        better = recorded_answer(text, 2.2, 0.9, length)
        question = {"question": text, "number": text}
        samples.append({"step": step, **question, "completions": [worse, better]})
    settings = {**REPORT_SETTINGS, "model": text, "data": text}
    summary = {**REPORT_SUMMARY, "settings": settings}
    metrics = [{"step": step + 1, **REPORT_METRICS} for step in range(steps)]
    before = held_out_answers(text, [False, False, True, True])
    after = held_out_answers(text, [True, True, False, True])
    (folder / "summary.json").write_text(json.dumps(summary))
    write_jsonl(folder / "metrics.jsonl", metrics)
    write_jsonl(folder / "samples.jsonl", samples)
    write_jsonl(folder / "answers_before.jsonl", before)
    write_jsonl(folder / "answers_after.jsonl", after)


def report_of(folder):
    report.write_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def test_report_shows_a_run(tmp_path):
    made_up_run(tmp_path)
    page = report_of(tmp_path)
    assert "pass@1 50.0% \u2192 75.0%" in page
    assert "25.0% \u2192 50.0%" in page
    assert "61 s" in page
    assert re.findall(r"<h3>Step (\d+)</h3>", page) == list("1235679")
    assert re.findall(r"<details open>\s*<summary><h3>Step (\d+)", page) == list("159")
    assert page.count('data-s="4.98" data-p="8.21" data-r="1.649"') == 7 * 2 * 10
    for shown in ("\u21b5\n\u21b5\n", "\u2400", "··", "\u2205"):
        assert f">{shown}</span>" in page
    assert page.index("2.2</span>") < page.index("0.2</span>")             # the best answer first
    assert re.findall(r"<td>(\d)</td>", page)[:4] == ["1", "1", "2", "0"]
    assert page.index("From wrong to right") < page.index("From right to wrong")
    assert page.count("<svg") == 6                                         # no mismatch: it is NaN


def test_report_loads_nothing(tmp_path):
    made_up_run(tmp_path)
    page = report_of(tmp_path)
    assert not re.search(r"<(script|link|iframe|object|embed|img|use)\b", page)
    assert not re.search(r"\b(src|srcset)=|url\(|@import", page)
    assert re.findall('href="(.)', page) == ["#"] * 4


def test_report_escapes_what_models_and_data_say(tmp_path):
    made_up_run(tmp_path, text="<script>alert('\"')</script>")
    page = report_of(tmp_path)
    assert "<script" not in page
    for place in ('class="question">', "<b>", 'data-r="1.649">', 'class="text">', "<td>"):
        assert f"{place}&lt;script&gt;" in page


@pytest.mark.parametrize("missing", [
    ["samples.jsonl"],
    ["answers_before.jsonl"],
    ["answers_after.jsonl"],
    ["summary.json"],
    ["samples.jsonl", "answers_before.jsonl", "answers_after.jsonl", "summary.json"],
])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_report_of_what_is_there(tmp_path, missing, steps):
    made_up_run(tmp_path, steps)
    for name in missing:
        os.remove(tmp_path / name)
    page = report_of(tmp_path)
    assert page.endswith("</html>")
    assert page.count("<figure>") == (6 if steps else 0)


def test_report_of_long_completions_stays_small(tmp_path):
    made_up_run(tmp_path, length=1000)
    page = report_of(tmp_path)
    assert len(page) < 4e6
    assert "tokens left out here" in page


def test_report_again_and_what_is_no_run(tmp_path, monkeypatch, capsys):
    made_up_run(tmp_path)
    report.main([str(tmp_path)])
    assert (tmp_path / "report.html").exists()
    assert "report.html" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for argument in (tmp_path, tmp_path / "no-such-folder"):
        with pytest.raises(SystemExit) as stop:
            report.main([str(argument)])
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def made_up_rows():
    """Two seeds of the factorial: 4 bits cost a point, the noise gains three at one seed and five at the other."""
    for seed, noise in ((0, 0.03), (1, 0.05)):
        for arm in ("nvfp4+aqn", "nvfp4", "bf16+aqn", "bf16"):
            value = 0.5 + noise * arm.endswith("aqn") - 0.01 * arm.startswith("nvfp4")
            measures = dict.fromkeys(claims.MEASURES, value)
            before = {} if seed else {"accuracy_before": 0.2, "greedy_before": 0.3}
            yield {"name": f"{arm}-{seed}", "model": "m", "arm": arm, "lr": 1e-4, "seed": seed, "steps": 9,
                   **before, **measures}


def test_claims_tables():
    rows = list(made_up_rows())
    paired = {line.split(" | ")[2]: line for line in claims.paired_table(rows)[2:]}
    assert "| 2 | 4.0 ± 1.0 | 4.0 ± 1.0 |" in paired["noise"] and "| 2 | -1.0 ± 0.0 |" in paired["4 bits"]
    assert "| 2 | 3.0 ± 1.0 |" in paired["both"]
    assert any(line.startswith("| m | nvfp4+aqn | 1e-4 | 2 | 9 | 20.0, 30.0 | 53.0 ± 1.0 |") for line in claims.arms_table(rows))
    assert "| 1 | 3.0 |" in claims.paired_table(rows[:4])[2]                             # one seed has no error
    assert not any("noise" in line for line in claims.paired_table(rows[:1]))
    assert len(claims.ablation_table(rows)) == 2                                         # the head alone
    assert len(claims.over_rates_table(rows)) == 2                                       # of one rate there is no mean
    larger = [{**row, "lr": 2e-4, "accuracy_after": row["accuracy_after"] + 0.02 * (row["arm"] == "nvfp4+aqn")} for row in rows]
    single = {**rows[0], "lr": 3e-4}                                                     # a rate that answers no question is left out
    expected = "| m | 1e-4, 2e-4 | noise in NVFP4 | 2 | 5.0 ± 1.0 | 4.0 ± 1.0 | 4.0 ± 1.0 | 5.0 ± 1.0 |"
    assert expected in claims.over_rates_table([*rows, *larger, single])
    changed = [{**row, "arm": "tis", "accuracy_after": row["accuracy_after"] + 0.02 + 0.01 * row["seed"]} for row in rows
               if row["arm"] == "nvfp4+aqn"]
    assert claims.ablation_table(rows + changed)[2:] == ["| m | 1e-4 | tis | 2 | 2.5 ± 0.5 | 0.0 ± 0.0 | 0.0 ± 0.0 | 2.5 ± 0.5 |"]
    started = {"nvfp4+aqn": 0.3, "tis": 0.29}                # a gain is of an arm's own start
    gains = [{**row, "accuracy_before": started[row["arm"]]} for row in rows + changed if row["arm"] in started]
    assert claims.ablation_table(gains)[2].endswith("| 2.5 ± 0.5 | 0.0 ± 0.0 | 0.0 ± 0.0 | 3.5 ± 0.5 |")
    unmeasured = [{k: v for k, v in row.items() if k != "accuracy_before"} for row in gains]
    assert claims.ablation_table(unmeasured)[2].endswith("| 0.0 ± 0.0 | - |")


def drawn(axis, marker):
    """The x of the points with this marker, in the order in which they were drawn."""
    return [round(float(x), 6) for line in axis.lines if line.get_marker() == marker for x in line.get_xdata()]


def test_the_picture_of_differences():
    """Noise gives 3 and 5 points: two dots; with a third seed of 4 also their mean and Student's interval."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = list(made_up_rows())
    _, noise, both, *_ = claims_pictures.plot_differences(rows, plt).axes
    assert drawn(noise, "o") == [3, 5] and drawn(noise, "D") == []
    assert not claims_pictures.compared_settings(rows[:4])   # of one seed there is no picture
    rows += [{**row, "seed": 2, "accuracy_after": row["accuracy_after"] + 0.01 * row["arm"].endswith("aqn")} for row in rows[:4]]
    rows = [{**row, "accuracy_before": 0.2 - 0.05 * row["arm"].startswith("nvfp4")} for row in rows]
    _, noise, both, by_gptq, _ = claims_pictures.plot_differences(rows, plt).axes
    assert drawn(by_gptq, "o") == []                         # which these rows do not answer
    assert drawn(noise, "o") == [3, 5, 4] and drawn(noise, "D") == [4] and drawn(noise, "|")[0] == 0
    assert drawn(both, "|")[0] == -5                         # what NVFP4 begins with
    assert claims_pictures.interval([3, 5, 4]) == pytest.approx(4.303 * 1 / 3 ** 0.5, rel=2e-3)
    small = [{**row, "model": "small", "lr": 1.5e-4} for row in rows]
    *real, _, noise, _, _, _ = claims_pictures.plot_differences(rows + small, plt).axes                  # below, at another scale
    assert len(real) == 5 and drawn(noise, "o") == [3, 5, 4] and real[0].get_yticklabels()[0].get_text() == "m, 1e-4"
    plt.close("all")


def test_the_picture_of_ablations():
    """TIS gives 2 to 6 points at five seeds: five dots, their mean and Student's interval; of four seeds there is no picture."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    first = next(made_up_rows())
    rows = [{**first, "seed": seed, "accuracy_after": 0.5} for seed in range(5)]
    rows += [{**row, "arm": "tis", "accuracy_after": 0.52 + 0.01 * row["seed"]} for row in rows]
    rows.append({**first, "arm": "dapo", "accuracy_after": 0.45})
    assert not claims_pictures.compared_changes([row for row in rows if row["seed"] < 4])
    axis, = claims_pictures.plot_changes(rows, plt).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["dapo", "tis"] and axis.get_title() == "m, 1e-4"
    assert drawn(axis, "o") == [-5, 2, 3, 4, 5, 6] and drawn(axis, "D") == [4]
    rows += [{**row, "arm": "rank 64", "accuracy_after": 0.2} for row in rows if row["arm"] == "nvfp4+aqn"]
    upper, lower = claims_pictures.plot_changes(rows, plt).axes            # what changes much more has its own scale
    assert [label.get_text() for label in lower.get_yticklabels()] == ["rank 64"] and drawn(lower, "o") == [-30] * 5
    assert drawn(upper, "o") == [-5, 2, 3, 4, 5, 6]
    plt.close("all")


def test_curves_say_which_arms_have_other_rates_or_fewer_seeds():
    seeds = {"nvfp4": 2, "bf16": 2, "nf4": 2, "mxfp4": 2, "full": 1}
    rates = {"nvfp4": 1.5e-4, "bf16": 1.5e-4, "nf4": 5e-5, "mxfp4": 5e-5, "full": 3e-6}
    assert claims_pictures.unusual_arms(seeds, rates, (2, 1.5e-4)) == "NF4, MXFP4: 5e-5; full fine-tuning: 1 seed, 3e-6"
    assert claims_pictures.unusual_arms({"bf16": 2}, {"bf16": 1e-3}, (2, 1e-3)) == ""


def test_an_arms_line_tells_its_weights_by_colour_and_its_noise_by_dashes():
    """Two arms look alike in no picture; those of the same weights differ by their dashes alone."""
    styles = {arm: claims_pictures.style_of(arm) for arm in factorial.ARMS}
    assert len({tuple(style.values()) for style in styles.values()}) == len(styles)
    for arm in ("nvfp4", "bf16", "gptq", "awq"):
        assert styles[arm]["color"] == styles[f"{arm}+aqn"]["color"]
        assert (styles[f"{arm}+aqn"]["linestyle"], styles[arm]["linestyle"]) == ("-", "--")


@pytest.mark.parametrize("lr,text", [(0.00015, "1.5e-4"), (5e-5, "5e-5"), (1e-3, "1e-3"), (0.25, "2.5e-1")])
def test_rates_are_spelled_as_one_writes_them(lr, text):
    assert study.rate_text(lr) == text


def test_seeds_with_starts_of_their_own(tmp_path, monkeypatch):
    """Each has its own policy before the training, and rows of their own name."""
    run = study.Run("bf16", None, 1e-3, 3, own_start=True)
    command = run.command("folder", None, [], [], measure_start=True)
    assert command[command.index("--start-seed") + 1] == "3" and "--skip-eval-before" not in command
    assert run.name == "small-own-starts-bf16-lr0.001-seed3"
    common = study.Run("bf16", None, 1e-3, 3).command("folder", None, [], [], measure_start=False)
    assert "--start-seed" not in common and "--skip-eval-before" in common
    rows = [{**row, "start_seed": row["seed"], "accuracy_before": 0.2 + 0.1 * row["seed"], "greedy_before": 0.1} for row in made_up_rows()]
    assert [round(row["gained"], 6) for row in claims.with_gains(rows)][3::4] == [0.3, 0.2]              # bf16: 0.5 of both
    assert "| 25.0 ± 5.0, 10.0 ± 0.0 |" in claims.arms_table(rows)[2]
    later = {k: v for k, v in rows[0].items() if not k.endswith("_before")} | {"lr": 2e-4}                # the same start at another rate
    assert [line for line in claims.arms_table([*rows, later]) if "| 2e-4 | 1 | 9 | 20.0, 10.0 |" in line]
    made = []
    monkeypatch.setattr(study, "warm_start", lambda seed=0: made.append(seed))
    monkeypatch.setattr(study, "run_one", lambda *arguments: None)
    options = ["--seeds", "4", "2", "--arms", "bf16", "--lrs", "1e-4", "--out", f"{tmp_path}/out", "--runs", f"{tmp_path}/runs"]
    claims.main([*options, "--own-starts"])
    assert made == [4, 2]
    claims.main(options)
    assert made == [4, 2, 0]
    done = {**next(made_up_rows()), "name": "small-own-starts-bf16-lr0.0001-seed4", "hardware": "CPU"}
    write_jsonl(tmp_path / "out" / "runs.jsonl", [{**dict.fromkeys(study.NUMBERS, 0), **done, "arm": "linear"}])
    claims.main([*options, "--own-starts"])
    assert made == [4, 2, 0, 2]                              # what is finished needs no policy
    qerls = [{**row, "arm": "qerl", "peak_memory_gb": 1, "seconds_a_step": 1, "mismatch_kl": 0} for row in rows if row["arm"] == "bf16"]
    assert "| 25.0 ± 5.0 | 50.0 ± 0.0 |" in compare.table(qerls)[2]
    with pytest.raises(qerl.UserError, match="--own-starts: is for the small policy"):
        claims.main([*options, "--own-starts", "--model", "folder"])


def test_a_warm_start_that_another_process_made_meanwhile_is_not_made_again(qwen, tmp_path, monkeypatch):
    made = []

    @contextlib.contextmanager
    def waited(folder):                                      # the other one ends while this one waits
        assert folder == str(tmp_path)
        qwen[1].save_pretrained(next(wanted))
        yield True

    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path))
    monkeypatch.setattr(small_policy, "train_policy", lambda seed: made.append(seed) or qwen[1])
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    first = small_policy.warm_start(0)
    wanted = iter([first.replace("seed0", "seed1")])
    monkeypatch.setattr(cache_folder, "one_at_a_time", waited)
    assert small_policy.warm_start(1) == first.replace("seed0", "seed1") and made == [0]


def test_a_start_seed_makes_another_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path))
    train_policy = small_policy.train_policy
    monkeypatch.setattr(small_policy, "train_policy", lambda seed: train_policy(seed, steps=1, batch=2))
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    first, second = (qerl.load_model(small_policy.warm_start(seed), "bf16") for seed in (0, 1))
    assert not torch.equal(first.embedding, second.embedding) and len(os.listdir(tmp_path)) == 2
    assert torch.equal(qerl.load_model(small_policy.warm_start(0), "bf16").embedding, first.embedding)
    command = train_gsm8k.arguments(["--start-seed", "1"])
    assert command.start_seed == 1
    with pytest.raises(qerl.UserError, match="--start-seed 1: is for the small built-in policy"):
        train_gsm8k.arguments(["--start-seed", "1", "--model", "folder"])


def test_what_a_larger_rate_changes():
    """By seed and arm; beside it NVFP4 + AQN at the larger rate over BF16 at the smaller, as the paper compares them."""
    faster = [{**row, "lr": 3e-4, "accuracy_after": row["accuracy_after"] + 0.1 * (1 + row["seed"])} for row in made_up_rows()]
    lines = claims.rates_table([*made_up_rows(), *faster])[2:]
    assert [line.split(" | ")[2] for line in lines] == ["nvfp4+aqn", "nvfp4", "bf16+aqn", "bf16", "both, 16 bit at the smaller"]
    assert all(line.startswith("| m | 1e-4 to 3e-4 | ") for line in lines)
    assert all("| 2 | 15.0 ± 5.0 | 0.0 ± 0.0 |" in line for line in lines[:4])
    assert "| 2 | 18.0 ± 6.0 | 3.0 ± 1.0 |" in lines[4]                                  # 3 and 5 points of "both", 10 and 20 of the rate
    assert claims.rates_table(list(made_up_rows())) == claims.PAIRED_HEAD


def test_measures_of_the_steps_by_phase():
    """Ten steps: the first, the second and third, the last five."""
    def run(arm, seed, values, measure="entropy"):
        return {"model": "m", "arm": arm, "lr": 1e-4, "seed": seed}, [{measure: value} for value in values]

    plain = [9, 1, 3, 7, 7, 5, 5, 5, 5, 5]
    runs = [run("nvfp4", seed, plain) for seed in (0, 1)]
    runs += [run("nvfp4+aqn", seed, [9, 2 + seed, 4 + seed, *plain[3:]]) for seed in (0, 1)]
    runs += [run("bf16", 0, [0, *plain[1:]]), run("bf16", 1, [1.0, None])]                # seed 1 has not logged all steps
    lines = {line.split(" | ")[2]: line.split(" | ", 3)[3] for line in claims.phase_table(runs, "entropy", 1, 1)[2:]}
    assert lines == {"nvfp4+aqn": "2 | 9.0 ± 0.0 | 3.5 ± 0.5 | 5.0 ± 0.0 |", "nvfp4": "2 | 9.0 ± 0.0 | 2.0 ± 0.0 | 5.0 ± 0.0 |",
                     "bf16": "1 | 0.0 | 2.0 | 5.0 |", "noise in NVFP4": "2 | 0.0 ± 0.0 | 1.5 ± 0.5 | 0.0 ± 0.0 |",
                     "4 bits without noise": "1 | 9.0 | 0.0 | 0.0 |", "both": "1 | 9.0 | 1.0 | 0.0 |"}
    assert claims.phase_table([run("nf4", 0, [2e-4], "mismatch_kl")], "mismatch_kl", 1e4, 2)[2:] == ["| m | 1e-4 | nf4 | 1 | 2.00 | - | 2.00 |"]
    assert len(claims.phase_table(runs, "effective_completions", 1, 2)) == 2              # the head alone


def test_claims_at_each_arms_own_best_rate(tmp_path):
    """Training accuracy chooses the rate, whatever the test questions say; a rate of fewer seeds is no worse for it."""
    rows = []
    for arm, best in (("nvfp4+aqn", 1e-4), ("bf16", 3e-4)):
        for lr, seeds in ((1e-4, (0, 1)), (3e-4, (0,))):
            for seed in seeds:
                measures = dict.fromkeys(claims.MEASURES, 0.2 if lr == best else 0.3)        # on the test the other rate wins
                measures["training_accuracy"] = (0.5 if lr == best else 0.4) - 0.4 * seed     # the second seed is bad
                rows.append({"name": f"{arm}{lr}{seed}", "model": "m", "arm": arm, "lr": lr, "seed": seed, "steps": 3, **measures})
    assert claims.best_rates(rows) == {("m", "nvfp4+aqn"): 1e-4, ("m", "bf16"): 3e-4}
    assert claims.best_table(rows)[2:] == ["| m | bf16 | 1e-4, 3e-4 | 3e-4 | 1 | 20.0 | 20.0 | 50.0 |",
                                           "| m | nvfp4+aqn | 1e-4, 3e-4 | 1e-4 | 2 | 20.0 ± 0.0 | 20.0 ± 0.0 | 30.0 ± 20.0 |"]
    assert [line for line in claims.paired_table(rows) if "own best | both | 1 | 0.0 |" in line]
    assert claims.best_rates([r for r in rows if r["lr"] == 1e-4]) == {}                  # one rate is not the best of any
    # A third rate, of one seed, does not keep the second seed from deciding between the other two.
    of_two = [{**row, "arm": "nf4", "lr": lr, "seed": seed, "training_accuracy": accuracy}
              for row, lr, seed, accuracy in [(rows[0], 1e-4, 0, 0.4), (rows[0], 1e-4, 1, 0.4), (rows[0], 3e-4, 0, 0.3),
                                              (rows[0], 3e-4, 1, 0.6), (rows[0], 1e-3, 0, 0.1)]]
    assert claims.best_rates(of_two) == {("m", "nf4"): 3e-4}
    apart = [{**row, "seed": row["seed"] + 5 * (row["lr"] == 1e-4)} for row in of_two if row["lr"] < 1e-3]
    assert claims.best_rates(apart) == {}                                                 # no seed that both rates have
    assert claims_pictures.shown_rates(rows) == {"nvfp4+aqn": 1e-4, "bf16": 1e-4}                  # 3e-4 has a single seed
    again = [{**row, "seed": 1, "training_accuracy": row["training_accuracy"] - 0.4} for row in rows if row["lr"] == 3e-4]
    of_both = rows + again
    assert claims_pictures.shown_rates(of_both) == {"nvfp4+aqn": 1e-4, "bf16": 1e-4}               # both at one rate, of several seeds
    without = [row for row in of_both if (row["arm"], row["lr"]) != ("bf16", 1e-4)]
    assert claims_pictures.shown_rates(without) == {"nvfp4+aqn": 3e-4, "bf16": 3e-4}               # the rate that both have
    lone = [row for row in without if (row["arm"], row["lr"]) != ("nvfp4+aqn", 3e-4)]
    assert claims_pictures.shown_rates(lone) == {"nvfp4+aqn": 1e-4, "bf16": 3e-4}
    full = [{**row, "arm": "full"} for row in of_both if row["arm"] == "bf16"]
    assert claims_pictures.shown_rates(of_both + full)["full"] == 3e-4                             # its rates are not LoRA's
    single = [row for row in full if row["seed"] == 0]
    assert claims_pictures.shown_rates(of_both + single)["full"] == 3e-4                           # each rate has one seed: the best
    write_jsonl(tmp_path / "runs.jsonl", rows)
    (tmp_path / "metrics").mkdir()
    steps = [{"step": i, "accuracy": 0.1, "entropy": 0.2, "mismatch_kl": 1e-3} for i in (1, 2, 3)]
    for row in rows:
        write_jsonl(tmp_path / "metrics" / f"{row['name']}.jsonl", steps)
    claims.make_tables(str(tmp_path), [{**row, "arm": "linear"} for row in rows[:1]])     # no picture shows ablations
    assert not list(tmp_path.glob("*.png"))
    claims.make_tables(str(tmp_path), rows)
    phases = (tmp_path / "phases.md").read_text()
    assert phases.count("| m | 1e-4 | nvfp4+aqn | 2 |") == 2 and "0.200 ± 0.000" in phases and "10.00 ± 0.00" in phases
    for picture in ("curves.png", "differences.png", "rates.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"


def quick_study():
    """QUICK without the flags that a study sets itself, and two steps."""
    flags = list(map(str, QUICK))
    for flag in ("--lr", "--quantizer"):
        at = flags.index(flag)
        del flags[at:at + 2]
    return [*flags, "--steps", "2"]


def call_in_a_fork(command, stdout, **_):
    """subprocess.call for a command of train_gsm8k.py, which here need not import torch anew; returns its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(stdout.fileno(), 1)
            os.dup2(1, 2)
            torch.set_num_threads(1)
            sys.argv = command[1:]
            train_gsm8k.main()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_methods_side_by_side(qwen, data, tmp_path, monkeypatch, capsys):
    """Its runs are forks where there are any; test_claims_runs_what_is_missing starts processes, as a study does."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if hasattr(os, "fork") and not CUDA:
        monkeypatch.setattr(study.subprocess, "call", call_in_a_fork)
    arms = ["qerl", "rollout_correction:token-tis"]
    assert compare.main(["--model", qwen[0], "--data", data, "--lrs", "1e-3", "--seeds", "0", "--arms", *arms, "--out", f"{tmp_path}/out",
                         "--runs", f"{tmp_path}/runs", *quick_study()]) == 0
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in lines[4:]] == arms and "NVFP4 + LoRA, noise" in lines[-1]
    assert (tmp_path / "out" / "accuracy.png").read_bytes()[:4] == b"\x89PNG" and "pass@1" in capsys.readouterr().out
    for flags in (*compare.flags_of(small=True).values(), *compare.flags_of(small=False).values(), *claims.FLAGS.values()):
        train_gsm8k.arguments(["--device", "cpu", *flags])                               # every arm's flags go together


@pytest.mark.parametrize("line,message", [("[1]", "a line is no run's: [1]; remove it"), ('{"name": "a"}', "a line is no run's")])
def test_what_is_no_run_is_named(tmp_path, line, message):
    (tmp_path / "runs.jsonl").write_text(line + "\n")
    for study_of in (claims, compare):
        with pytest.raises(qerl.UserError, match=re.escape(message)):
            study_of.main(["--tables", "--out", str(tmp_path)])


def whole_row(name, **columns):
    """A row of runs.jsonl with all that is_row asks for."""
    return {**dict.fromkeys(study.TEXTS, "x"), **dict.fromkeys(study.NUMBERS, 0.5), "name": name, **columns}


@pytest.mark.parametrize("columns", [{"accuracy_after": None}, {"greedy_after": "high"}, {"lr": "3e-3"}, {"accuracy_before": "x"},
                                     {"entropy": float("nan")}, {"arm": 3}, {"seed": True}, {"settings": [1]}])
def test_a_row_with_another_kind_of_value_is_named(tmp_path, columns):
    write_jsonl(tmp_path / "runs.jsonl", [whole_row("good"), whole_row("bad", **columns)])
    with pytest.raises(qerl.UserError, match="a line is no run's.*remove it"):
        study.finished_runs(str(tmp_path))


def test_a_row_that_stands_twice_is_named(tmp_path):
    write_jsonl(tmp_path / "runs.jsonl", [whole_row("a"), whole_row("b"), whole_row("a")])
    with pytest.raises(qerl.UserError, match="runs.jsonl: a stands there twice"):
        study.finished_runs(str(tmp_path))


def test_a_row_goes_behind_a_torn_one(tmp_path):
    path = tmp_path / "runs.jsonl"
    write_jsonl(path, [whole_row("a")])
    with open(path, "a") as f:
        f.write('{"name": "b", "mod')
    study.append_jsonl(str(path), whole_row("c"))
    study.append_jsonl(str(path), whole_row("d"))
    assert [row["name"] for row in study.finished_runs(str(tmp_path))] == ["a", "c", "d"]
    study.append_jsonl(str(tmp_path / "new.jsonl"), {"x": 1})
    assert (tmp_path / "new.jsonl").read_text() == '{"x": 1}\n'


@pytest.mark.parametrize("flags,message", [
    (["--seed", "7"], "--seed: the study sets it for each run; use --seeds"), (["--lr=1e-5"], "--lr: .* use --lrs"),
    (["--eval-only"], "--eval-only: .* leave it out"), (["--resume"], "--resume: .* by itself"),
    (["--weights", "nf4"], "--weights: .* use --arms"), (["--quantizer", "gptq"], "--quantizer: .* use --arms"),
    (["--foo"], "unrecognized arguments: --foo"), (["--steps", "x"], "argument --steps: invalid int value")])
def test_a_study_sets_its_runs_flags_itself(tmp_path, flags, message):
    for study_of in (claims, compare):
        with pytest.raises(qerl.UserError, match=message):
            study_of.main(["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), *flags])
    assert not os.listdir(tmp_path)


def run_missing(flags, args):
    """What a study does between its arguments and its tables, without looking for the model and the questions."""
    return study.run_all(study.missing_runs(flags, args), flags, args)


def study_arguments(tmp_path, *flags):
    args = study.arguments([*flags, "--model", "some/Model", "--out", f"{tmp_path}/out", "--runs", f"{tmp_path}/runs"], "a study",
                           ["a", "b"], ["a", "b"], (1, 2), "results")
    os.makedirs(f"{tmp_path}/out/metrics")
    return args


def test_what_is_named_twice_is_run_once(tmp_path):
    args = study_arguments(tmp_path, "--arms", "b", "a", "b", "--seeds", "1", "1", "0", "--lrs", "1e-4", "1e-4")
    assert (args.arms, args.seeds, args.lrs) == (["b", "a"], [1, 0], [1e-4])


def test_studies_round_to_nearest_unless_told_otherwise():
    run = study.Run("nvfp4", "some/Model", 1e-4, 0)
    for arm, expected in (([], "rtn"), (["--quantizer", "gptq"], "gptq")):
        _, _, *flags = run.command("runs/new", None, ["--weights", "nvfp4", *arm], [], True)
        assert train_gsm8k.arguments([*flags, "--device", "cpu"]).quantizer == expected


def test_a_finished_run_of_other_steps_is_no_row_of_this_study(tmp_path):
    args = study_arguments(tmp_path, "--arms", "a", "--seeds", "0", "--steps", "9")
    write_jsonl(tmp_path / "out" / "runs.jsonl", [whole_row("Model-a-lr5e-05-seed0", model="Model", arm="a", steps=1)])
    with pytest.raises(qerl.UserError, match="Model-a-lr5e-05-seed0 with --steps 1, not 9; give another --out"):
        run_missing({"a": []}, args)


@pytest.mark.parametrize("flags,message", [
    (["--prompts", "8"], None), (["--prompts", "8", "--slots", "7", "--data", "elsewhere/gsm8k"], None),
    (["--prompts", "8", "--eval-questions", "0", "--save-every", "3"], None), (["--prompts", "8", "--eval-questions", "9"], "0, not 9"),
    (["--prompts", "16"], "has Model-a-lr5e-05-seed0 with --prompts 8, not 16; give another --out"),
    ([], "--prompts 8, not 64"), (["--prompts", "8", "--data", "other"], "--data gsm8k, not other"),
    (["--prompts", "8", "--algo", "dapo"], "--algo grpo, not dapo"),
    (["--prompts", "8", "--dtype", "float32"], "--dtype auto, not float32"),
    (["--prompts", "8", "--preset", "paper"], "--max-new-tokens 512, not 4096"),
    (["--prompts", "16", "--seeds", "5"], "--prompts 8, not 16"), (["--prompts", "16", "--arms", "b"], "--prompts 8, not 16")])
def test_a_finished_run_of_other_flags_is_no_row_of_this_study(tmp_path, monkeypatch, flags, message):
    """What a flag has by default counts as given; how a run's work is cut does not matter, nor in which folder its data lie."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(study.subprocess, "call", finished_run)
    begun = ["--arms", "a", "--seeds", "0", "--prompts", "8"]
    arms = {"a": [], "b": ["--algo", "dapo"]}
    assert not run_missing(arms, study_arguments(tmp_path, *begun))
    args = study.arguments([*begun[:4], *flags, "--model", "moved/Model", "--out", f"{tmp_path}/out", "--runs", f"{tmp_path}/runs"],
                           "a study", list(arms), list(arms), (1, 2), "results")
    if message is None:
        assert study.missing_runs(arms, args) == []
    else:
        with pytest.raises(qerl.UserError, match=message):
            study.missing_runs(arms, args)


@pytest.mark.parametrize("model", [[], ["--model", "some/Model"]])
def test_a_study_calls_its_data_by_name(model):
    """The small policy's, too: elsewhere they lie in another folder."""
    for folder in ("here/gsm8k", "there/gsm8k/"):
        args = study.arguments([*model, "--data", folder], "a study", ["a"], ["a"], (1, 2), "results")
        assert study.settings_of(study.Run("a", args.model[0], 1e-3, 0), {"a": []}, args)["data"] == "gsm8k"


def test_an_arm_that_is_another_now_is_no_row_of_this_study(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(study.subprocess, "call", finished_run)
    args = study_arguments(tmp_path, "--arms", "a", "--seeds", "0")
    assert not run_missing({"a": []}, args)
    assert study.missing_runs({"a": []}, args) == [] and study.missing_runs({"a": [], "b": ["--group", "1"]}, args) == []
    with pytest.raises(qerl.UserError, match="with --sigma-end 0.0005, not 0.0; give another --out"):
        study.missing_runs({"a": study.NO_NOISE}, args)


def test_a_run_that_another_study_made_meanwhile_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    args = study_arguments(tmp_path, "--arms", "a", "--seeds", "0")
    missing = study.missing_runs({"a": []}, args)
    write_jsonl(tmp_path / "out" / "runs.jsonl", [whole_row("Model-a-lr5e-05-seed0")])
    monkeypatch.setattr(study.subprocess, "call", None)
    assert study.run_all(missing, {"a": []}, args) == [] and len(study.finished_runs(args.out)) == 1


def test_what_a_study_begins_with_is_looked_for_first(tmp_path, data, monkeypatch):
    monkeypatch.setattr(study.subprocess, "call", None)
    for options, message in ((["--data", f"{tmp_path}/none"], "no such folder"), (["--data", data], "Hugging Face does not give it")):
        with pytest.raises(qerl.UserError, match=message):
            claims.main(["--model", "no/such-model", "--out", f"{tmp_path}/out", *options])


def test_the_tables_of_no_study_are_refused(tmp_path):
    for study_of in (claims, compare):
        with pytest.raises(qerl.UserError, match="there is no runs.jsonl"):
            study_of.main(["--tables", "--out", f"{tmp_path}/typo"])
    assert not os.listdir(tmp_path)


def test_methods_are_compared_at_one_rate(tmp_path):
    with pytest.raises(qerl.UserError, match="compared at one learning rate"):
        compare.main(["--lrs", "1e-3", "3e-3", "--out", str(tmp_path)])
    write_jsonl(tmp_path / "runs.jsonl", [whole_row("a", model="small", arm="gptq", lr=1e-3), whole_row("b", model="other", arm="qerl")])
    with pytest.raises(qerl.UserError, match="--lrs 0.003: .* has a; give another --out"):
        compare.main(["--out", str(tmp_path)])


def test_flags_that_a_run_would_refuse_are_refused_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(study.subprocess, "call", None)
    with pytest.raises(qerl.UserError, match="--group 1: advantages compare"):
        run_missing({"a": [], "b": []}, study_arguments(tmp_path, "--group", "1"))


@pytest.mark.parametrize("options,message", [
    (["--model", ""], "--model '': is empty"), (["--out", ""], "--out '': is empty"), (["--runs", ""], "--runs '': is empty"),
    (["--data", ""], "--data '': is empty"), (["--lrs", "1.2345671e-4"], "--lrs 0.00012345671: names of runs have six digits"),
    (["--model", "own/small"], "--model small: is what the built-in policy is called")])
def test_a_study_refuses_what_its_rows_cannot_tell_apart(options, message):
    with pytest.raises(qerl.UserError, match=message):
        study.arguments(options, "a study", ["a"], ["a"], (1, 2), "results")


def finished_run(command, **_):
    """subprocess.call for a run that ends at once, with what row_of reads."""
    folder = command[command.index("--out") + 1]
    os.makedirs(folder)
    settings = keeper.lasting(train_gsm8k.read_settings(command[2:]))
    with open(f"{folder}/summary.json", "w") as f:
        json.dump({"settings": settings, "steps": 2, "accuracy_after": 0.5, "greedy_after": 0.5, "seconds": 1.0, "hardware": "none"}, f)
    step = dict.fromkeys(("accuracy", "entropy", "mismatch_kl", "peak_memory_gb"), 0.5) | {"seconds": {"step": 1.0}}
    write_jsonl(f"{folder}/metrics.jsonl", [{"step": 1, **step}, {"step": 2, **step}])
    return 0


def test_a_run_that_leaves_nothing_to_read_ends_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def call(command, **_):
        finished_run(command)
        folder = command[command.index("--out") + 1]
        if "-a-" in folder:
            os.remove(f"{folder}/summary.json")
        elif "seed1" in folder:
            write_jsonl(f"{folder}/metrics.jsonl", [])
        return 0
    monkeypatch.setattr(study.subprocess, "call", call)
    args = study_arguments(tmp_path, "--seeds", "0", "1")
    failed = run_missing({"a": [], "b": []}, args)
    assert sorted(failed) == ["Model-a-lr5e-05-seed0", "Model-a-lr5e-05-seed1", "Model-b-lr5e-05-seed1"]
    assert [row["name"] for row in study.finished_runs(args.out)] == ["Model-b-lr5e-05-seed0"]
    assert os.listdir(f"{args.out}/metrics") == ["Model-b-lr5e-05-seed0.jsonl"]
    said = capsys.readouterr().out
    assert "summary.json" in said and "metrics.jsonl: does not hold the steps 1 to 2" in said


@pytest.mark.parametrize("own,expected", [
    ([], [("nvfp4", "5e-05", 2)]),
    (["--own-starts"], [("nvfp4", "5e-05", 2), ("nvfp4", "5e-05", 1), ("bf16", "5e-05", 1)]),
])
def test_a_start_is_measured_once(tmp_path, monkeypatch, own, expected):
    """By the first missing run that begins with it, at whatever rate; not again if a finished run has measured it."""
    monkeypatch.setattr(study, "warm_start", lambda seed=0: None)
    measured = []

    def run_one(run, measure_start, *_):
        if measure_start:
            measured.append((run.arm, str(run.lr), run.seed))
    monkeypatch.setattr(study, "run_one", run_one)
    out = tmp_path / "out"
    out.mkdir()
    model = "small-own-starts" if own else "small"
    done = whole_row(f"{model}-bf16-lr5e-05-seed2", model=model, arm="bf16", seed=2, start_seed=2 if own else 0,
                     accuracy_before=0.2, steps=50)
    write_jsonl(out / "runs.jsonl", [done])
    args = study.arguments([*own, "--arms", "nvfp4", "bf16", "--seeds", "2", "1", "--lrs", "5e-5", "1e-4", "--out", str(out), "--runs",
                            f"{tmp_path}/runs"], "a study", list(factorial.ARMS), [], (2, 2), str(out))
    run_missing(factorial.FLAGS, args)
    assert measured == expected


@pytest.mark.parametrize("began", [True, False])
def test_a_stopped_run_of_a_study_goes_on_as_it_began(tmp_path, began):
    """Measured before its training or not: --resume refuses other settings. Without a checkpoint the study decides anew."""
    run = study.Run("bf16", None, 1e-3, 3)
    for measure in (True, False):
        assert ("--skip-eval-before" in run.command(str(tmp_path), None, [], [], measure)) is not measure
    save_file({"x": torch.zeros(1)}, tmp_path / "checkpoint.safetensors", {"settings": json.dumps({"skip_eval_before": began})})
    for measure in (True, False):
        assert ("--skip-eval-before" in run.command(str(tmp_path), None, [], [], measure)) is began
    (tmp_path / "checkpoint.safetensors").write_bytes(b"cut off")
    assert "--skip-eval-before" not in run.command(str(tmp_path), None, [], [], True)


def test_after_ctrl_c_no_other_run_begins(tmp_path, monkeypatch):
    """The first worker's run is interrupted; the second's goes on to its end, and the rest of the queue is left."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    begun = []

    def call(command, **_):
        begun.append(command)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.2)
        return finished_run(command)
    monkeypatch.setattr(study.subprocess, "call", call)
    args = study_arguments(tmp_path, "--seeds", "0", "1", "2", "3", "--jobs", "2")
    with pytest.raises(KeyboardInterrupt):
        run_missing({"a": [], "b": []}, args)
    assert 1 <= len(begun) <= 3 and len(study.finished_runs(args.out)) == len(begun) - 1


def test_a_study_whose_runs_cannot_be_kept_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    args = study_arguments(tmp_path)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(qerl.UserError, match="runs"):
        run_missing({"a": [], "b": []}, args)


def test_a_run_without_its_metrics_is_named(tmp_path, monkeypatch):
    rows = [{**whole_row(""), **row} for row in made_up_rows()]
    write_jsonl(tmp_path / "runs.jsonl", rows)
    with pytest.raises(qerl.UserError, match="metrics/nvfp4\\+aqn-0.jsonl: is missing or empty"):
        claims.main(["--tables", "--out", str(tmp_path)])
    assert "4 bits under noise" in (tmp_path / "tables.md").read_text()                    # the tables are there all the same


@pytest.mark.parametrize("text", ['{"rows": [', '{"rows": [{"model": "tiny"}, 3], "long": 5}', "[]"])
def test_a_broken_results_file_is_named_before_anything_is_measured(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "cpu").mkdir()
    for what in ("memory", "step", "rollout"):
        path = tmp_path / "cpu" / f"{what}.json"
        path.write_text(text)
        monkeypatch.setattr(sys, "argv", ["bench.py", what, "--device", "cpu", "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as stop:
            bench.main()
        assert stop.value.code == 2 and "not what bench.py writes; remove it" in capsys.readouterr().err and path.read_text() == text


def test_claims_takes_the_gpus_that_it_was_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert study.visible_devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert study.visible_devices() == ["2", "3"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert study.visible_devices() == ["cpu"]


def test_entropy_before_training(tmp_path, monkeypatch, capsys):
    """Each format at each sigma; a rollout under no noise is sampled as the sampler does."""
    options = ["--weights", "nvfp4", "bf16", "--sigmas", "0", "0.5", "--draws", "2", "--prompts", "4", "--device", "cpu",
               "--out", f"{tmp_path}/out"]
    assert entropy.main(options) == 0
    result = json.loads((tmp_path / "out" / "entropy.json").read_text())
    assert [(r["weights"], r["sigma"], r["draw"]) for r in result["rows"]] == list(
        itertools.product(["nvfp4", "bf16"], [0, 0.5], [0, 1]))
    model = qerl.load_model(warm_start(), "bf16")
    prompts = [ByteText().prompt(p["question"]) for p in made_up_problems()[0][:4]]
    generator = torch.Generator().manual_seed(1)
    rollout = qerl.generate(model, prompts, 64, 8, eos=ByteText().eos, generator=generator)
    row = result["rows"][5]
    assert row["entropy"] == pytest.approx(rollout.entropy[rollout.mask].mean().item(), rel=1e-5)
    assert row["mismatch_kl"] < 1e-6 < result["rows"][7]["mismatch_kl"]                  # 0.5 is far from the clean policy
    assert (tmp_path / "out" / "entropy.png").read_bytes()[:4] == b"\x89PNG"
    assert "entropy" in capsys.readouterr().out
    assert entropy.main([*options, "--weights", "bf16", "--draws", "1"]) == 0             # of NVFP4 the file keeps the rows
    again = json.loads((tmp_path / "out" / "entropy.json").read_text())["rows"]
    assert [r["entropy"] for r in again] == [r["entropy"] for r in result["rows"] if r["weights"] == "nvfp4" or r["draw"] == 0]
    assert [r.get("command") for r in again] == 4 * [result["command"]] + 2 * [None]
    with pytest.raises(qerl.UserError, match="entropy.json has rows of prompts 4, not 5; give another --out"):
        entropy.main([*options, "--prompts", "5"])


def test_the_stored_entropies_take_further_formats():
    asked = {"model": "Qwen2.5-Coder-1.5B-Instruct", "data": "gsm8k", "prompts": 64}
    for folder, differs in ((".", {"model": "small", "data": None}), ("qwen2.5-coder-1.5b", {}),
                            ("qwen2.5-coder-0.5b", {"model": "Qwen2.5-Coder-0.5B-Instruct"})):
        rows = entropy.read_same_questions(f"{HERE}/results/claims/{folder}/entropy.json", {**asked, **differs})["rows"]
        assert {row["weights"] for row in rows} == set(entropy.COLORS)


def test_a_mismatch_beyond_all_bounds_is_a_number():
    """It is a diagnostic: a run does not end for it."""
    kl, ratio = qerl.mismatch(torch.tensor([[-100.0, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert kl == pytest.approx(9.5) and ratio == pytest.approx(math.exp(20))


def test_a_random_reward_knows_nothing_of_the_answer():
    texts = [f"\\boxed{{{n}}}" for n in range(400)]
    rewards = [train_gsm8k.reward(text, Decimal(5), "random") for text in texts]
    assert 160 < sum(r for r, _ in rewards) < 240 and rewards == [train_gsm8k.reward(t, Decimal(5), "random") for t in texts]
    assert [correct for _, correct in rewards] == [float(n == 5) for n in range(400)]


def test_claims_runs_what_is_missing(qwen, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    options = ["--model", qwen[0], "--data", data, "--arms", "nvfp4+aqn", "bf16", "--lrs", "1e-3", "--seeds", "0",
               "--out", f"{tmp_path}/out", "--runs", f"{tmp_path}/runs", *quick_study()]
    assert claims.main(options) == 0
    rows = [json.loads(line) for line in open(tmp_path / "out" / "runs.jsonl")]
    assert [(r["arm"], r["aqn"], r["weights"], r["steps"]) for r in rows] == [
        ("nvfp4+aqn", True, "nvfp4", 2), ("bf16", False, "bf16", 2)]
    assert (tmp_path / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "out" / "tables.md").exists()
    capsys.readouterr()
    assert claims.main(options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2 runs, 0 missing"
    assert printed[1:-1] == claims.arms_table(rows) and f"{tmp_path}/out/tables.md" in printed[-1]
    assert not (tmp_path / "out" / "curves-others.png").exists()                          # BF16 alone stands in the other one
    claims.make_tables(str(tmp_path / "out"), [rows[0], {**rows[1], "arm": "nf4"}])
    assert (tmp_path / "out" / "curves-others.png").exists()
    failing = [*options, "--arms", "bf16", "--lora-rank", "1000"]
    with pytest.raises(qerl.UserError, match="with --lora-rank 2, not 1000"):
        claims.main(failing)
    assert claims.main([*failing, "--out", f"{tmp_path}/other"]) == 1                     # what fails is said, and is no row
    assert "ended with status 2" in capsys.readouterr().out and not (tmp_path / "other" / "runs.jsonl").exists()


# ------------------------------------------------------------------------------------------------------------- kernels

def test_the_interpreter_runs_the_kernels():
    """Runs the kernel tests below in Triton's interpreter, which must be on before Triton is imported."""
    if CUDA or fp4_kernels.INTERPRETED or fp4_kernels.triton is None:
        pytest.skip("the kernel tests run by themselves, or there is no Triton")
    if fp4_kernels.triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6's interpreter fails with numpy from 2.4 on: pip install 'numpy<2.4'")
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", "kernel and not interpreter and not compile", __file__], cwd=HERE,
                            capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert result.returncode == 0 and "skipped" not in result.stdout.splitlines()[-1], result.stdout[-2000:]


TILED_FORMATS = [name for name, format in qerl.FORMATS.items() if format.tile]


def tiled_weight(name, out_features, in_features, seed=0):
    """(TiledWeight, its weight float64): random, with rows of very different size and stacked global scales."""
    torch.manual_seed(seed)
    format = qerl.FORMATS[name]
    weight = torch.randn(out_features, in_features) * torch.exp2(torch.randint(-6, 7, (out_features, 1)).float())
    parts = [torch.cat(p) for p in zip(*((p, s, g.view(1, -1).expand(len(p), -1)) for p, s, g in map(format.quantize, weight.split(128))))]
    dense = format.dequantize(*parts, torch.float64)
    if name == "nf4":                                                                     # its scales become bfloat16
        dense = format.dequantize(parts[0], parts[1].bfloat16().float(), parts[2], torch.float64)
    return format.tile(*(p.to(KERNEL_DEVICE) for p in parts)), dense


@pytest.mark.parametrize("name", TILED_FORMATS)
def test_tiles_hold_the_weight_exactly(name):
    tiled, dense = tiled_weight(name, 256, 192)
    torch.testing.assert_close(fp4_kernels.untile_torch(tiled, torch.float64).cpu(), dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", TILED_FORMATS)
def test_tiles_multiply_as_the_weight(name):
    """The kernel's twin in float64, with bias, residual and LoRA of three pieces whose rank is not a power of two."""
    tiled, dense = tiled_weight(name, 256, 192)
    x, bias, residual, A, B = (torch.randn(*shape).double() for shape in ((5, 192), (256,), (5, 256), (3 * 6, 192), (256, 6)))
    sizes = [128, 64, 64]
    h = (x @ A.T).split(6, -1)
    expected = x @ dense.T + bias + residual + 2 * torch.cat([h_i @ B_i.T for h_i, B_i in zip(h, B.split(sizes))], -1)
    x, bias, residual, A, B = (t.to(KERNEL_DEVICE) for t in (fp4_kernels.interleave(x), bias, residual, A, B))
    lora = tiled.prepare_lora(A, B, sizes, 2.0, torch.float64)
    assert lora.A.shape == (3 * 16, 192) and lora.B.shape == (256, 16)
    y = fp4_kernels.linear_torch(x, tiled, bias, residual, lora)
    assert relative(y.cpu(), expected) < 1e-6


@pytest.mark.parametrize("nf4", [False, True])
def test_words_hold_every_code_in_every_place(nf4):
    codes = torch.stack([torch.arange(16, dtype=torch.uint8).roll(i) for i in range(8)], -1)
    words = fp4_kernels.pack_words(codes, nf4)
    assert words.dtype == torch.int32 and torch.equal(fp4_kernels.unpack_words(words, nf4), codes.int())


def test_interleave_puts_a_threads_columns_side_by_side():
    """Columns 2t, 2t+1, 2t+8, 2t+9 of four steps of 16, as a tensor core counts them, are the 16 of block t."""
    order = fp4_kernels.interleave(torch.arange(128))
    for tile in order.view(2, 4, 16):
        for t in range(4):
            block = tile[:, [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]].flatten().tolist()
            assert block == list(range(block[0], block[0] + 16)) and block[0] % 64 == 16 * t


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
def test_kernel_encode(monkeypatch, dtype, block):
    """Byte for byte as the twin, at ties too, for an odd number of rows."""
    torch.manual_seed(0)
    weight = torch.cat([torch.randn(30, 96) * torch.exp2(torch.randint(-9, 9, (30, 1)).float()), torch.randint(-26, 27, (5, 96)) / 4]).to(dtype)
    scale = weight.float().unflatten(1, (-1, block)).abs().amax(-1).clamp_min(0.1) / 6
    scale[30:] = 1
    packed = fp4_kernels.encode_e2m1(weight.to(KERNEL_DEVICE), scale.to(KERNEL_DEVICE)).cpu()
    monkeypatch.setattr(fp4_kernels, "use_triton", lambda x: False)
    assert torch.equal(packed, qerl.encode_e2m1(weight, scale))


@runs_kernels
@pytest.mark.parametrize("name", TILED_FORMATS)
def test_kernel_untile(name):
    tiled, dense = tiled_weight(name, 192, 384)
    tolerance = 3e-3 if name == "nf4" and CUDA else 1e-6                                  # its table, too, is bfloat16 there
    weight = tiled.dequantize(torch.float32)
    assert relative(weight.cpu().double(), dense) < tolerance
    assert torch.equal(tiled.dequantize(torch.float32, interleaved=True), fp4_kernels.interleave(weight))


def configs_here(group):
    """A group of CONFIGS, as far as the GPU here has room for them."""
    groups = fp4_kernels.configs_on(torch.device(KERNEL_DEVICE))
    if group >= len(groups):
        pytest.skip("only Hopper has room for tiles of more than 64 rows")
    return groups[group]


@runs_kernels
@pytest.mark.parametrize("name,rows,columns,configs", [("nvfp4", 1, 1024, 0), ("nvfp4", 21, 256, 1), ("nvfp4", 70, 1024, 2), ("nvfp4", 70, 384, 2),
                                                      ("nvfp4", 130, 256, 3), ("nvfp4", 300, 256, 4), ("mxfp4", 21, 256, 0), ("nf4", 21, 256, 3)])
def test_kernel_linear(name, rows, columns, configs):
    """Against float64 of the dequantised weight, in each config for about so many rows; then with other inputs, counters back at zero.

    The interpreter, which is slow, takes half of 1024 columns, and the sign of x changes from config to config only.
    """
    group = configs_here(configs)
    if not CUDA:
        columns = min(columns, 512)
    piece = 64 * max(config.R for config in group)                             # a tile lies in one piece
    out = 3 * piece
    tiled, dense = tiled_weight(name, out, columns)
    x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, out).bfloat16() * 64
    bias, A, B = torch.randn(out) * 64, torch.randn(3 * 8, columns) / 16, torch.randn(out, 8) * 8
    h = (x.double() @ A.double().T).split(8, -1)
    plain = x.double() @ dense.T
    with_lora = plain + 2 * torch.cat([h_i @ B_i.double().T for h_i, B_i in zip(h, B.split(piece))], -1)
    x, bias_there, residual_there = (t.to(KERNEL_DEVICE) for t in (fp4_kernels.interleave(x).contiguous(), bias, residual))
    lora = tiled.prepare_lora(A.to(KERNEL_DEVICE), B.to(KERNEL_DEVICE), [piece] * 3, 2.0, torch.bfloat16)
    for number, config in enumerate((None, *group)):
        if CUDA or config is None:                                            # else test_kernel_linear_adds_parts does it
            assert relative(tiled.multiply(x, config=config).cpu().double(), plain) < 5e-3
        for sign in (1, -1) if CUDA else [(-1) ** number]:
            y = tiled.multiply(sign * x, bias_there, residual_there, lora, config)
            assert relative(y.cpu().double(), sign * with_lora + bias + residual) < 5e-3
        assert not fp4_kernels.scratch(x.device).counters.any()
    twin = fp4_kernels.linear_torch(x, tiled, bias_there, residual_there, lora)
    assert relative(twin.cpu().double(), with_lora + bias + residual) < 5e-3


@pytest.mark.parametrize("R", [1, 2, 4])
def test_kernel_configs_fit(monkeypatch, R):
    """A layer is whole tiles of its pieces and whole steps of its columns, also where those are odd multiples of 128."""
    monkeypatch.setattr(fp4_kernels, "CONFIGS", [(*configs[:-1], configs[-1]._replace(R=R)) for configs in fp4_kernels.CONFIGS])
    layers = [(37888, 3584, (18944, 37888)), (37888 + 256, 3584, (18944 + 128, 37888 + 256)), (4608, 3584, (3584, 4096)), (3584, 18944, (3584, 3584)),
              (128 * 301, 128 * 27, (128 * 301,) * 2), (384, 384, (128, 256))]
    for M, (N, columns, bounds), rank in itertools.product((1, 16, 17, 32, 64, 65, 128, 129, 256, 257, 1024), layers, (0, 16, 128)):
        config = fp4_kernels.config_for(M, N, columns, bounds, rank)
        assert all(n % (64 * config.R) == 0 for n in (N, *bounds)) and columns % (64 * config.C) == 0
        assert config.rows >= min(M, 256)


@pytest.mark.skipif(fp4_kernels.triton is None, reason="needs Triton")
def test_kernel_linear_plans_fit():
    """All programs of a plan run at once, have work, and leave no more sums than there is room for."""
    layers = [(37888, 3584, (18944, 37888), 2), (4608, 3584, (3584, 4096), 3), (3584, 18944, (3584, 3584), 1), (128, 128, (128, 128), 1)]
    groups = fp4_kernels.CONFIGS, fp4_kernels.CONFIGS_WITHOUT_WGMMA, fp4_kernels.CONFIGS_IN_100_KB
    for M, (N, columns, bounds, pieces), rank, sms, configs in itertools.product((1, 16, 17, 64, 128, 129, 1024), layers, (0, 16, 128), (3, 132), groups):
        plan = fp4_kernels.plan_linear(M, N, columns, bounds, pieces, rank, sms, groups=configs)
        config = plan.config
        assert plan.tiles * 64 * config.R * config.rows >= M * N > (plan.tiles - N // (64 * config.R)) * 64 * config.R * config.rows
        assert 1 <= plan.programs <= min(config.programs * sms, plan.tiles * columns // (64 * config.C))
        assert plan.ranks == pieces * rank and (plan.lora_programs > 0) == (rank > 0 and M <= 128)
        if sms == 132:                                                                    # 3 SMs may have fewer programs than h has tiles
            assert plan.lora_programs + plan.programs <= config.programs * sms


@pytest.mark.skipif(fp4_kernels.triton is None, reason="needs Triton")
def test_kernel_linear_refuses_what_is_not_whole_tiles():
    with pytest.raises(ValueError, match="not divisible by 128"):
        fp4_kernels.plan_linear(1, 160, 256, (160, 160), 0, 0, 132)
    for out, config in ((192, None), (384, fp4_kernels.CONFIGS[0][2])):
        with pytest.raises(ValueError, match="not whole steps"):
            fp4_kernels.plan_linear(1, out, 256, (out, out), 0, 0, 132, config)


def have_capability(monkeypatch, *version):
    """Kernels are chosen as on a GPU of this compute capability; the one that is here runs them."""
    monkeypatch.setattr(fp4_kernels, "capability", lambda device: version)


@runs_kernels
@pytest.mark.parametrize("version", [(8, 0), (8, 6)])
def test_kernel_linear_without_wgmma(monkeypatch, version):
    """As GPUs other than Hopper multiply: in the order of mma.sync, with bias, residual and LoRA; NF4 and many rows decode first."""
    if CUDA and torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")                                # Triton compiles as for Ampere; see bench.py mma
    have_capability(monkeypatch, *version)
    columns = 512 if CUDA else 256
    launches = []
    launch = fp4_kernels.launch_linear
    monkeypatch.setattr(fp4_kernels, "launch_linear", lambda *args: launches.append(args) or launch(*args))
    for name, rows, by_kernel in (("nvfp4", 5, True), ("nvfp4", 40, True), ("mxfp4", 20, True), ("nvfp4", 65, False), ("nf4", 5, False)):
        tiled, dense = tiled_weight(name, 384, columns)
        x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, 384).bfloat16() * 64
        bias, A, B = torch.randn(384) * 64, torch.randn(3 * 8, columns) / 16, torch.randn(384, 8) * 8
        h = (x.double() @ A.double().T).split(8, -1)
        expected = x.double() @ dense.T + bias + residual + 2 * torch.cat([h_i @ B_i.double().T for h_i, B_i in zip(h, B.split(128))], -1)
        lora = tiled.prepare_lora(A.to(KERNEL_DEVICE), B.to(KERNEL_DEVICE), [128] * 3, 2.0, torch.bfloat16)
        x, bias, residual = (t.to(KERNEL_DEVICE) for t in (fp4_kernels.interleave(x).contiguous(), bias, residual))
        assert relative(tiled.multiply(x, bias, residual, lora).cpu().double(), expected) < 5e-3
        assert bool(launches) == by_kernel
        launches.clear()
    tiled, dense = tiled_weight("nvfp4", 192, 384)
    assert relative(tiled.dequantize(torch.float32, interleaved=True).cpu().double(), fp4_kernels.interleave(dense)) < 1e-6


def test_kernels_run_where_they_can(monkeypatch):
    """What is chosen for each kind of GPU, none of which has to be here."""
    if fp4_kernels.triton is None:
        pytest.skip("needs Triton")
    gpu = torch.device("cuda")
    for version, in_bfloat16, in_float16, dtype in (((9, 0), True, True, torch.bfloat16), ((8, 6), True, True, torch.bfloat16),
                                                    ((7, 5), False, True, torch.float16), ((7, 0), False, False, torch.float16)):
        have_capability(monkeypatch, *version)
        assert fp4_kernels.runs_on(gpu, torch.bfloat16) == fp4_kernels.tiles_fit(gpu, torch.bfloat16, 256, [128]) == in_bfloat16
        assert fp4_kernels.runs_on(gpu, torch.float16) == in_float16
        assert not fp4_kernels.tiles_fit(gpu, torch.float16, 256, [128]) and not fp4_kernels.tiles_fit(gpu, torch.bfloat16, 256, [100])
        assert fp4_kernels.default_dtype(gpu) == dtype
    assert fp4_kernels.default_dtype(torch.device("cpu")) == torch.float32


def test_kernels_are_left_out_on_amd():
    """There PyTorch calls GPUs "cuda", too; their capabilities are 9.x, as Hopper's."""
    code = "import torch; torch.version.hip = '7.0'; import fp4_kernels as k; print(k.triton, k.tiles_fit(torch.device('cuda'), torch.bfloat16, 128, [128]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert result.stdout.split() == ["None", "False"] and result.stderr.count("AMD GPU") == (fp4_kernels.triton is not None)


@pytest.mark.parametrize("target", [75, 80, 86, 89, 90, 100, 120])
def test_kernels_compile_for(monkeypatch, target):
    """Compiled, not run, for a GPU that is not here: they fit, and linear_kernel keeps weights in the threads that decode them."""
    if fp4_kernels.triton is None:
        pytest.skip("needs Triton")
    try:
        cross_compile.ptxas_path(target)
    except RuntimeError as e:
        pytest.skip(f"needs NVIDIA's assembler: {e}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-m", "harness.cross_compile", str(target)], cwd=HERE, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    linear = [kernel for kernel in kernels if kernel["kernel"] == "linear_kernel"]
    assert not [kernel for kernel in kernels if "error" in kernel]
    assert len(kernels) - len(linear) == (12 if target == 75 else 14) and bool(linear) == (target > 75)
    have_capability(monkeypatch, *divmod(target, 10))
    configs = [config for group in fp4_kernels.configs_on(None) for config in group]
    for kernel in kernels:
        assert kernel["shared"] <= 1024 * (cross_compile.SHARED[target] - 1), kernel
        assert kernel["spilled"] < 128 or target == 75 or kernel.get("config", [0])[0] > 64, kernel
    for kernel in linear:
        programs = max(config.programs for config in configs if [config.rows, config.R, config.C] == kernel["config"])
        assert programs * (kernel["shared"] + 1024) <= 1024 * cross_compile.SHARED[target], kernel
        assert kernel["weights_moved"] == 0 or target == 100, kernel
        assert ("wgmma.mma_async" in kernel["instructions"]) == (target == 90)


@runs_kernels
@pytest.mark.parametrize("rows,configs", [(5, 0), (20, 1), (50, 2), (100, 3), (200, 4)])
def test_kernel_linear_adds_parts(rows, configs):
    """One or two tiles of W, cut among three programs."""
    x = torch.randn(rows, 384).bfloat16()
    for config in configs_here(configs):
        tiled, dense = tiled_weight("nvfp4", 64 * max(2, config.R), 384)
        config = config._replace(C=1, programs=1)
        y = tiled.multiply(fp4_kernels.interleave(x).contiguous().to(KERNEL_DEVICE), config=config)
        assert relative(y.cpu().double(), x.double() @ dense.T) < 5e-3
        assert not fp4_kernels.scratch(y.device).counters.any()


@runs_kernels
@pytest.mark.parametrize("out", [128, 4480 if CUDA else 640])
def test_kernel_linear_cuts_its_work(out):
    """2 tiles: less work than programs; 70 on a GPU, 10 on the interpreter's three SMs: programs with parts of two tiles."""
    tiled, dense = tiled_weight("nvfp4", out, 256)
    x = torch.randn(5, 256).bfloat16()
    config = fp4_kernels.CONFIGS[0][0]._replace(programs=1 if out > 128 else 3)
    y = tiled.multiply(fp4_kernels.interleave(x).contiguous().to(KERNEL_DEVICE), config=config)
    assert relative(y.cpu().double(), x.double() @ dense.T) < 5e-3


@runs_kernels
@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_norm_and_silu(interleaved):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 2 * 192).to(KERNEL_DEVICE), torch.randn(2 * 192).to(KERNEL_DEVICE)
    torch.testing.assert_close(fp4_kernels.rms_norm(x, weight, 1e-6, interleaved), fp4_kernels.rms_norm_torch(x, weight, 1e-6, interleaved))
    torch.testing.assert_close(fp4_kernels.silu_mul(x, interleaved), fp4_kernels.silu_mul_torch(x, interleaved))


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rms_norm", "silu_mul", "rotary", "token_logprob"])
def test_kernel_gradients(name, dtype):
    """What stands between the linear layers in training, and its gradients, against float64: odd sizes, views of larger tensors."""
    torch.manual_seed(0)
    angles, chosen = torch.rand(7, 20).repeat(1, 2) * 6, torch.randint(0, 4500, (14,))
    kernel, exact, whole, view, *others = {
        "rms_norm": (lambda x, w: fp4_kernels.rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, (600,), w, 1e-3),
                     torch.randn(2, 7, 700), lambda x: x[..., 50:650], torch.randn(600)),
        "silu_mul": (fp4_kernels.silu_mul, fp4_kernels.silu_mul_torch, 3 * torch.randn(4, 7, 2200), lambda x: x[::2]),
        "rotary": (fp4_kernels.rotary, lambda x, c, s: fp4_kernels.rotate(x, c[:, None], s[:, None]),
                   torch.randn(2, 7, 8 * 40), lambda x: x.unflatten(-1, (8, 40))[:, :, 2:7], angles.cos(), angles.sin()),
        "token_logprob": (fp4_kernels.token_logprob, lambda z, t: z.log_softmax(-1).gather(1, t[:, None])[:, 0],
                          3 * torch.randn(14, 4600) + 200 * (dtype == torch.float32), lambda x: x[:, 60:4560], chosen)}[name]
    inputs = [t.to(KERNEL_DEVICE).requires_grad_(t.is_floating_point()) for t in (whole.to(dtype), *others)]
    exact_inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    y, z = kernel(view(inputs[0]), *inputs[1:]), exact(view(exact_inputs[0]), *exact_inputs[1:])
    as_attentions = torch.randn(z.transpose(-2, -3).shape).transpose(-2, -3) if z.dim() > 2 else torch.randn(2 * len(z))[::2]
    for grad in (as_attentions, torch.tensor(0.5).expand(z.shape)):                       # neither is dense
        y.backward(grad.to(y.dtype).to(KERNEL_DEVICE), retain_graph=True)
        z.backward(grad.to(y.dtype).to(KERNEL_DEVICE).double(), retain_graph=True)
    pairs = [(y, z), *((a.grad, b.grad) for a, b in zip(inputs, exact_inputs) if a.grad is not None)]
    assert len(pairs) == (3 if name == "rms_norm" else 2) and y.dtype == (torch.float32 if name == "token_logprob" else dtype)
    for a, b in pairs:
        assert relative(a.double(), b) < (2e-5 if dtype == torch.float32 else 1e-2)       # the interpreter cuts bfloat16 off


@runs_kernels
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_kernels_train_as_their_twins(tmp_path, monkeypatch, name):
    """Log-probabilities and gradients of LoRA and norms, blocks recomputed, with kernels and without them."""
    model = with_lora(make_folder(tmp_path, name)[0], train_norms=True, device=KERNEL_DEVICE)
    model.recompute_in_backward()
    prompts, length = [[5, 6, 7], [8], [5, 6, 7]], torch.tensor([5, 2, 3], device=KERNEL_DEVICE)
    completions = torch.randint(0, 250, (3, 5), device=KERNEL_DEVICE)
    found = []
    for kernels in (True, False):
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(fp4_kernels, "use_triton", lambda x: False)
            logprobs = qerl.token_logprobs(model, prompts, completions, length, chunk=4)
            logprobs.square().sum().backward()
        found.append({"logprobs": logprobs.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
        model.zero_grad()
    assert len(found[0]) == 1 + len(qerl.trainable(model)) and found[0].keys() == found[1].keys()
    for n, a in found[0].items():
        assert relative(a, found[1][n]) < (1e-4 if KERNEL_DEVICE == "cpu" else 0.05), n


@runs_kernels
@pytest.mark.parametrize("heads,kv_heads,dim,interleaved,parts", [(6, 2, 48, False, None), (4, 4, 64, False, 2), (7, 1, 128, True, 3)])
def test_kernel_decode_attention(monkeypatch, heads, kv_heads, dim, interleaved, parts):
    torch.manual_seed(0)
    monkeypatch.setattr(fp4_kernels, "CACHE_PIECE", 256)
    split, longest = 128, 2 * 256 + 9                                                     # three pieces, the last one short
    filled = torch.tensor([0, 64, 65, longest - 1, 255, split - 1, 256])
    heads = heads if not interleaved else 7 * 2                                           # whole tiles of columns
    kv_heads = kv_heads if not interleaved else 2
    qkv, cos, sin = torch.randn(7, (heads + 2 * kv_heads) * dim), torch.randn(7, dim), torch.randn(7, dim)
    cache = torch.randn(2, 7, kv_heads, longest, dim)
    for b, n in enumerate(filled):                                                        # what lies behind must not matter
        cache[:, b, :, n:] = float("nan")
    pieces = [piece.contiguous().to(KERNEL_DEVICE) for piece in cache.split(256, 3)]
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=KERNEL_DEVICE)
    twins = [piece.nan_to_num().double() for piece in cache.split(256, 3)]
    kernel = fp4_kernels.decode_attention(*(t.to(KERNEL_DEVICE) for t in (qkv, cos, sin)), pieces, addresses, longest, filled.to(KERNEL_DEVICE), interleaved, split, parts)
    twin = fp4_kernels.decode_attention_torch(qkv.double(), cos.double(), sin.double(), twins, filled, interleaved)
    assert relative(kernel.cpu().double(), twin) < 1e-5
    for piece, expected in zip(pieces, twins):
        assert relative(piece.cpu().nan_to_num().double(), expected) < 1e-6


def test_the_cache_grows_in_pieces(family, monkeypatch):
    """Pieces of 8 positions give the rollout of a single piece, also where slots are given back and taken anew."""
    model = with_lora(family[0])
    prompts = [[5, 6, 7], [8], [9] * 19, [5, 6, 7, 8]] * 12
    grown = []

    class Watched(qerl.Sampler):
        def steps(self, count):
            super().steps(count)
            grown.append((int(self.cache.filled.max()), len(self.cache.pieces[0]), len(self.cache.filled)))

    def rollout():
        generator = torch.Generator().manual_seed(3)
        return qerl.generate(model, prompts, 40, 1, eos={11, 12, 13}, slots=36, generator=generator, sampler_class=Watched)
    whole = rollout()
    assert {pieces for _, pieces, _ in grown} == {1}
    grown.clear()
    monkeypatch.setattr(fp4_kernels, "CACHE_PIECE", 8)
    monkeypatch.setattr(qerl, "CACHE_PIECE", 8)
    cut = rollout()
    for field in fields(qerl.Rollout):
        torch.testing.assert_close(getattr(cut, field.name), getattr(whole, field.name), rtol=1e-4, atol=1e-4)
    assert grown[0][1] == 3 and grown[-1][1] == max(-(-filled // 8) for filled, _, _ in grown) > 3      # as many as needed
    assert {slots for _, _, slots in grown} >= {36, 18}                                   # it shrank


@runs_kernels
def test_kernel_sample():
    """Log-probability and entropy against PyTorch's; the tokens' frequencies against the probabilities (chi-squared)."""
    torch.manual_seed(0)
    logits = torch.randn(3, 5000).to(KERNEL_DEVICE)
    token, logprob, entropy = fp4_kernels.sample(logits, 0.7, torch.tensor([5], device=KERNEL_DEVICE))
    expected = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprob, expected.gather(1, token[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(1), rtol=1e-4, atol=1e-4)
    again = fp4_kernels.sample(logits, 0.7, torch.tensor([5], device=KERNEL_DEVICE))[0]
    assert torch.equal(token, again) and not torch.equal(token, fp4_kernels.sample(logits, 0.7, torch.tensor([6], device=KERNEL_DEVICE))[0])
    draws = 20000 if CUDA else 160
    logits = torch.tensor([0.0, 1.0, 1.5, -0.5, 0.5]).to(KERNEL_DEVICE).expand(draws, 5).contiguous()
    counts = fp4_kernels.sample(logits, 1.0, torch.tensor([1], device=KERNEL_DEVICE))[0].bincount(minlength=5)
    wanted = draws * logits[0].softmax(0)
    assert ((counts - wanted) ** 2 / wanted).sum() < 18.5                                 # 4 degrees of freedom: 1 in 1,000


@runs_kernels
def test_kernel_decode_of_a_layer_is_its_forward():
    """QuantLinear in tiles: decode (fused, interleaved) against forward (dequantised), with LoRA, bias and residual."""
    torch.manual_seed(0)
    format = qerl.FORMATS["nvfp4"]
    parts = [torch.cat(p) for p in zip(*((a, b, c.view(1, 1).expand(128, 1)) for a, b, c in map(format.quantize, torch.randn(3, 128, 256))))]
    weight = format.tile(*(p.to(KERNEL_DEVICE) for p in parts))
    bias = torch.randn(384).to(KERNEL_DEVICE).bfloat16()
    layer = qerl.QuantLinear(["q", "k", "v"], [128] * 3, 256, weight, bias, lora_rank=4, lora_alpha=8).to(KERNEL_DEVICE)
    layer.lora_B.data.normal_()
    x, residual = torch.randn(5, 256).to(KERNEL_DEVICE).bfloat16(), torch.randn(5, 384).to(KERNEL_DEVICE).bfloat16()
    with torch.no_grad():
        layer.prepare_decoding(torch.bfloat16)
        y = layer.decode(fp4_kernels.interleave(x).contiguous(), residual)
        assert relative(y.float(), (layer(x) + residual).float()) < 1e-2


@runs_kernels
def test_kernel_gradient_through_tiles():
    """dL/dx of a frozen layer in tiles; on a GPU the weight is decoded in autograd's thread, which like any new one has no context."""
    tiled, dense = tiled_weight("nvfp4", 384, 256)
    with ThreadPoolExecutor(1) as new_thread:
        weight = new_thread.submit(tiled.dequantize).result()
    assert relative(weight.cpu().double(), dense) < 5e-3
    x = torch.randn(40, 256).bfloat16()
    interleaved = fp4_kernels.interleave(x).contiguous().to(KERNEL_DEVICE)
    with ThreadPoolExecutor(1) as new_thread:                                             # 40 rows: x by TMA, too
        y = new_thread.submit(tiled.multiply, interleaved).result()
    assert relative(y.cpu().double(), x.double() @ dense.T) < 5e-3
    layer = qerl.QuantLinear(["a"], [384], 256, tiled, None)
    x = torch.randn(5, 256, device=KERNEL_DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(5, 384).bfloat16()
    layer(x).backward(grad.to(KERNEL_DEVICE))
    assert relative(x.grad.cpu().double(), grad.double() @ dense) < 5e-3


@gpu
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4", "bf16"])
def test_gpu_rollout_is_the_policy_that_is_trained(tmp_path, weights):
    """Log-probabilities from decoding (tiles, fused kernels, CUDA graph) against those of training, with LoRA and refilled slots."""
    model = with_lora(make_folder(tmp_path, "wide")[0], weights=weights, device="cuda")
    assert isinstance(model.blocks[0].mlp.down.weight, fp4_kernels.TiledWeight) == (weights != "bf16")
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    rollout = qerl.generate(model, prompts, 40, 2, slots=70)
    repeated = [p for p in prompts for _ in range(2)]
    with torch.no_grad():
        logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].mean() < 0.03


@gpu
def test_gpu_generates_what_the_cpu_does(qwen):
    rollouts = []
    for device in ("cpu", "cuda"):
        model = qerl.load_model(qwen[0], lora_rank=2, device=device, dtype=torch.float32)
        rollouts.append(qerl.generate(model, PROMPTS, 24, 2, temperature=0, slots=4))
    assert torch.equal(rollouts[0].tokens, rollouts[1].tokens.cpu())
    torch.testing.assert_close(rollouts[0].logprobs, rollouts[1].logprobs.cpu(), rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_gpu_rollouts_with_one_seed_are_equal(tmp_path, top_p):
    """Bit for bit, with the step as a graph or, for top-p, half of it; 128 slots take the path of many rows."""
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda")
    rollouts = [qerl.generate(model, [[5 + i] for i in range(100)], 60, 2, top_p=top_p, slots=128,
                              generator=torch.Generator("cuda").manual_seed(0)) for _ in range(4)]
    for other in rollouts[1:]:
        assert torch.equal(rollouts[0].tokens, other.tokens) and torch.equal(rollouts[0].logprobs, other.logprobs)


# ------------------------------------------------------------------------------------------------------------- course
# Every command and snippet of docs/course.md runs, and prints what the course says that it prints.

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
COURSE_BLOCK = re.compile(r"(?:<!-- (figures of the built-in policy) -->\n)?```(\w*)\n(.*?)```\n", re.DOTALL)
# The built-in policy of which the course prints figures. Other processors make other ones, whose decimals may be any; what
# the course concludes from them must hold all the same (test_course_claims).
COURSE_POLICY = "c52dd642e0f503f163dd2d75e7cf6d86"


def course_exercises():
    """[(heading, [(whether its figures are the built-in policy's, kind, text) of each fenced block])] of the course."""
    with open(f"{HERE}/docs/course.md", encoding="utf-8") as f:
        parts = re.split(r"^## ", f.read(), flags=re.MULTILINE)[1:]
    exercises = [part for part in parts if part[0].isdigit()]
    return [(part.splitlines()[0], COURSE_BLOCK.findall(part)) for part in exercises]


def number_agrees(expected, found, any_decimals):
    """Integers are equal; decimals agree to the last digit shown."""
    if "." not in expected and "e" not in expected:
        return found == expected
    if any_decimals:
        return True
    shown = 10.0 ** -len(expected.partition("e")[0].partition(".")[2])
    if "e" in expected:
        shown *= 10.0 ** int(expected.partition("e")[2])
    return abs(float(found) - float(expected)) <= 1.01 * shown


def line_agrees(expected, found, any_decimals=False):
    """Do two lines say the same? "..." stands for any text, "a ± b" for a mean and its error.

    Means also agree if they differ by at most three of their standard errors, and an error may be
    three times as large or small.
    """
    pattern, numbers, after = "", [], []
    for text in re.split(r"(\.\.\.)", expected.strip()):
        if text == "...":
            pattern += ".*"
            continue
        end = 0
        for number in NUMBER.finditer(text):
            between = text[end:number.start()]
            pattern += r"\s+".join(map(re.escape, re.split(r"\s+", between))) + f"({NUMBER.pattern})"
            numbers.append(number[0])
            after.append(between)
            end = number.end()
        pattern += r"\s+".join(map(re.escape, re.split(r"\s+", text[end:])))
    match = re.fullmatch(pattern, found.strip())
    if not match:
        return False
    is_error = [between.strip() == "±" for between in after] + [False]
    for i, (wanted, got) in enumerate(zip(numbers, match.groups())):
        agrees = number_agrees(wanted, got, any_decimals)
        if is_error[i]:
            a, b = float(wanted), float(got)
            agrees = agrees or a / 3 <= b <= 3 * a
        elif is_error[i + 1]:
            error = math.hypot(float(numbers[i + 1]), float(match.groups()[i + 1]))
            agrees = agrees or abs(float(wanted) - float(got)) <= 3 * error
        if not agrees:
            return False
    return True


def course_difference(expected, found, any_decimals=False):
    """None if the output is as the course shows it, else the first line that is not.

    A line "..." stands for any lines. Empty lines do not count.
    """
    wanted = [line for line in expected.splitlines() if line.strip()]
    got = [line for line in found.splitlines() if line.strip()]
    skipping = False
    for line in wanted:
        if line.strip() == "...":
            skipping = True
            continue
        while skipping and got and not line_agrees(line, got[0], any_decimals):
            got.pop(0)
        skipping = False
        if not got or not line_agrees(line, got[0], any_decimals):
            return f"the course has {line!r}, the output {got[0] if got else 'ends'!r}"
        got.pop(0)
    return None if skipping or not got else f"the output goes on with {got[0]!r}"


def run_course_block(command, folder, commands=None):
    """Run a line of the course in a copy of the project -> what it writes to stdout."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder), "NO_COLOR": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = re.sub(r"(?<![\w./-])python(?= )", lambda _: shlex.quote(sys.executable), command)
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=env, input=commands or "", capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"
    return result.stdout


def pdb_steps(transcript):
    """A ```pdb block -> (the command that starts pdb, [(what is typed, what it prints)])."""
    start, *steps = transcript.split("\n(Pdb) ")
    return start.removeprefix("$ "), [step.partition("\n")[::2] for step in steps]


def run_exercise(blocks, folder):
    """Run an exercise's blocks in order in a copy of the project -> (what differs, the outputs of its scripts)."""
    for name in ("qerl.py", "fp4_kernels.py", "train_gsm8k.py", "bench.py"):
        shutil.copy(f"{HERE}/{name}", folder)
    for name in ("harness", "methods", "results"):
        shutil.copytree(f"{HERE}/{name}", f"{folder}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
    with open(f"{warm_start()}/model.safetensors", "rb") as f:
        other_policy = hashlib.md5(f.read()).hexdigest() != COURSE_POLICY
    differences, outputs = [], []
    for of_policy, kind, text in blocks:
        any_decimals = bool(of_policy) and other_policy
        if kind == "python":
            (folder / "try.py").write_text(text)
        elif kind == "sh":
            outputs.append(run_course_block(text.strip(), folder))
        elif kind == "text":
            differences.append(course_difference(text, outputs[-1], any_decimals))
        elif kind == "pdb":
            start, steps = pdb_steps(text.rstrip())
            typed = "".join(f"{command}\n" for command, _ in steps)
            _, *printed_by = run_course_block(start, folder, typed).split("(Pdb) ")
            assert len(printed_by) == len(steps), f"pdb stopped after {len(printed_by)} of {len(steps)} commands"
            for (command, expected), found in zip(steps, printed_by):
                if expected.strip():
                    difference = course_difference(expected, found, any_decimals)
                    differences.append(difference and f"{command}: {difference}")
    return [d for d in differences if d], outputs


def columns(text, line):
    """The numbers of each line of a program's output that begins so."""
    return [[float(n) for n in NUMBER.findall(row.replace(line, "", 1).replace("inf", "1e9"))]
            for row in text.splitlines() if row.startswith(line)]


def claims_of_exercise_4(outputs):
    noisy = columns(outputs[0], "nvfp4 sigma")          # sigma; mean and error of the entropy, its change, the accuracy
    unchanged, changed = noisy[2], noisy[-1]
    assert unchanged[0] == 0.01 and abs(unchanged[3]) < 0.1 * changed[3]
    assert changed[0] == 0.3 and changed[3] > 3 * changed[4] and changed[5] < noisy[0][5] / 1.3


def claims_of_exercise_6(outputs):
    (_, spread, advantage), = columns(outputs[1], "somebody right:")
    (_, small_spread, large_advantage), = columns(outputs[1], "nobody right:")
    assert small_spread < spread / 5 and large_advantage > advantage / 2


def claims_of_exercise_7(outputs):
    k1, k3 = zip(*(row[2:5:2] for row in columns(outputs[0], "sigma ")[:4]))
    assert sorted(k1) == list(k1) and k1[-1] == pytest.approx(k3[-1], rel=0.3)
    capped = columns(outputs[0], "cap ")                # cap; mean and deviation of the weights; estimate and its error
    for column in (1, 2, 3, 4):
        assert sorted(row[column] for row in capped) == [row[column] for row in capped]
    (in_16_bit,), tokens_of_01 = columns(outputs[0], "trained in BF16, sigma 0"), k3[1]
    assert in_16_bit[3] > 10 * tokens_of_01             # rounding the rollout alone: a larger mismatch than noise of 0.01
    assert capped[-1][1] == pytest.approx(1, abs=0.15)  # of 8,000 weights with a standard deviation of 3: five errors


# What the course concludes from the built-in policy's figures, on whatever policy this processor has made.
COURSE_CLAIMS = {4: claims_of_exercise_4, 6: claims_of_exercise_6, 7: claims_of_exercise_7}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("number", range(1, 9))
def test_course_exercise(tmp_path, number):
    if number == 8:
        if fp4_kernels.triton is None:
            pytest.skip("there is no Triton")
        if fp4_kernels.triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip("Triton 3.6's interpreter fails with numpy from 2.4 on")
    _, blocks = course_exercises()[number - 1]
    differences, outputs = run_exercise(blocks, tmp_path)
    assert differences == []
    COURSE_CLAIMS.get(number, lambda _: None)(outputs)


def test_course_blocks_are_all_run():
    """No fenced block of the course escapes the test: each is of a known kind and in an exercise."""
    with open(f"{HERE}/docs/course.md", encoding="utf-8") as f:
        fences = re.findall(r"^ *```(\w*)$", f.read(), flags=re.MULTILINE)
    exercises = course_exercises()
    kinds = [kind for _, blocks in exercises for _, kind, _ in blocks]
    assert len(exercises) == 8 and len(fences) == 2 * len(kinds)
    assert set(kinds) <= {"sh", "python", "pdb", "text"}
    for heading, blocks in exercises:
        assert any(kind in ("text", "pdb") for _, kind, _ in blocks), heading


@pytest.mark.parametrize("expected,found,agree", [
    ("error 0.0951", "error 0.0951", True), ("error 0.0951", "error 0.0952", True), ("error 0.0951", "error 0.0961", False),
    ("codes [6, 11]", "codes [6, 11]", True), ("codes [6, 11]", "codes [6, 10]", False), ("codes [6, 11]", "codes [6]", False),
    ("0.277 ± 0.002", "0.283 ± 0.002", True), ("0.277 ± 0.002", "0.297 ± 0.002", False), ("0.277 ± 0.002", "0.277 ± 0.02", False),
    ("> ...qerl.py(...)pick()", "> /a/qerl.py(813)pick()", True), ("> ...qerl.py(...)pick()", "> /a/qerl.py(813)step()", False),
    ("a 1\n...\nb 2", "a 1\nx\ny\nb 2", True), ("a 1\n...", "a 1\nx", True), ("a 1", "a 1\nx", False), ("a 1\nb 2", "a 1", False),
])
def test_course_outputs_are_compared(expected, found, agree):
    assert (course_difference(expected, found) is None) == agree


def test_course_wrong_numbers_are_noticed():
    """Any number of any output in the course, changed by its double and one, is noticed."""
    for heading, blocks in course_exercises():
        for _, kind, text in blocks:
            if kind != "text":
                continue
            for number in NUMBER.finditer(text):
                wrong = f"{text[:number.start()]}{2 * float(number[0]) + 1}{text[number.end():]}"
                assert course_difference(text, wrong), (heading, number[0])


# ------------------------------------------------------------------------------------ several processes

# train_gsm8k.py with completions that depend on the prompt alone, so that it does not matter who samples them, and a reward with a signal.
SAME_COMPLETIONS = """
import sys
import torch
import qerl, train_gsm8k

def generate(model, prompts, max_new_tokens, group_size=1, *rest, **options):
    rows = []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(sum(i * token for i, token in enumerate(prompt)))
        for _ in range(group_size):
            length = int(torch.randint(2, 9, (), generator=generator))
            rows.append(torch.randint(20, 250, (length,), generator=generator))
    length = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logprobs = -torch.ones(tokens.shape) * qerl.length_mask(length, tokens.shape[1])
    return qerl.Rollout(tokens, logprobs, -logprobs, length, length < 8)

def reward(text, *_):
    value = sum(text.encode()) % 3
    return float(value), float(value == 2)

qerl.generate = generate
train_gsm8k.reward = reward
train_gsm8k.main()
"""


def torchrun(count, script, *args):
    """The command that starts `count` processes of a script on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", script, *map(str, args)]


def run_processes(count, script, *args):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    return subprocess.run(torchrun(count, script, *args), env=environment, cwd=HERE, capture_output=True, text=True, timeout=300)


SEVERAL = ("--prompts", 8, "--group", 4, "--updates", 2, "--steps", 3, "--max-new-tokens", 8, "--lora-rank", 2, "--lr", 1e-2, "--quantizer", "rtn",
           "--save-every", 1, "--device", "cpu", "--beta", 0.1, "--eval-questions", 5)


def run_alone(*args):
    """SAME_COMPLETIONS in this process, whose environment is that of a single one under torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RUN_ID", "torchrun sets it"), ("MAX_RESTARTS", "0")):
            patch.setenv(f"TORCHELASTIC_{name}", value)
        for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["train_gsm8k.py", *map(str, args)])
        for module, name in ((qerl, "generate"), (train_gsm8k, "reward")):
            patch.setattr(module, name, getattr(module, name))                            # put back what the script replaces
        exec(SAME_COMPLETIONS, {})


def assert_same_steps(one, several, steps):
    """Two runs' folders, of so many steps, hold the same adapter, figures and answers within rounding."""
    adapters, logs, answers = [], [], []
    for out in (one, several):
        adapters.append(load_file(out / "adapter" / "adapter_model.safetensors"))
        logs.append(read_jsonl(out / "metrics.jsonl"))
        answers.append(read_jsonl(out / "answers_after.jsonl"))
    moved = max(t.abs().max() for name, t in adapters[0].items() if "lora_B" in name)
    assert moved > 1e-3                                                                   # there was something to learn
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], tensor, rtol=1e-3, atol=1e-4 * moved.item())
    assert len(logs[0]) == len(logs[1]) == steps
    for a, b in zip(*logs):
        assert a.keys() == b.keys()
        for name in ("reward", "accuracy", "length", "kl", "gradient_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-7), name
    assert answers[0] == answers[1]


def test_two_processes_take_the_steps_of_one(qwen, data, tmp_path, capsys):
    """The same global batch: the same adapter and figures within rounding."""
    script = tmp_path / "same.py"
    script.write_text(SAME_COMPLETIONS)
    options = ("--model", qwen[0], "--data", data, *SEVERAL, "--out")
    run_alone(*options, tmp_path / "1")
    done = run_processes(2, script, *options, tmp_path / "2")
    assert done.returncode == 0, done.stderr
    for output in (done.stdout, capsys.readouterr().out):
        assert output.count("held-out pass@1") == 1                                       # one of them speaks
    assert_same_steps(tmp_path / "1", tmp_path / "2", steps=3)


# train_gsm8k.py of which rank 1 is killed in the second update of step 3. Rank 0 has been with it in the first one, so step 2 is saved.
DYING_RANK = """
import os, signal
import train_gsm8k
from harness.ranks import Ranks

add_gradients, calls = Ranks.add_gradients, []

def die(self, trained):
    calls.append(self)
    if self.rank == 1 and len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    add_gradients(self, trained)

Ranks.add_gradients = die
train_gsm8k.main()
"""


def test_a_rank_that_dies_ends_the_run_which_goes_on_with_another_number(qwen, data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    script = tmp_path / "dying.py"
    script.write_text(DYING_RANK)
    options = ("--model", qwen[0], "--data", data, *SEVERAL, "--steps", 4, "--skip-eval-before", "--out", out)
    run = run_processes(2, script, *options)
    assert run.returncode != 0 and not (out / "summary.json").exists()
    assert run.stderr.count("error: ") <= 1 and ("go on with --resume" in run.stderr or "SIGKILL" in run.stderr)
    assert [m["step"] for m in read_jsonl(out / "metrics.jsonl")] == [1, 2]
    run_main(monkeypatch, *options, "--resume")
    assert f"resumed {out} after step 2" in capsys.readouterr().out
    assert [m["step"] for m in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("options,message", [
    (["--prompts", 6], "--updates 2 times 2 processes"), (["--method", "fp16"], "the neighbours run in one process"),
    (["--device", "cpu:0"], "use"), (["--shard", "--keep-activations"], "--keep-activations: with --shard"),
    (["--shard", "--weights", "bf16", "--lora-rank", 0, "--beta", 0], "--lora-rank 0: trains the weights themselves, which --shard cuts")])
def test_what_several_processes_cannot_do_is_one_line(qwen, data, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun sets it")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert message in refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *SEVERAL, *options, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_only_torchrun_makes_several_processes(monkeypatch):
    """WORLD_SIZE alone, as some clusters set it, does not."""
    for world_size in ("2", "x"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert Ranks().count == 1


def test_minibatches_are_as_many_as_asked_for():
    batch = batch_with_log_ratios([[0.0]] * 18)         # deep_grpo adds groups, so that rows may not divide evenly
    sizes = [len(minibatch.prompts) for minibatch in batch.minibatches(8)]
    assert len(sizes) == 8 and sum(sizes) == 18 and max(sizes) - min(sizes) <= 1


def test_ranks_share_each_minibatch():
    one, questions = Ranks(), list(range(24))
    assert one.share(questions, 3) == questions and one.collect([5]) == [5] and one.total(torch.tensor(2.5)) == 2.5
    shares = []
    for rank in range(2):
        ranks = Ranks()
        ranks.count, ranks.rank = 2, rank
        shares.append(ranks.share(questions, 3))
    assert shares == [[0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]]


# -------------------------------------------------------------- methods: rollout_correction, flashrl, qurl

def neighbour(name, **settings):
    """A method as --method NAME finds it, with its defaults."""
    values = {"method": name, **methods.defaults(name), **settings}
    return methods.find(name, train_gsm8k.Settings(**values))


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


# ------------------------------------------------------------------- neighbours: noise_control, pooled_noise, shaped_noise, fp16, deep_grpo, maspo

def small_neighbour(name, settings=(), **state):
    """The Method of --method NAME with the small preset's settings and these."""
    method = methods.find(name, train_gsm8k.arguments(["--device", "cpu", "--micro-tokens", "16384", "--method", name, *map(str, settings)]))
    method.state.update(state)
    return method


def batch_with_log_ratios(log_ratios, advantages=None):
    """A Batch whose log pi_old - log mu are these, float [N, C]."""
    log_ratios = torch.tensor(log_ratios)
    rows, length = log_ratios.shape
    return Batch([[1]] * rows, torch.zeros(rows, length, dtype=torch.long), torch.full((rows,), length), -1 - log_ratios,
                 torch.ones(rows) if advantages is None else torch.tensor(advantages), torch.ones(rows, length, dtype=torch.bool),
                 torch.full((rows, length), -1.0))


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
        rollout, batch = demonstration.sample_step(small_neighbour("qerl"), model, types.SimpleNamespace(eos={300}), [[5, 6, 7]], group=16)
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
    batch = train_gsm8k.make_batch(both, advantages.flatten(), "grpo")
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


# --------------------------------------------------------------------- methods/: four_over_six, awq, gptq, rilq and qat

def calibrated(weights_seed=0, tokens=1000, out_features=48, in_features=128):
    """(weight, inputs x, gram): inputs that are correlated and of which some channels are large."""
    generator = torch.Generator().manual_seed(weights_seed)
    weight = torch.randn(out_features, in_features, generator=generator) * 0.05
    mix = torch.eye(in_features) + 0.1 * torch.randn(in_features, in_features, generator=generator)
    x = torch.randn(tokens, in_features, generator=generator) @ mix * torch.rand(in_features, generator=generator) ** 3
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


@pytest.mark.parametrize("kind", ["gaussian", "odd rows", "zeros", "zero blocks", "ties", "wide range"])
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
            stored = (block.abs().max() / (largest * alpha)).nan_to_num().to(torch.float8_e4m3fn).double() or 0.125
            table = qerl.E2M1.double() * stored * alpha
            errors[largest] = (block[:, None] - table).square().amin(1).sum().item()
        chosen.add(min(errors, key=errors.get))
        assert (block - found).square().sum().item() == pytest.approx(min(errors.values()), rel=1e-4, abs=1e-12)
    assert chosen == {"zeros": {6}, "zero blocks": {4, 6}, "ties": {4}}.get(kind, {4, 6})


def test_four_over_six_lowers_the_error_of_gaussian_weights_as_published():
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))
    rounding, better = (relative(qerl.dequantize_nvfp4(*quantize(weight), torch.float32), weight) ** 2
                        for quantize in (qerl.quantize_nvfp4, four_over_six.quantize_four_over_six))
    assert 1 - better / rounding == pytest.approx(0.166, abs=0.005)


def textbook_gptq(weight, gram, damping=0.01):
    """GPTQ as optimal brain quantisation in a given order: after each column the inverse Hessian is reduced."""
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
    assert agree.float().mean() > 0.99                             # float32 decides a near tie otherwise
    error = output_error(parts, weight, x)
    assert error == pytest.approx(relative(x @ expected.T, x @ weight.T), rel=0.02)
    assert error < 0.8 * output_error(qerl.quantize_nvfp4(weight), weight, x)


def test_gptq_of_uncorrelated_inputs_is_rounding():
    weight, _, _ = calibrated()
    for gram in (torch.eye(128), torch.zeros(128, 128)):
        ours, rounding = gptq.quantize_gptq(weight, gram), qerl.quantize_nvfp4(weight)
        assert torch.equal(qerl.dequantize_nvfp4(*ours, torch.float32), qerl.dequantize_nvfp4(*rounding, torch.float32))
        assert torch.equal(ours[1].view(torch.uint8), rounding[1].view(torch.uint8)) and torch.equal(ours[2], rounding[2])


def plain_layer(weight):
    parts = qerl.keep_16_bit(weight)
    return qerl.QuantLinear(["x"], [len(weight)], weight.shape[1], qerl.PackedWeight(qerl.FORMATS["bf16"], *parts), None)


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
        errors.append((relative(x.double() / s @ decoded.T.double(), x.double() @ weight.T.double()), s))
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
        layers = [block.attention.qkv, block.mlp.gate_up, block.mlp.down] + [block.attention.o] * (kv_heads == 4)
        scales = {layer: torch.rand(layer.weight.dequantize(torch.float32).shape[1]) + 0.5 for layer in layers}
        folded = awq.fold(block, scales)
        changed = [name for name, tensor in folded.items() if not torch.equal(tensor, tensors[name])]
        assert any("o_proj" in name for name in changed) == (kv_heads == 4) and any("norm" in name for name in changed)
        tensors.update(folded)
    tokens = torch.arange(30)[None]
    before = theirs(tokens).logits
    theirs.load_state_dict(tensors)
    assert relative(theirs(tokens).logits, before) < 1e-5


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder in which quantised models are kept, for one test."""
    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("quantizer", quantizers.QUANTIZERS)
def test_quantised_folder_is_one_of_compressed_tensors(qwen, data, cache, quantizer):
    """transformers, with the library, loads it and computes our logits; what was calibrated is nearer to the 16-bit model."""
    folder, theirs = qwen
    questions = read_questions(data, "train*.jsonl")[:20]
    text = train_gsm8k.ChatText(folder, "")
    path = quantizers.quantized_folder(folder, quantizer, questions, text, "cpu")
    ours = qerl.load_model(path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokens = torch.tensor([text.prompt(questions[0]["question"])])
    with torch.no_grad():
        loaded(tokens[:, :1])                          # the library decodes its weights when they are first used, in 16 bit
        for tensor in [*loaded.parameters(), *loaded.buffers()]:
            tensor.data = tensor.data.float()
        assert relative(ours(tokens), loaded(tokens).logits) < 0.01                   # and its embeddings
        exact = theirs(tokens).logits
    if quantizer != "four-over-six":                   # of a single text only what was calibrated on it has to be nearer
        assert relative(ours(tokens), exact) < relative(qerl.load_model(folder)(tokens), exact)


def test_quantizer_goes_with_a_run_and_is_found_once(qwen, data, tmp_path, cache, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--save-every", 1, "--quantizer", "gptq")
    run_main(monkeypatch, *options, "--out", tmp_path / "run")
    assert capsys.readouterr().out.count("finding NVFP4 codes by gptq") == 1
    found, = cache.iterdir()
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(found) and found.name.startswith(os.path.basename(qwen[0]) + "-gptq-")
    loaded = []
    load_model = qerl.load_model
    monkeypatch.setattr(qerl, "load_model", lambda folder, *rest, **options: loaded.append(folder) or load_model(folder, *rest, **options))
    run_main(monkeypatch, *options, "--method", "gptq", "--out", tmp_path / "same")
    assert "finding" not in capsys.readouterr().out and loaded == [str(found)]
    assert without_times(tmp_path / "run" / "metrics.jsonl") == without_times(tmp_path / "same" / "metrics.jsonl")
    rounding = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--save-every", 1, "--out", tmp_path / "rtn")
    run_main(monkeypatch, *rounding)
    assert without_times(tmp_path / "rtn" / "metrics.jsonl") != without_times(tmp_path / "run" / "metrics.jsonl")


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
    assert found.keys() == expected.keys() and all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in found)
    assert len(most) == len(layers) == 8                           # each is read once
    assert max(most) == (1 if quantizer == "four-over-six" else 4) and not alive


def test_codes_of_a_damaged_model_are_not_begun(qwen, data, tmp_path, cache, monkeypatch, capsys):
    shutil.copytree(qwen[0], tmp_path / "damaged")
    break_tensor(qwen[0], tmp_path / "damaged", lambda s: s.pop("model.layers.1.mlp.down_proj.weight"))
    monkeypatch.setattr(gptq, "quantize_gptq", lambda *_: pytest.fail("begun"))
    error = refused(monkeypatch, capsys, "--data", data, *QUICK, "--quantizer", "gptq", "--out", tmp_path / "out", "--model", tmp_path / "damaged")
    assert "tensor model.layers.1.mlp.down_proj.weight is missing" in error


@pytest.mark.parametrize("options,message", [
    (["--quantizer", "gptq", "--weights", "nf4"], "--quantizer gptq: chooses codes of NVFP4; use --weights nvfp4"),
    (["--method", "gptq", "--quantizer", "awq"], "use --quantizer awq alone"),
    (["--method", "gptq", "--quantizer", "rtn"], "use --quantizer rtn alone"),
    (["--method", "awq", "--weights", "bf16"], "use --weights nvfp4"),
    (["--method", "gptq:int3"], "gptq has no variant int3; choose gptq alone"),
])
def test_quantizers_that_make_no_sense_are_refused(qwen, data, tmp_path, cache, monkeypatch, capsys, options, message):
    base = ("--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "out")
    assert message in refused(monkeypatch, capsys, *base, *options)


@pytest.mark.parametrize("quantizer", ["four-over-six", "awq", "gptq"])
def test_what_no_codes_can_be_found_for_is_one_line(qwen, data, tmp_path, cache, monkeypatch, capsys, quantizer):
    narrow, large = tmp_path / "narrow", tmp_path / "large"
    for folder in (narrow, large):
        shutil.copytree(qwen[0], folder)
    break_tensor(qwen[0], narrow, widened, lambda c: c.update(intermediate_size=200))
    break_tensor(qwen[0], large, lambda s: s["model.layers.0.input_layernorm.weight"].mul_(1e25))
    base = ("--data", data, *QUICK, "--quantizer", quantizer, "--out", tmp_path / "out", "--model")
    assert "down_proj has 200 input features, not divisible by nvfp4's block of 16" in refused(monkeypatch, capsys, *base, narrow)
    if quantizer != "four-over-six":               # which looks at no inputs
        assert "overflows torch.float32" in refused(monkeypatch, capsys, *base, large)
    assert not list(cache.iterdir())


def test_a_folder_of_codes_keeps_them(qwen, data, cache, capsys):
    """Whatever --quantizer says, by default, too."""
    packed = quantizers.quantized_folder(qwen[0], "four-over-six", [], None, "cpu")
    settings = train_gsm8k.arguments(["--model", packed, "--data", data, "--device", "cpu", "--max-new-tokens", "8"])
    model, *_ = train_gsm8k.load_all(settings, methods.find("qerl", settings))
    assert settings.quantizer == "gptq" and model.name_or_path == packed and len(list(cache.iterdir())) == 1
    assert "is in 4 bits already: its codes stay" in capsys.readouterr().out


@pytest.mark.skipif(run_folder.fcntl is None, reason="Windows locks no folder")
def test_codes_are_found_by_one_process_and_what_a_killed_one_left_is_removed(qwen, cache):
    made = []

    def make(path):
        made.append(path)
        time.sleep(0.3)
        shutil.copy(f"{qwen[0]}/model.safetensors", path)
    folder = packed_folder.cached_folder(qwen[0], "slow", ["key"], make)
    os.rename(folder, f"{folder}.123.tmp")                               # as if the process 123 had been killed
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: packed_folder.cached_folder(qwen[0], "slow", ["key"], make), range(3)))
    assert found == 3 * [folder] and os.listdir(cache) == [os.path.basename(folder)]
    assert len(made) == 2
    hub = "/hub/models--Qwen--Qwen2.5-3B-Instruct/snapshots/0123abcd"
    assert packed_folder.model_name(hub) == "Qwen2.5-3B-Instruct" and packed_folder.model_name("/models/mine/") == "mine"


def test_without_locks_the_first_folder_stays(qwen, cache, monkeypatch):
    monkeypatch.setattr(cache_folder, "fcntl", None)

    def make(path, another_is_faster):
        if another_is_faster:
            cache_folder.made_once("name", read, partial(make, another_is_faster=False))
        shutil.copy(f"{qwen[0]}/model.safetensors", path)
        (cache / path / "maker").write_text("slow" if another_is_faster else "fast")
    read = partial(qerl.open_tensors, device="cpu")
    folder = cache_folder.made_once("name", read, partial(make, another_is_faster=True))
    assert (cache / "name" / "maker").read_text() == "fast" and folder == str(cache / "name") and os.listdir(cache) == ["name"]

    def fail(path):
        raise qerl.UserError("no")
    with pytest.raises(qerl.UserError, match="no"):
        cache_folder.made_once("other", read, fail)
    assert os.listdir(cache) == ["name"]


@pytest.mark.skipif(run_folder.fcntl is None, reason="Windows locks no folder")
def test_who_waits_for_another_process_says_so(tmp_path, capsys):
    def enter():
        with cache_folder.one_at_a_time(str(tmp_path)) as alone:
            return alone
    with ThreadPoolExecutor(1) as pool, cache_folder.one_at_a_time(str(tmp_path)):
        second = pool.submit(enter)
        deadline = time.monotonic() + 60
        while not (said := capsys.readouterr().out) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting for another process" in said and not second.done()
    assert second.result()


def test_a_run_does_not_go_on_with_other_codes(qwen, data, tmp_path, cache, monkeypatch, capsys):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--quantizer", "gptq", "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    run_main(monkeypatch, *options, "--resume", "--eval-only")
    weights, = cache.glob("*/model*.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("weight_packed"))
    tensors[name][0, 0] ^= 1
    save_file(tensors, weights, {"format": "pt"})
    for more in ((), ("--eval-only",)):
        assert "was begun with other weights" in refused(monkeypatch, capsys, *options, "--resume", *more)


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
    assert ByteText().decode(sequences[0].prompt + sequences[0].answer) == "ab\n<think>c</think><answer>5</answer>"
    bare, = worked.worked_sequences([{"question": "ab", "answer": "\\frac12"}], ByteText(), 10)         # MATH's: without steps
    assert ByteText().decode(bare.prompt + bare.answer) == "ab\n<think></think><answer>\\frac12</answer>"


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
        ours, theirs = (m(tokens, labels=labels, output_hidden_states=True) for m in (student, teacher))
        squares.append((ours.hidden_states[-1] - theirs.hidden_states[-1]).square().flatten())
        losses += [ours.loss] * len(s.answer)
    assert mse.item() == pytest.approx(torch.cat(squares).mean().item(), rel=1e-4)
    assert cross_entropy.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert loss.item() == pytest.approx((mse + cross_entropy).item() / 2)


def test_layerwise_svd_is_the_best_of_its_rank(qwen, monkeypatch):
    """Eckart and Young: what is left of each layer's error are the singular values beyond the rank."""
    monkeypatch.setitem(qerl.FORMATS, "low", lora_starts.low_bit_format(2))
    teacher = qerl.load_model(qwen[0], "bf16")
    model = qerl.load_model(qwen[0], "low", 8, lora_alpha=16)
    lora_starts.svd_start(model, teacher)
    for layer, exact in zip(model.quantized_layers(), teacher.quantized_layers()):
        A = layer.lora_A.split(layer.rank)
        for i, rows in enumerate((exact.weight.dequantize(torch.float32) - layer.weight.dequantize(torch.float32)).split(layer.sizes)):
            left = rows - 2 * layer.lora_B.split(layer.sizes)[i] @ A[i]
            beyond = np.linalg.svd(rows.numpy(), compute_uv=False)[8:]
            assert left.norm().item() == pytest.approx(np.linalg.norm(beyond), rel=1e-3)


@pytest.mark.parametrize("bits,values", [(2, {-3, -1, 1, 3}), (3, {-7, -5, -3, -1, 1, 3, 5, 7})])
def test_low_bit_format_takes_the_nearest_of_few_values(bits, values):
    format = lora_starts.low_bit_format(bits)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    decoded = format.dequantize(*format.quantize(weight), torch.float32)
    for block, found in zip(weight.view(-1, 16), decoded.view(-1, 16)):
        table = torch.tensor(sorted(values)) * block.abs().max() / max(values)
        torch.testing.assert_close(found, table[(block[:, None] - table).abs().argmin(1)])


def test_rilq_keeps_the_best_adapter_and_stops(qwen, data):
    questions = read_questions(data, "train*.jsonl")
    sequences = rilq.texts_of(questions, train_gsm8k.ChatText(qwen[0], ""), 10)
    assert len(sequences) == 10 and all(len(s.prompt) + len(s.answer) <= rilq.LONGEST for s in sequences)
    long = [{**question, "question": question["question"] * 100} for question in questions]
    method = rilq.Neighbour(train_gsm8k.Settings(model=qwen[0]), "")
    with pytest.raises(qerl.UserError, match="--method rilq: none of the first .* is shorter than 512 tokens; give --data"):
        method.prepare(None, qwen[0], long, train_gsm8k.ChatText(qwen[0], ""))
    teacher = qerl.load_model(qwen[0], "bf16")
    torch.manual_seed(0)
    model = qerl.load_model(qwen[0], lora_rank=4)
    start = lora_starts.adapter(model)
    losses = rilq.compensate(model, teacher, sequences, lr=10.0)   # it is NaN at once
    assert len(losses) == 1 + rilq.PATIENCE and not any(loss <= losses[0] for loss in losses[1:])
    assert all(torch.equal(start[name], p) for name, p in lora_starts.adapter(model).items())
    losses = rilq.compensate(model, teacher, sequences, lr=1e-3, steps=16)
    assert losses[-1] < losses[0] and len(losses) == 3
    held = worked.rows_of(sequences[:2], "cpu")
    with torch.no_grad():
        loss, _, _ = rilq.rilq_loss(model, teacher.hidden(held.tokens), held)
    assert loss.item() == pytest.approx(min(losses))


def stopped_and_resumed(monkeypatch, options, tmp_path):
    """Metrics of a run, which has to be the same bit for bit if it is stopped in its second step and resumed."""
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    describe, calls = train_gsm8k.describe, []

    def stop(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return describe(*args)
    with monkeypatch.context() as patch:
        patch.setattr(train_gsm8k, "describe", stop)
        with pytest.raises(SystemExit):
            run_main(monkeypatch, *options, "--out", tmp_path / "stopped")
    run_main(monkeypatch, *options, "--out", tmp_path / "stopped", "--resume")
    whole, resumed = (without_times(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped"))
    assert len(whole) == 3 and whole == resumed
    assert files_below(tmp_path / "whole" / "adapter") == files_below(tmp_path / "stopped" / "adapter")
    return whole


def test_rilq_starts_lora_and_is_the_reference(qwen, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rilq, "TEXTS", 10)
    monkeypatch.setattr(rilq.compensate, "__defaults__", (1e-2, 8, 0))
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))     # differs within a group
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1, "--method", "rilq", "--beta", 0.1)
    metrics = stopped_and_resumed(monkeypatch, options, tmp_path)
    before, after = re.search(r"RILQ: validation loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out).groups()
    assert float(after) < float(before)
    assert metrics[0]["kl"] < 1e-9 < metrics[2]["kl"]              # the reference is the policy of the first step
    adapter = load_file(tmp_path / "whole" / "adapter" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0.01 for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("options,message", [
    (["--weights", "bf16"], "--method rilq: there is no error of quantisation to undo"),
    (["--train-norms"], "leave --train-norms out"),
    (["--model", None], "is in 4 bits already"),
    (["--dtype", "float16"], "its gradients are too small for float16; use --dtype float32"),
])
def test_rilq_refuses_what_makes_no_sense(qwen, data, tmp_path, cache, monkeypatch, capsys, options, message):
    if None in options:
        options = ["--model", quantizers.quantized_folder(qwen[0], "four-over-six", [], None, "cpu")]
    base = ("--model", qwen[0], "--data", data, *QUICK, "--method", "rilq", "--out", tmp_path / "out")
    assert message in refused(monkeypatch, capsys, *base, *options)


@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_qat_starts_at_the_quantised_model_and_ends_in_its_bytes(qwen, data, tmp_path, cache, quantizer):
    folder = qwen[0]
    text = train_gsm8k.ChatText(folder, "")
    questions = read_questions(data, "train*.jsonl")[:16]
    start = folder if quantizer == "rtn" else quantizers.quantized_folder(folder, quantizer, questions, text, "cpu")
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
    packed_folder.write_packed_folder(folder, trained_codes.packed_tensors(student), tmp_path / "trained")
    trained = qerl.load_model(str(tmp_path / "trained"))
    with torch.no_grad():
        assert relative(trained(tokens), student(tokens)) < 1e-5 < 1e-3 < relative(trained(tokens), ordinary(tokens))
    for layer, first in zip(trained.quantized_layers(), ordinary.quantized_layers()):
        assert not torch.equal(layer.weight.parts[0], first.weight.parts[0])
        for scales in (1, 2):
            assert torch.equal(layer.weight.parts[scales].float(), first.weight.parts[scales].float())


def test_straight_through_gradient_is_that_of_the_rounded_weight(qwen):
    """A cold start's loss and gradients, of transformers with the library's decoded weights as parameters."""
    folder, theirs = qwen
    student = qat.fake_quantised(folder)
    sequences = [worked.Worked([1, 2, 3], [4, 5]), worked.Worked([6], [7, 8, 9, 10, 11])]
    loss = qat.answer_loss(student, None, worked.rows_of(sequences, "cpu"))
    loss.backward()
    theirs = copy.deepcopy(theirs).requires_grad_(True)
    for name, p in theirs.named_parameters():
        if name.endswith("_proj.weight"):
            p.data = packed_values(qerl.quantize_nvfp4(p.data))
    expected = sum(theirs(torch.tensor([s.prompt + s.answer]), labels=torch.tensor([[-100] * len(s.prompt) + s.answer])).loss
                   * len(s.answer) for s in sequences) / 7
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)                       # the library decodes in 16 bit
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
        p, q = (torch.distributions.Categorical(logits=m(torch.tensor([s.prompt + s.answer]))[0, len(s.prompt) - 1:-1])
                for m in (teacher, student))
        divergences.append(torch.distributions.kl_divergence(p, q))
    torch.testing.assert_close(loss, torch.cat(divergences).mean())


def test_cold_start_warms_up_and_falls_as_a_cosine(qwen, monkeypatch):
    seen = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: seen.append(self.param_groups[0]["lr"]) or step(self, *a))
    qat.cold_start(qat.fake_quantised(qwen[0]), None, [worked.Worked([1], [2, 3])], lr=1.0, steps=40, batch=1)
    expected = [0.5, 0.75] + [(1 + math.cos(math.pi * i / 38)) / 2 for i in range(38)]
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("variant", qat.Neighbour.variants)
def test_qat_is_the_frozen_start_of_a_run(qwen, data, tmp_path, cache, monkeypatch, capsys, variant):
    monkeypatch.setattr(qat, "RECIPE", dict(lr=3e-4, steps=4, batch=4))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1, "--method", f"qat:{variant}")
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
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--method", "qat", "--quantizer", "gptq",
             "--out", tmp_path / "run")
    stored = {("qat" if "-qat-" in path.name else "gptq"): qerl.load_model(str(path)) for path in cache.iterdir()}
    for layer, start in zip(stored["qat"].quantized_layers(), stored["gptq"].quantized_layers()):
        assert torch.equal(layer.weight.dequantize(torch.float32), start.weight.dequantize(torch.float32))


@pytest.mark.parametrize("options,message", [
    (["--weights", "mxfp4"], "--method qat: trains weights for NVFP4, not for mxfp4"),
    (["--weights", "bf16", "--lora-rank", 0], "not for bf16; use --weights nvfp4"),
    (["--method", "qat:rl"], "choose qat:distil, qat:sft"),
    (["--model", None], "is in 4 bits already"),
])
def test_qat_refuses_what_makes_no_sense(qwen, data, tmp_path, cache, monkeypatch, capsys, options, message):
    if None in options:
        options = ["--model", quantizers.quantized_folder(qwen[0], "four-over-six", [], None, "cpu")]
    base = ("--model", qwen[0], "--data", data, *QUICK, "--method", "qat", "--out", tmp_path / "out")
    assert message in refused(monkeypatch, capsys, *base, *options)


# ------------------------------------------------------------------------------------------------------ methods: jetrl

def library_block_scales(x, square):
    """compressed-tensors' FP8_BLOCK: its arguments and scales of a matrix of whole blocks, 1 x 128 or 128 x 128."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    args = scheme.weights if square else scheme.input_activations
    height = 128 if square else 1
    blocks = x.view(x.shape[0] // height, height, -1, 128)
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    return args, scale, zero


def library_rounded(x, square):
    """x, padded to whole blocks and cut again, as compressed-tensors' FP8_BLOCK holds it, float64."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    rows, columns = x.shape
    padded = F.pad(x.float(), (0, -columns % 128, 0, -rows % 128))
    args, scale, zero = library_block_scales(padded, square)
    return fake_quantize(padded, scale, zero, args)[:rows, :columns].double()


UNEVEN = lambda rows, columns: torch.randn(rows, columns) * torch.randn(1, columns).mul(2).exp()


@pytest.mark.parametrize("square", [False, True])
def test_fp8_blocks_equal_compressed_tensors(square):
    """Scales and bytes, of blocks of very different size and one that is empty."""
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    torch.manual_seed(0)
    weight = UNEVEN(256, 384)
    weight[:128, 128:256] = 0
    ours = fp8_blocks.quantize(weight, fp8_blocks.SQUARE if square else fp8_blocks.ROW)
    args, scale, _ = library_block_scales(weight, square)
    full = ours.scale > 1e-29
    assert full.sum() == full.numel() - (1 if square else 128)
    torch.testing.assert_close(ours.scale[full], scale[full], rtol=1e-6, atol=0)
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    scheme.weights = args
    stored = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": ours.scale}, scheme)["weight"]
    assert torch.equal(ours.codes.view(torch.uint8), stored.view(torch.uint8))
    back = fp8_blocks.transposed(ours).dequantize() if square else ours.dequantize().T
    assert torch.equal(back, ours.dequantize().T)


@pytest.mark.parametrize("n,k,m", [(3, 128, 128), (130, 384, 256), (37, 200, 72)])
def test_fp8_products_equal_float64_of_the_librarys_operands(n, k, m):
    """Y, dX and dW; X is kept in FP8 and rounded once more for dW. The last shape has blocks that are not whole."""
    torch.manual_seed(0)
    x, weight, grad = UNEVEN(n, k), UNEVEN(m, k), UNEVEN(n, m) * 1e-6
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = jetrl.TrainedProduct.apply(*leaves, fp8_blocks.BLOCKS)
    y.backward(grad)
    X, W = library_rounded(x, False), library_rounded(weight, True)
    columns_of_x = library_rounded(X.float().T.contiguous(), False).T
    columns_of_grad = library_rounded(grad.T.contiguous(), False).T
    for ours, exact, plain in ((y, X @ W.T, x @ weight.T), (leaves[0].grad, library_rounded(grad, False) @ W, grad @ weight),
                               (leaves[1].grad, columns_of_grad.T @ columns_of_x, grad.T @ x)):
        assert relative(ours.double(), exact) < 2e-5 and 0.005 < relative(ours, plain) < 0.1


def test_between_fp8_layers_the_dtype_stays(qwen):
    """Activations and their gradients are in bfloat16 outside of the products, masters and their gradients in float32."""
    x, master = torch.randn(5, 256, dtype=torch.bfloat16, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    y = jetrl.TrainedProduct.apply(x, master, fp8_blocks.BLOCKS)
    y.sum().backward()                                             # its gradient is expanded, with strides of 0
    assert (y.dtype, x.grad.dtype, master.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    model = with_lora(qwen[0], dtype=torch.bfloat16)
    fp8_neighbour("unified", model)
    assert all(layer.coded.codes.codes.element_size() == 1 for layer in model.quantized_layers())
    logits = model(torch.arange(9)[None])
    logits.float().square().mean().backward()
    assert logits.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 and p.grad.any() for p in qerl.trainable(model).values())


def test_fp8_of_whole_rows_equals_flashrls_product():
    """Activations and gradients in whole rows, the weight as a whole, also transposed."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(20, 200), torch.randn(72, 200), torch.randn(20, 72)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = jetrl.TrainedProduct.apply(*leaves, fp8_blocks.ROWS)
    y.backward(grad)

    def rounded(a):
        codes, scale = eight_bit.quantize_rows(a, "fp8")
        return codes.float() * scale
    whole = rounded(weight.view(1, -1)).view_as(weight)
    torch.testing.assert_close(y, rounded(x) @ whole.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[0].grad, rounded(grad) @ whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[1].grad, rounded(grad.T) @ rounded(rounded(x).T).T, rtol=1e-5, atol=1e-5)


def test_fp8_codes_know_whether_a_row_has_one_scale():
    """Of narrow matrices blocks are rows, too, but not those of several rows."""
    x = torch.randn(300, 100)
    blocks = {fp8_blocks.ROW: True, fp8_blocks.SQUARE: False, fp8_blocks.WHOLE_ROW: True, fp8_blocks.WHOLE: True}
    assert {block: fp8_blocks.quantize(x, block).whole_rows for block in blocks} == blocks
    assert not fp8_blocks.quantize(x.T, fp8_blocks.ROW).whole_rows


def cublas_twin(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """torch.nn.functional.scaled_mm of FP8 blocks as PyTorch's source states their layouts, on a CPU."""
    (M, K), N = a.shape, b.shape[1]
    kind, blocks = F.ScalingType, K // 128
    assert a.is_contiguous() and b.stride() == (1, K) and K % 128 == N % 16 == M % 16 == 0 and recipe_a == kind.BlockWise1x128
    assert scale_a.shape == (M, blocks) and scale_a.stride(0) == 1 and (scale_a.stride(1) == M or blocks == 1)
    y = torch.zeros(M, N, dtype=torch.float64)
    for k in range(blocks):
        part = a[:, 128 * k:128 * k + 128].double() @ b[128 * k:128 * k + 128].double()
        if recipe_b == kind.BlockWise1x128:
            assert scale_b.shape == (N, blocks) and scale_b.stride(0) == 1 and (scale_b.stride(1) == N or blocks == 1)
            of_columns = scale_b[:, k]
        else:
            padded = -(-blocks // 4) * 4
            assert recipe_b == kind.BlockWise128x128 and scale_b.shape == (padded, N // 128)
            assert scale_b.stride(0) == 1 and (scale_b.stride(1) == padded or N == 128)
            of_columns = scale_b[k].repeat_interleave(128)
        y += part * scale_a[:, k, None] * of_columns
    return y.to(output_dtype)


@pytest.mark.parametrize("n,k,m", [(5, 384, 256), (200, 640, 128), (16, 128, 384), (40, 512, 1024)])
def test_cublas_is_given_blocks_as_it_wants_them(monkeypatch, n, k, m):
    """All three products by the layouts that PyTorch's source states, and by the checks of its own shape inference."""
    torch.manual_seed(0)
    x, weight, grad = UNEVEN(n, k), UNEVEN(m, k), UNEVEN(n, m)
    w, rows_of_grad = fp8_blocks.quantize(weight, fp8_blocks.SQUARE), fp8_blocks.quantize(grad.T, fp8_blocks.ROW)
    scaled_mm = F.scaled_mm
    monkeypatch.setattr(F, "scaled_mm", cublas_twin)
    for a, b in ((fp8_blocks.quantize(x, fp8_blocks.ROW), w), (fp8_blocks.quantize(grad, fp8_blocks.ROW), fp8_blocks.transposed(w)),
                 (rows_of_grad, fp8_blocks.quantize(x.T, fp8_blocks.ROW))):
        shape = a.shape[0], b.shape[0]
        y = fp8_blocks.multiply_blocks(a, b, torch.float32)[:shape[0], :shape[1]]
        torch.testing.assert_close(y, fp8_blocks.multiply(a, b, torch.float32), rtol=1e-4, atol=1e-4 * y.abs().max().item())
        monkeypatch.setattr(F, "scaled_mm", scaled_mm)
        absent = [c._replace(codes=c.codes.to("meta"), scale=c.scale.to("meta")) for c in (a, b)]
        assert fp8_blocks.multiply_blocks(*absent, torch.bfloat16).dtype == torch.bfloat16
        monkeypatch.setattr(F, "scaled_mm", cublas_twin)


def test_a_gpus_products_are_tried(monkeypatch, capsys):
    """Blocks, if they are refused whole rows, and if the products are wrong an error of one line."""
    cpu, gpu_here = torch.device("cpu"), torch.device("cuda")
    for recipe in (fp8_blocks.BLOCKS, fp8_blocks.ROWS):
        assert fp8_blocks.products_are_right(recipe, cpu, torch.float32) and fp8_blocks.products_are_right(recipe, cpu, torch.bfloat16)
    either = [fp8_blocks.BLOCKS, fp8_blocks.ROWS]
    assert [fp8_blocks.choose_recipe(cpu, torch.float32, recipes) for recipes in (either, either[::-1])] == either
    right = fp8_blocks.products_are_right
    monkeypatch.setattr(fp8_blocks, "products_are_right", lambda recipe, device, dtype: right(recipe, cpu, dtype))
    assert [fp8_blocks.choose_recipe(gpu_here, torch.float32, recipes) for recipes in (either, either[::-1])] == either
    multiply = fp8_blocks.multiply

    def refuse_blocks(x, *rest):
        if not x.whole_rows:
            raise NotImplementedError("scaling only supported for SM90\nat line 3")
        return multiply(x, *rest)
    monkeypatch.setattr(fp8_blocks, "multiply", refuse_blocks)
    capsys.readouterr()
    assert fp8_blocks.choose_recipe(gpu_here, torch.float32, either) == fp8_blocks.ROWS
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "only supported for SM90)" in said[0] and "whole rows of activations have a scale" in said[1]
    monkeypatch.setattr(fp8_blocks, "multiply", lambda x, *rest: multiply(x._replace(scale=x.scale.flip(0)), *rest))
    with pytest.raises(qerl.UserError, match="multiplies no FP8"):
        fp8_blocks.choose_recipe(gpu_here, torch.float32, either)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,columns", [(3, 128), (40, 300), (150, 640)])
def test_kernel_fp8_blocks(monkeypatch, dtype, rows, columns):
    """Scales and bytes as the twin's, of a matrix and its transpose. The interpreter would round wrongly; there PyTorch rounds."""
    torch.manual_seed(0)
    x = UNEVEN(rows, columns).to(dtype).to(KERNEL_DEVICE)
    x[0] = 0
    for matrix, block in itertools.product((x, x.T), (fp8_blocks.ROW, fp8_blocks.SQUARE, fp8_blocks.WHOLE_ROW)):
        with monkeypatch.context() as patch:
            patch.setattr(fp4_kernels, "use_triton", lambda x: False)
            twin = fp8_blocks.quantize(matrix.cpu(), block)                               # a GPU's PyTorch divides by 448 less exactly
        fused = fp8_blocks.quantize(matrix, block)
        assert fused.shape == twin.shape and fused.codes.shape == twin.codes.shape and torch.equal(fused.scale.cpu(), twin.scale)
        if not CUDA:
            codes = fp8_blocks.quantize_fused(matrix, *twin.codes.shape, block, dtype=torch.float32).codes
            fused = fused._replace(codes=codes.to(torch.float8_e4m3fn))
        assert torch.equal(fused.codes.view(torch.uint8).cpu(), twin.codes.view(torch.uint8))
    whole = fp8_blocks.quantize(x, fp8_blocks.SQUARE).codes
    assert torch.equal(fp8_blocks.transpose_bytes(whole).view(torch.uint8), whole.view(torch.uint8).T)


@pytest.mark.parametrize("target", [89, 90])
def test_fp8_kernels_compile_for(target):
    """Compiled, not run: the FP8 conversion is the hardware's, loads and stores are of 16 bytes, nothing is spilled."""
    if fp4_kernels.triton is None:
        pytest.skip("needs Triton")
    try:
        cross_compile.ptxas_path(target)
    except RuntimeError as e:
        pytest.skip(f"needs NVIDIA's assembler: {e}")
    code = f"""
import json, torch
from harness import cross_compile
from harness import fp8_blocks
cross_compile.pretend({target})
found, asm = cross_compile.facts, []
def facts(kernel, *rest):
    ptx = kernel.asm["ptx"]
    return found(kernel, *rest) | {{word: word in ptx for word in ("satfinite.e4m3x2", "ld.global.v4", "st.global.v4")}}
cross_compile.facts = facts
def launch():
    x = torch.empty(300, 3584, dtype=torch.bfloat16)
    for matrix, block in ((x, fp8_blocks.ROW), (x.T, fp8_blocks.ROW), (x, fp8_blocks.SQUARE), (x, fp8_blocks.WHOLE_ROW)):
        fp8_blocks.quantize(matrix, block)
    fp8_blocks.transpose_bytes(torch.empty(256, 3584, dtype=torch.float8_e4m3fn))
print(json.dumps(cross_compile.compile_for({target}, launch)))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = json.loads(result.stdout.splitlines()[-1])
    assert [kernel["kernel"] for kernel in kernels] == ["quantize_kernel"] * 3 + ["quantize_rows_kernel", "transpose_kernel"]
    for kernel in kernels:
        assert "error" not in kernel and kernel["spilled"] == 0 and kernel["shared"] <= 2 ** 15, kernel
        assert kernel["ld.global.v4"] and kernel["st.global.v4"], kernel
        assert kernel["satfinite.e4m3x2"] == (kernel["kernel"] != "transpose_kernel"), kernel


def all_trained(folder):
    """A model whose weights, biases and norms are all trained."""
    model = qerl.load_model(folder, "bf16")
    train_all_weights(model)
    return model


def fp8_neighbour(variant, model):
    method = jetrl.Neighbour(types.SimpleNamespace(micro_tokens=16384), variant)
    method.prepare(model, None, None, None)
    return method


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_fp8_gradient_is_near_the_exact_one(qwen, kind):
    """Of the whole model, against PyTorch's exact backward of the same rounded operands; LoRA's products stay in 32 bits."""
    model = all_trained(qwen[0]) if kind == "all weights" else with_lora(qwen[0])
    fp8_neighbour("unified", model)
    tokens = torch.tensor([[5, 9, 2, 77, 31, 8, 100, 3]] * 2)

    def gradients():
        model.zero_grad()
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return {name: p.grad.clone() for name, p in qerl.trainable(model).items()}

    def rounded(x, square):
        return x + (library_rounded(x.detach(), square).float() - x.detach())

    def forward(layer, x):
        rows = x.flatten(0, -2)
        if kind == "all weights":
            y = F.linear(rounded(rows, False), rounded(layer.master, True))
        else:
            y = F.linear(rounded(rows, False), layer.coded.dequantize(torch.float32))
            A, B = layer.lora_A.split(layer.rank), layer.lora_B.split(layer.sizes)
            y = y + layer.alpha / layer.rank * torch.cat([rows @ a.T @ b.T for a, b in zip(A, B)], -1)
        return (y if layer.bias is None else y + layer.bias).unflatten(0, x.shape[:-1])

    ours = gradients()
    for layer in model.quantized_layers():
        layer.forward = types.MethodType(forward, layer)
    exact = gradients()
    for layer in model.quantized_layers():
        del layer.forward
    with fp8_layers.fp8(model, False):
        plain = gradients()
    assert ours.keys() == exact.keys() and all(layer.fp8 for layer in model.quantized_layers())
    joined = [torch.cat([g.flatten() for g in gradient.values()]) for gradient in (ours, exact, plain)]
    assert 1e-3 < relative(joined[0], joined[1]) < 0.06 < relative(joined[0], joined[2]) < 0.3   # last: of the unrounded policy
    for name in ours:
        assert relative(ours[name], exact[name]) < 0.1, name


def test_fp8_recomputed_in_backward_is_the_same(qwen):
    """As on a GPU, with whose memory it is economical."""
    gradients = []
    for recompute in (False, True):
        model = with_lora(qwen[0])
        if recompute:
            model.recompute_in_backward()
        fp8_neighbour("unified", model)
        model(torch.arange(12)[None]).square().mean().backward()
        gradients.append([p.grad for p in qerl.trainable(model).values()])
    assert all(torch.equal(*pair) for pair in zip(*gradients))


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_one_fp8_flow_is_one_policy(qwen, kind):
    """Rollout and training agree; trained in 32 bits they do not, nor under FlashRL's FP8 rollout."""
    def model():
        return all_trained(qwen[0]) if kind == "all weights" else with_lora(qwen[0], weights="bf16")

    def mismatch_of(method, model):
        text = types.SimpleNamespace(eos=range(20))
        rollout, batch = demonstration.sample_step(method, model, text, PROMPTS, seed=1)
        return describe_mismatch(batch.old_logprobs, rollout.logprobs, rollout.mask)["mismatch_kl"]
    one = model()
    assert mismatch_of(fp8_neighbour("unified", one), one) < 1e-6
    other = model()
    assert mismatch_of(fp8_neighbour("rollout", other), other) > 1e-5
    flash = flashrl.Neighbour(types.SimpleNamespace(micro_tokens=16384), "fp8")
    assert mismatch_of(flash, model()) > 1e-5


@pytest.mark.parametrize("options", [("jetrl", "--lora-rank", 0, "--beta", 0), ("jetrl:training", "--beta", 0.1), ("jetrl:rollout",)])
def test_jetrl_trains_and_resumes(qwen, data, tmp_path, monkeypatch, options):
    """Which of a step's passes are in FP8, what is logged, and the same run bit for bit after a stop."""
    variant = options[0].partition(":")[2] or "unified"
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))     # differs within a group
    calls, log_probs = [], qerl.token_logprobs
    decoding, generate = [], qerl.generate

    def spy_training(model, *args, **kwargs):
        calls.append((torch.is_grad_enabled(), model.blocks[0].mlp.down.fp8))
        return log_probs(model, *args, **kwargs)

    def spy_decoding(model, *args, **kwargs):
        rollout = generate(model, *args, **kwargs)
        decoding.append(isinstance(model.blocks[0].mlp.down.weight, fp8_layers.CodedWeight))
        return rollout
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--eval-questions", 1, "--skip-eval-before", "--save-every", 1,
               "--sigma-start", 0, "--sigma-end", 0, "--method", *options)
    with monkeypatch.context() as patch:
        patch.setattr(qerl, "token_logprobs", spy_training)
        patch.setattr(qerl, "generate", spy_decoding)
        metrics = stopped_and_resumed(patch, options, tmp_path)
    updates = {in_fp8 for with_gradient, in_fp8 in calls if with_gradient}
    assert updates == {variant != "rollout"} and len({in_fp8 for _, in_fp8 in calls}) == 2       # the second: fp8_error's
    whole_run = decoding[:5]                                                                      # 3 rollouts, 2 evaluations
    assert whole_run == {"unified": [True] * 5, "training": [False] * 5, "rollout": [True] * 3 + [False] * 2}[variant]
    for m in metrics:
        assert (m["mismatch_kl"] < 1e-6) == (variant == "unified") and m["fp8_largest_error"] >= m["fp8_error"] > 1e-5
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())["settings"]
    assert summary["weights"] == ("nvfp4" if variant == "training" else "bf16")


@pytest.mark.parametrize("options,message", [
    (["jetrl", "--weights", "nvfp4"], "--method jetrl:unified: the rollout reads 8 bits"),
    (["jetrl:rollout", "--weights", "nf4"], "use --weights bf16 or --method jetrl:training"),
    (["jetrl:training", "--weights", "bf16", "--lora-rank", 0, "--beta", 0], "use --method jetrl with --lora-rank 0"),
    (["jetrl:fp8"], "jetrl has no variant fp8"),
])
def test_jetrl_refuses_what_makes_no_sense(qwen, data, tmp_path, monkeypatch, capsys, options, message):
    base = ("--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "out", "--method")
    assert message in refused(monkeypatch, capsys, *base, *options)


def test_jetrl_wants_fp8_products(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    have_capability(monkeypatch, 8, 0)
    with pytest.raises(qerl.UserError, match="this GPU has no FP8 products"):
        neighbour("jetrl", device="cuda")
    have_capability(monkeypatch, 9, 0)
    assert neighbour("jetrl:training", device="cuda").variant == "training"


def test_bench_step_trains_in_fp8(monkeypatch, capsys):
    """Rows of --weights nvfp4-fp8 beside nvfp4's: the same rollout, other log-probabilities."""
    settings = bench.StepSettings(prompt_tokens=8, max_new_tokens=12)
    rows = [row for weights in ("nvfp4", "nvfp4-fp8") for row in bench.step_rows("tiny", weights, [(1, 2)], settings, "cpu")]
    assert "fp8_error" not in rows[0] and rows[1]["fp8_error"] > 0 and rows[0]["length"] == rows[1]["length"]
    bench.print_steps(rows, ["tiny"], [(1, 2)], ["nvfp4", "nvfp4-fp8"])
    assert "| NVFP4, FP8, s |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench.py", "rollout", "--weights", "nvfp4-fp8"])
    with pytest.raises(qerl.UserError, match="use --weights nvfp4"):
        bench.arguments()


def fp8_error_on_a_cpu(folder, variant, batch, **options):
    """What --method jetrl logs of the same completions where PyTorch multiplies."""
    model = with_lora(folder, **options)
    method = fp8_neighbour(variant, model)
    tokens, length, mask = batch.tokens.cpu(), batch.length.cpu(), batch.mask.cpu()
    here = Batch(batch.prompts, tokens, length, mask.float(), torch.ones(len(length)), mask)
    here.old_logprobs = method.old_logprobs(model, here)
    return method.before_updates(here)["fp8_error"]


@gpu
def test_gpu_fp8_blocks_equal_the_cpus(tmp_path):
    """The tensor cores' three products, of one row and of many; a rollout recorded as a CUDA graph; training on NVFP4."""
    if fp4_kernels.capability(torch.device("cuda")) < (8, 9):
        pytest.skip("needs FP8 products")
    torch.manual_seed(0)
    either = [fp8_blocks.BLOCKS, fp8_blocks.ROWS]
    chosen = [fp8_blocks.choose_recipe(torch.device("cuda"), torch.bfloat16, recipes) for recipes in (either, either[::-1])]
    assert chosen == either or not fp4_kernels.is_hopper(torch.device("cuda"))
    for recipe, n in itertools.product(chosen, (1, 17, 300)):
        x, weight, grad = UNEVEN(n, 896).bfloat16(), UNEVEN(384, 896), UNEVEN(n, 384).bfloat16()
        results = []
        for device in ("cpu", "cuda"):
            leaves = [t.detach().to(device).requires_grad_() for t in (x, weight)]
            y = jetrl.TrainedProduct.apply(*leaves, recipe)
            y.backward(grad.to(device))
            results.append([t.cpu().float() for t in (y, leaves[0].grad, leaves[1].grad)])
        assert all(relative(ours, exact) < 5e-3 for exact, ours in zip(*results))
    text = types.SimpleNamespace(eos=range(20))
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    folder = make_folder(tmp_path, "wide")[0]
    for variant, options in (("unified", dict(weights="bf16")), ("training", dict(weights="nvfp4"))):
        model = with_lora(folder, device="cuda", **options)
        model.recompute_in_backward()
        method = fp8_neighbour(variant, model)
        rollout = method.generate(model, prompts, 40, 2, eos=text.eos, slots=70)
        repeated = [p for p in prompts for _ in range(2)]
        batch = Batch(repeated, rollout.tokens, rollout.length, rollout.logprobs, torch.ones(120, device="cuda"), rollout.mask)
        batch.old_logprobs = method.old_logprobs(model, batch)
        assert (batch.old_logprobs - rollout.logprobs).abs()[rollout.mask].mean() < (0.05 if variant == "unified" else 0.15)
        assert method.before_updates(batch)["fp8_error"] == pytest.approx(fp8_error_on_a_cpu(folder, variant, batch, **options), rel=0.2)
        logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
        logprobs.sum().backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in qerl.trainable(model).values())


# ------------------------------------------------------------------- odd answers, checkpoints and logs; the methods' parts

ODD_ANSWERS = {
    **dict.fromkeys(["{-}5", "{-} 5", "\\text{-}5", "$-$ {5}"], -5),
    **dict.fromkeys(["5i", "5 i", "5i.", "{5}i", "(5)i", "5\\,i", "5\\mathrm{i}"], None),
    **dict.fromkeys(["not 5", "NOT 5", "x is not 5", "isn't 5", "\\text{not }5", "not equal to 5", "\\neg 5", "x \\not= 5"], None),
    **dict.fromkeys(["5 i think", "5, i.e. five", "5 in", "x >= 5", "5 inches", "notes: 5", "not 3, it is 5", "10 - (5) = 5"], 5),
}


@pytest.mark.parametrize("text,number", ODD_ANSWERS.items())
def test_a_number_that_is_imaginary_denied_or_negative_is_not_another(text, number):
    for answer in (f"<answer>{text}</answer>", f"so \\boxed{{{text}}}"):
        assert answered_number(answer) == number
    if number is None:                         # nor does evaluation, which takes a text's last number, take it or one before it
        assert stated_number(f"7, {text}") is None


def change(**values):
    """An edit of a checkpoint's tensors and metadata: other values in its state."""
    def edit(tensors, metadata):
        metadata["state"] = json.dumps(json.loads(metadata["state"]) | values)
    return edit


def exchange(start, end, make):
    """An edit: the first tensor with such a name becomes what make gives for it."""
    def edit(tensors, metadata):
        name = min(n for n in tensors if n.startswith(start) and n.endswith(end))
        tensors[name] = make(tensors[name])
    return edit


@pytest.mark.parametrize("edit,message", [
    (change(step="2"), "(step cannot be '2')"),
    (change(step=True), "(step cannot be True)"),
    (change(drawn=-1), "(drawn cannot be -1)"),
    (change(seconds=math.nan), "(seconds cannot be nan)"),
    (change(slots="many"), "(slots cannot be 'many')"),
    (change(micro_tokens=0), "(micro_tokens cannot be 0)"),
    (change(data=7), "(data cannot be 7)"),
    (change(accuracy_before="half"), "(accuracy_before cannot be 'half')"),
    (change(scaler=[]), "(scaler cannot be [])"),
    (change(scaler={"scale": 1}), "checkpoint's scaler is {'scale': 1}"),
    (change(method={"sigma": 1}), "checkpoint's method is {'sigma': 1}"),
    (exchange("rng.0", "", lambda t: t[:9]), "tensor rng.0 is no state of a random number generator"),
    (exchange("rng.1", "", lambda t: t.float()), "tensor rng.1 is no state of a random number generator"),
    (exchange("rng.1", "", torch.zeros_like), "tensor rng.1 is no state of a random number generator"),
    (exchange("optimizer.", ".exp_avg", lambda t: t[:1]), "exp_avg is no optimiser's"),
    (exchange("optimizer.", ".exp_avg_sq", lambda t: t.double()), "exp_avg_sq is no optimiser's"),
    (exchange("optimizer.", ".exp_avg_sq", lambda t: t - 1), "exp_avg_sq is no optimiser's"),
    (exchange("optimizer.", ".step", lambda t: -t), "step is no optimiser's"),
    (exchange("model.", "", lambda t: t.to(torch.int8)), "not this model's"),
])
def test_a_checkpoint_that_was_signed_again_is_one_line(finished, tmp_path, monkeypatch, capsys, edit, message):
    test_a_checkpoint_that_lacks_something_is_named(finished, tmp_path, monkeypatch, capsys, edit, message)


def test_a_checkpoint_of_a_steered_noise_is_held_to_its_kinds():
    fresh = methods.find("noise_control:divergence", train_gsm8k.Settings(device="cpu")).state
    checkpoint.require_same_kind("method", {"sigma": 0.02, "divergence": 0.1, "rounding": 1e-6}, fresh)
    for nonsense in ({"sigma": "0.02"}, {"rounding": None}, {"more": 1}):
        with pytest.raises(qerl.UserError, match="checkpoint's method is"):
            checkpoint.require_same_kind("method", fresh | nonsense, fresh)


def test_a_line_written_by_hand_is_no_step(finished, tmp_path, monkeypatch, capsys):
    """Neither the curve nor the report stumbles over it, at the end of a run that is resumed."""
    options, out = copied(finished, tmp_path)
    (whole,), samples = logged_steps(2), read_jsonl(out / "samples.jsonl")
    lines = [{"step": 1, "note": "mine"}, {**whole, "reward": "good"}, {**whole, "sigma": None}, whole]
    write_jsonl(out / "metrics.jsonl", lines)
    write_jsonl(out / "samples.jsonl", [{"step": 1, "note": "mine"}, *samples])
    run_main(monkeypatch, *options)
    assert "lacks 1 of the 2 steps" in capsys.readouterr().err and (out / "report.html").exists()
    assert read_jsonl(out / "metrics.jsonl") == [whole] and read_jsonl(out / "samples.jsonl") == samples


def test_fp8_with_an_exact_backward_rounds_the_forward_pass_alone(qwen):
    """Its gradients are those of float32 products of the rounded operands; afterwards all is as before."""
    model = all_trained(qwen[0])
    fp8_neighbour("unified", model)
    layer = model.quantized_layers()[0]
    x = torch.randn(5, layer.master.shape[1], requires_grad=True)
    with fp8_layers.exact_backward(model):
        y = layer(x)
    assert "forward" not in vars(layer)
    torch.testing.assert_close(y, layer(x))
    grad = torch.randn_like(y)
    y.backward(grad)
    weight = fp8_blocks.quantize(layer.master.detach(), fp8_blocks.SQUARE).dequantize()
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(layer.master.grad, grad.T @ fp8_blocks.quantize(x.detach(), fp8_blocks.ROW).dequantize())


@pytest.mark.parametrize("name", methods.names()[1:])
def test_a_neighbour_opens_with_what_a_student_needs(name):
    """The problem, a formula, what differs from QeRL, a result and when to use it; and it is a demonstration by itself."""
    module = importlib.import_module(f"methods.{name}")
    words = module.__doc__.lower()
    assert all(part in words for part in ("problem", "formula", "what differs from qerl", "when would you use it?", "ours"))
    assert callable(module.main) and issubclass(module.Neighbour, methods.Method)


# -------------------------------------------------------------- several GPUs

import socket

from harness import scaling_bench, sharded


def scaling_row(processes, prompts, step, **figures):
    """A row as bench.py scaling keeps it, with made-up seconds."""
    phases = dict.fromkeys(scaling_bench.PHASES, step / 5)
    row = {"model": "tiny", "weights": "nvfp4", "processes": processes, "prompts": prompts, "group": 8, "step": step, "length": 100.0}
    return {**row, **phases, **figures}


def test_bench_scaling_measures_processes_and_keeps_earlier_rows(tmp_path, monkeypatch, capsys):
    """Two gloo processes share the prompts; the row of one process is from an earlier call, another from a file."""
    here = tmp_path / "cpu" / "scaling.json"
    other = tmp_path / "other.json"
    here.parent.mkdir()
    here.write_text(json.dumps({"rows": [scaling_row(1, 2, 10.0, group=2), scaling_row(2, 2, 99.0, group=2)]}))
    other.write_text(json.dumps({"rows": [scaling_row(4, 2, 5.0, group=2)]}))
    options = ["--device", "cpu", "--out", str(tmp_path), "--processes", "2", "--repeats", "1", "--add", str(other)]
    monkeypatch.setattr(sys, "argv", ["bench.py", "scaling", *options])
    bench.main()
    rows = json.loads(here.read_text())["rows"]
    assert [(r["processes"], r["prompts"], r["group"]) for r in rows] == [(1, 2, 2), (2, 4, 2), (2, 2, 2), (4, 2, 2)]
    assert rows[0]["step"] == 10.0
    for row in rows[1:3]:
        phases = [row[name] for name in ("reward", *scaling_bench.PHASES)]
        assert all(seconds >= 0 for seconds in phases) and row["exchange"] > 0
        assert 0.6 * row["step"] < sum(phases) <= 1.001 * row["step"]                      # parts of a mean, and the slowest's
    assert (here.parent / "scaling.png").stat().st_size > 5000
    assert "| 2 x 2 in all | 4 | 4 | 100 | 5.000 |" in capsys.readouterr().out


def test_bench_scaling_compares_with_one_process():
    """Completions a second of 2 processes over one's: 1.9 x where each has as many, 1.6 x where they share."""
    rows = [scaling_row(1, 32, 10.0), scaling_row(2, 64, 20 / 1.9), scaling_row(2, 32, 10 / 1.6, length=150.0)]
    each, shared = scaling_bench.series_of(rows).values()
    assert scaling_bench.speed_ups(each) == pytest.approx([1, 1.9]) and scaling_bench.speed_ups(shared) == pytest.approx([1, 1.6])
    assert scaling_bench.speed_ups(shared, "tokens") == pytest.approx([1, 2.4])
    assert scaling_bench.speed_ups(rows[1:]) == []                                         # with whom to compare?
    lines = [" | ".join(map(str, cells)) for cells in scaling_bench.cells_of(rows)]
    assert "| 32 x 8 a process | 2 | 512 | 100 |" in lines[1] and "| 48.6 | 1.90x | 95% |" in lines[1]
    lines = [" | ".join(map(str, cells)) for cells in scaling_bench.cells_of(rows[1:])]    # measured before one process is
    assert len(lines) == 2 and not any("x |" in line for line in lines)
    figure = scaling_bench.plot_scaling({"rows": rows}, pytest.importorskip("matplotlib.pyplot"))
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {"ideal": [1, 2], "32 x 8 a process": pytest.approx([1, 1.9]), "32 x 8 in all": pytest.approx([1, 1.6])}


@pytest.mark.parametrize("options,message", [
    (["scaling", "--processes", "3"], "--processes 3: cannot share 2 prompts"),
    (["scaling", "--processes", "--add", "nowhere.json"], "--add nowhere.json: no such file"),
    (["scaling", "--processes"], "there are no rows yet"),
    (["scaling", "--processes", "--add", __file__], "not what bench.py scaling writes"),
    (["step", "--processes", "2"], "--processes: step does not take it"),
    (["step", "--sizes", "4x1"], "4x1: give prompts x completions, at least 1x2"), (["step", "--sizes", "4"], "4: give prompts x"),
    (["step", "--repeats", "0"], "must be at least 1"), (["step", "--cap", "5"], "only a GPU's memory has a cap"),
    (["formats", "--model", "a", "b"], "formats takes one"),
    (["step", "--shard"], "--nproc_per_node=2 or more"), (["step", "--cap", "0"], "must be above 0"),
    (["memory", "--cap", "24"], "--cap: memory does not take it, only step")])
def test_bench_scaling_refuses(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["bench.py", *options, "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert message in capsys.readouterr().err


def test_bench_says_in_a_line_that_memory_ran_out(monkeypatch, capsys):
    def too_much(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nGPU 0 has")
    monkeypatch.setattr(bench, "run", too_much)
    monkeypatch.setattr(sys, "argv", ["bench.py", "step", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "9 GiB. Choose" in said and "--cap" in said
    monkeypatch.setattr(sys, "argv", ["bench.py", "rollout", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    said = capsys.readouterr().err
    assert "Choose a smaller --model" in said and "--cap" not in said                     # which rollout does not take

    def broken(_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    monkeypatch.setattr(bench, "run", broken)
    with pytest.raises(RuntimeError, match="mat1"):                                      # a fault of ours keeps its traceback
        bench.main()


@pytest.mark.parametrize("name", sorted(glob.glob(f"{HERE}/results/h200/step*.json")))
def test_the_stored_steps_can_be_drawn_again(name):
    plt = pytest.importorskip("matplotlib.pyplot")
    with open(name, encoding="utf-8") as f:
        result = json.load(f)
    axis = bench.plot_step(result, plt).axes[-1]
    tops = {bar.get_x(): bar.get_y() + bar.get_height() for bar in axis.patches}         # of the stacked bars the last stands on top
    rows = [r for r in result["rows"] if (r["prompts"], r["group"]) == tuple(result["rows"][-1][k] for k in ("prompts", "group"))]
    assert sorted(tops.values()) == pytest.approx(sorted(r["step"] for r in rows), rel=0.02)
    plt.close("all")


def test_a_bench_file_says_by_which_command_a_row_was_measured(tmp_path):
    path = tmp_path / "step.json"
    rows = [{"model": "old", "step": 1.0}, {"model": "older", "command": "another", "date": "2025-01-01"}]
    path.write_text(json.dumps({"command": "python bench.py step --cap 5", "date": "2026-01-01", "settings": {}, "rows": rows}))
    result = {"command": "now", "rows": [{"model": "new"}]}
    bench.keep_others(bench.read_earlier(str(path)), result)
    assert result["rows"] == [{"model": "old", "step": 1.0, "command": "python bench.py step --cap 5", "date": "2026-01-01"},
                              rows[1], {"model": "new"}]


def test_a_bench_file_keeps_what_this_call_did_not_measure():
    """Another format, rank or size of the same model stays; what is measured again is replaced."""
    def row(**subject):
        return {"model": "m", "weights": "nvfp4", "rank": 16, "prompts": 1, "group": 8, **subject}
    others = [row(weights="bf16"), row(rank=32), row(prompts=32), row(group=2), row(model="n")]
    result = {"rows": [row(step=2.0)]}
    bench.keep_others({"rows": [row(step=1.0), *others]}, result)
    assert result["rows"] == [*others, row(step=2.0)]


def test_the_ratio_to_vllm_is_to_the_better_of_both_its_formats(monkeypatch):
    """If one of them could not be measured there is none: the other need not be the faster."""
    monkeypatch.setattr(bench, "decode_seconds", lambda model, batch, prompt, tokens: (0.1, 2.0))
    def theirs(weights, rate):
        return {"rank": 16, "batch": 4, "weights": weights, "tokens_per_s": rate}
    for vllm, best in (([theirs("nvfp4", 10.0), theirs("bf16", 20.0)], 20.0), ([theirs("nvfp4", 10.0)], None), ([], None)):
        row, = bench.rollout_rows("m", None, "nvfp4", 16, (4,), 8, vllm)
        assert row["tokens_per_s"] == 16.0 and row.get("vllm") == best


def test_bench_step_cuts_the_weights(tmp_path):
    """Two gloo processes that take part in each other's passes, with completions of different lengths; the norm of the update counts."""
    script = tmp_path / "norms.py"
    script.write_text("import torch, bench\nclip = torch.nn.utils.clip_grad_norm_\n"
                      "def spy(*args):\n    norm = clip(*args)\n    print(f'norm {norm:.6f}', flush=True)\n    return norm\n"
                      "torch.nn.utils.clip_grad_norm_ = spy\nbench.main()\n")
    norms = []
    for flags in ([], ["--shard"]):
        options = ("--device", "cpu", "--weights", "nvfp4", "--sizes", "4x3", "--out", tmp_path)
        done = run_processes(2, script, "step", *options, *flags)
        assert done.returncode == 0, done.stderr
        norms.append(re.findall(r"norm (\S+)", done.stdout))
    assert norms[0] == norms[1] and float(norms[0][0]) > 0
    found = json.loads((tmp_path / "cpu" / "step-2-processes-sharded.json").read_text())
    assert found["settings"]["shard"] and [row["processes"] for row in found["rows"]] == [2]
    assert found["command"].startswith("torchrun --nproc_per_node=2 norms.py step --device cpu")


def test_ranks_divide_the_lengths_of_one_process():
    """So 32 x 8 completions are the same work on one GPU and on four, of which one has more than another."""
    ranks = [types.SimpleNamespace(rank=rank, count=4) for rank in range(4)]
    parts = [bench.cut_lengths(64, 512, rank) for rank in ranks]
    assert torch.equal(torch.cat(parts), bench.cut_lengths(256, 512, Ranks()))
    assert len({part.sum().item() for part in parts}) == 4


@pytest.mark.parametrize("options,message", [
    (["step", "--sizes", "3x2"], "--sizes 3x2: 2 processes cannot share 3 prompts"),
    (["scaling"], "scaling is started without torchrun")])
def test_bench_under_torchrun_refuses(monkeypatch, options, message):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun sets it")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["bench.py", *options, "--device", "cpu"])
    with pytest.raises(qerl.UserError, match=message):
        bench.arguments()


def two_agents(script, *args):
    """Start torchrun twice, as on two machines: two processes each, which meet at a port of this one."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", "--rdzv-backend=c10d",
               f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost", script, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [subprocess.Popen(command, env=environment, cwd=HERE, **pipes) for _ in range(2)]


def test_two_machines_take_the_step_of_one_process(qwen, data, tmp_path):
    """Two processes on each; DAPO, whose further draws and token counts cross the machines, too."""
    script = tmp_path / "same.py"
    script.write_text(SAME_COMPLETIONS)
    options = ("--model", qwen[0], "--data", data, *SEVERAL, "--algo", "dapo", "--beta", 0, "--steps", 1, "--skip-eval-before", "--out")
    agents = two_agents(script, *options, tmp_path / "2 x 2")
    run_alone(*options, tmp_path / "alone")
    outputs = [agent.communicate(timeout=300) for agent in agents]
    # What the run wrote and said counts, not torchrun's exit status: of two agents on a busy host one may be gone
    # before the other has taken its leave.
    assert "".join(out for out, _ in outputs).count("pass@1 after: ") == 1, outputs        # one of four speaks
    assert_same_steps(tmp_path / "alone", tmp_path / "2 x 2", steps=1)
    state, _ = read_checkpoint(str(tmp_path / "2 x 2"), {}, must_agree=["none"])
    assert state["drawn"] > 8                                                              # questions were replaced


def as_rank(monkeypatch, rank, others, local_rank=0):
    """Ranks of which this is `rank`, without processes: collect gives what `others` returns."""
    ranks = Ranks()
    monkeypatch.setattr(ranks, "collect", others)
    ranks.count, ranks.rank, ranks.local_rank = 4, rank, local_rank
    return ranks


def test_ranks_agree_on_flags_data_and_model(qwen, monkeypatch, tmp_path):
    """Machines may name their folders differently; what they hold, and the other flags, must be the same."""
    settings = train_gsm8k.Settings(lr=1e-3, model="/here")
    theirs = []
    ranks = as_rank(monkeypatch, 2, lambda facts: [theirs[0], facts[0]])
    theirs.append({f"--{name.replace('_', '-')}": value for name, value in vars(settings).items()} | {"--model": "/there"})
    ranks.agree_on_flags(settings)
    theirs[0]["--lr"] = 1e-2
    with pytest.raises(qerl.UserError, match="--lr 0.001 of rank 2 is 0.01 in rank 0; give all machines the same"):
        ranks.agree_on_flags(settings)

    model = with_lora(qwen[0])
    checksum = checkpoint.weights_checksum(model)
    assert checksum == checkpoint.weights_checksum(with_lora(qwen[0]))
    model.blocks[1].mlp.down.weight.parts[0][0, 0] ^= 1                                    # one code of one weight
    assert checksum != checkpoint.weights_checksum(model)


def test_a_rank_says_that_another_is_gone(monkeypatch):
    with pytest.raises(qerl.UserError, match="rank 2 waited for another"), as_rank(monkeypatch, 2, None).together():
        raise RuntimeError("Connection reset by peer")


# train_gsm8k.py with a flag that one rank or all have wrong; rank 0 comes later to it than the others.
ERRONEOUS_RANK = """
import os, sys, time
import harness.ranks, train_gsm8k

rank, erroneous, moment = os.environ["RANK"], sys.argv.pop(1), sys.argv.pop(1)
harness.ranks.SPEAKING_SECONDS = 60 if erroneous == "all" else 0.5
if erroneous in (rank, "all"):
    sys.argv += ["--lr", "-5"] if moment == "before" else ["--data", "."]
if rank == "0":
    time.sleep(1)
train_gsm8k.main()
"""


@pytest.mark.parametrize("erroneous,moment,message", [("all", "before", "--lr -5.0: must be positive"), ("all", "after", "--data .: no "),
                                                      ("1", "before", "--lr -5.0: must be positive")])
def test_an_error_of_several_ranks_is_one_line(qwen, data, tmp_path, erroneous, moment, message):
    """Before or after the ranks have met; what one of them alone sees is said, too."""
    script = tmp_path / "erroneous.py"
    script.write_text(ERRONEOUS_RANK)
    done = run_processes(2, script, erroneous, moment, "--model", qwen[0], "--data", data, *SEVERAL, "--out", tmp_path / "run")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and done.returncode != 0
    assert "terminate called" not in done.stderr                                          # by gloo's threads, after the line


@pytest.mark.parametrize("local_rank", [0, 1])
def test_all_ranks_of_a_machine_see_that_it_has_too_few_gpus(monkeypatch, local_rank):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(qerl.UserError, match="--nproc-per-node 2: only 1 GPUs are here"):
        as_rank(monkeypatch, local_rank, None, local_rank).start("cuda")


# A model of several blocks: with two each would keep a buffer of its own.
DEEP = {**SIZES, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    CONFIGS["deep"] = lambda: transformers.Qwen2Config(**DEEP, tie_word_embeddings=True)
    try:
        return make_folder(tmp_path_factory.mktemp("deep"), "deep")[0]
    finally:
        del CONFIGS["deep"]


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("weights,tiled", [("nvfp4", False), ("nvfp4", True), ("nf4", True), ("bf16", False)])
def test_gathered_weights_compute_the_same(deep, alone, monkeypatch, weights, tiled):
    """Logits, a rollout and gradients, bit for bit, in both forms of a weight; no layer keeps its own between passes."""
    monkeypatch.setattr(fp4_kernels, "tiles_fit", lambda *_: tiled)
    whole = with_lora(deep, weights=weights)
    whole.recompute_in_backward()
    cut = with_lora(deep, weights=weights, checkpoint_class=sharded.ShardedCheckpoint)
    assert all(t.numel() == 0 for layer in cut.quantized_layers() for t in sharded.packed_tensors(layer.weight))
    passes = sharded.SharedPasses(cut, Ranks())
    storages = {layer.weight.words.untyped_storage().data_ptr() if tiled else layer.weight.parts[0].untyped_storage().data_ptr()
                for layer in cut.quantized_layers()}
    assert len(storages) == 2                                                              # buffers, for three blocks
    tokens = torch.arange(60).view(2, 30) + 5
    results = []
    for model in (whole, cut):
        torch.manual_seed(3)
        with torch.no_grad():
            logits = model(tokens)
        rollout = qerl.generate(model, tokens.tolist(), 6, 2)
        model(tokens).square().mean().backward()
        gradients = {name: p.grad for name, p in qerl.trainable(model).items()}
        results.append({"logits": logits, "tokens": rollout.tokens, "logprobs": rollout.logprobs, **gradients})
    for name, tensor in results[0].items():
        assert torch.equal(results[1][name], tensor), name
    passes.serve()                                                                         # nobody wants a pass


@gpu
def test_gpu_gathered_weights_compute_the_same(tmp_path):
    """The same with the kernels, and with a decode step, its vote and its gatherings by NCCL, recorded as one CUDA graph."""
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        folder = make_folder(tmp_path / "wide", "wide")[0]
        whole = with_lora(folder, device="cuda")
        whole.recompute_in_backward()
        cut = with_lora(folder, device="cuda", checkpoint_class=sharded.ShardedCheckpoint)
        passes = sharded.SharedPasses(cut, Ranks())
        tokens = torch.arange(60, device="cuda").view(2, 30) + 5
        results = []
        for model in (whole, cut):
            with torch.no_grad():
                logits = model(tokens)
            rollout = qerl.generate(model, tokens.tolist(), 12, 4, temperature=0.0)
            model(tokens).square().mean().backward()
            gradients = {name: p.grad for name, p in qerl.trainable(model).items()}
            results.append({"logits": logits, "tokens": rollout.tokens, **gradients})
        for name, tensor in results[0].items():
            torch.testing.assert_close(results[1][name], tensor, rtol=1e-3, atol=1e-5, msg=name)
        passes.serve()
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_keep_equal_pieces_of_a_layer(qwen, monkeypatch):
    """Three pieces, none with more than its share but for padding; together they are the layer."""
    model = qerl.load_model(qwen[0])
    pieces = []
    for rank in range(3):
        monkeypatch.setattr(sharded, "Ranks", lambda: types.SimpleNamespace(rank=rank, count=3))
        cut = qerl.load_model(qwen[0], checkpoint_class=sharded.ShardedCheckpoint)
        layers = cut.quantized_layers()
        pieces.append([layer.piece for layer in layers])
    for whole, layer, *parts in zip(model.quantized_layers(), layers, *pieces):
        packed = sharded.packed_tensors(whole.weight)
        share = sum(t.nbytes for t in packed) / 3
        assert all(share <= len(part) < share + 2 * sharded.ALIGNMENT for part in parts)
        again = sharded.tensors_in(torch.cat(parts), layer.layout, 3 * sharded.ALIGNMENT)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(again, packed))


# Two trainings by the same processes, the second with cut weights. The ranks get completions of different lengths.
WHOLE_AND_CUT = """
import sys
from functools import partial
import torch
import bench, qerl, train_gsm8k
from harness.ranks import Ranks
from torch import distributed

def generate(model, prompts, max_new_tokens, group_size=1, *rest, **options):
    slots = max(group_size, 4 - 2 * Ranks().rank)
    lengths = torch.arange(len(prompts) * group_size) % 4 + 1 + 4 * Ranks().rank
    sampler_class = partial(bench.CutSampler, bench.Work(), lengths)
    options = {**options, "slots": slots, "sampler_class": sampler_class}
    return original(model, prompts, max_new_tokens, group_size, *rest, **options)

def meet(backend):
    if not distributed.is_initialized():                        # processes cannot meet twice
        meet_once(backend)

meet_once = distributed.init_process_group
distributed.init_process_group = meet
stop = Ranks.stop
Ranks.stop = lambda self: None
original = qerl.generate
qerl.generate = generate
command, out = sys.argv[:-1], sys.argv[-1]
for name, flags in (("whole", []), ("cut", ["--shard"])):
    sys.argv = [*command, *flags, "--out", f"{out}/{name}"]
    train_gsm8k.main()
stop(Ranks())                                                   # without Python's own end, in which gloo's threads may abort
"""


def test_two_processes_train_on_cut_weights_as_on_whole_ones(deep, data, tmp_path):
    """Bit for bit, though one rank decodes more tokens in fewer slots and trains on more pieces than the other."""
    script = tmp_path / "both.py"
    script.write_text(WHOLE_AND_CUT)
    flags = ("--reward", "random", "--steps", 2, "--micro-tokens", 500, "--skip-eval-before")
    done = run_processes(2, script, "--model", deep, "--data", data, *SEVERAL, *flags, tmp_path)
    assert done.returncode == 0, done.stderr
    whole, cut = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert max(t.abs().max() for name, t in whole.items() if "lora_B" in name) > 1e-3
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())
    for a, b in zip(*(read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))):
        same = a.keys() - {"seconds", "tokens_per_s", "peak_memory_gb"}
        assert a["length"] == 4.5 and {name: a[name] for name in same} == {name: b[name] for name in same}


def test_ranks_compare_weights_of_which_each_keeps_a_piece(qwen, tmp_path, monkeypatch):
    """Two ranks of the same folder agree, one of a folder with another weight in one layer does not."""
    other = tmp_path / "other"
    shutil.copytree(qwen[0], other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    sums = []
    for rank, folder in ((0, qwen[0]), (1, qwen[0]), (1, other)):
        monkeypatch.setattr(sharded, "Ranks", lambda: types.SimpleNamespace(rank=rank, count=2))
        sums.append(checkpoint.weights_checksum(qerl.load_model(str(folder), checkpoint_class=sharded.ShardedCheckpoint)))
    assert sums[0] == sums[1] != sums[2]


def test_each_process_needs_a_held_out_question(qwen, data, monkeypatch):
    settings = train_gsm8k.Settings(model=qwen[0], data=data, device="cpu", dtype="float32", quantizer="rtn", lora_rank=2, max_new_tokens=8, eval_questions=3)
    with pytest.raises(qerl.UserError, match="held-out questions: 3, fewer than the 4 processes; raise --eval-questions"):
        train_gsm8k.load_all(settings, methods.find("qerl", settings), as_rank(monkeypatch, 2, None))


@pytest.mark.parametrize("options,message", [(["--shard"], "start by torchrun"),
                                             (["--shard", "--lora-rank", 0, "--weights", "bf16"], "start by torchrun"),
                                             (["--shard", "--save-quantized", "packed"], "leave --shard out")])
def test_shard_wants_several_processes(qwen, data, tmp_path, monkeypatch, capsys, options, message):
    assert message in refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, *options, "--out", tmp_path / "run")


# ---------------------------------------------------------------------------------------------------------------------
# Memory: bench.py memory, and which phase ran out of it

from harness import memory_bench
from harness.figures import save_figure


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("place,name,phase,flag", [
    (qerl, "load_model", "while loading the model", "4-bit --weights"),
    (qerl.Sampler, "steps", "in the rollout", "--slots"),
    (qerl, "token_logprobs", "in the log-probabilities", "--micro-tokens"),
    (torch.Tensor, "backward", "in the update", "--keep-activations"),
    (torch.optim.AdamW, "step", "in the update", "--micro-tokens"),
])
def test_out_of_memory_names_phase_and_remedy(qwen, data, tmp_path, monkeypatch, capsys, place, name, phase, flag):
    monkeypatch.setattr(place, name, no_memory)
    line = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--skip-eval-before", "--out", tmp_path / "run")
    assert f"out of memory {phase};" in line and flag in line and "--resume" in line


def test_out_of_memory_while_the_codes_are_chosen(qwen, data, tmp_path, cache, monkeypatch, capsys):
    """By default, as here, they are GPTQ's; without the 16-bit model there are others."""
    monkeypatch.setattr(qerl, "load_model", no_memory)
    line = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, "--device", "cpu", "--out", tmp_path / "run")
    assert "out of memory while choosing the 4-bit codes" in line and "use --quantizer rtn" in line
    assert not list(cache.iterdir())


def bench_main(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, args)])
    bench.main()


def test_bench_memory_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Both tables of the tiny shape; the second call keeps what the first measured."""
    bench_main(monkeypatch, "memory", "--device", "cpu", "--out", tmp_path)
    path = tmp_path / "cpu" / "memory.json"
    row, = json.loads(path.read_text())["rows"]
    assert row["model"] == "tiny" and set(row["rest_gb"]) == set(memory_bench.PHASES)
    # LoRA of rank 16 on tiny's layers, float32: A and B of q, k, v, o, gate, up and down in two blocks.
    sizes = [(256, 256), (256, 128), (256, 128), (256, 256), (256, 512), (256, 512), (512, 256)]
    lora = 2 * 16 * sum(a + b for a, b in sizes) * 4
    assert row["lora_gb"] == row["gradients_gb"] == lora / 1e9
    assert 2 * lora <= row["optimizer_gb"] * 1e9 < 2.01 * lora                        # and a count of steps each
    assert row["embeddings_gb"] == 2 * 512 * 256 * 4 / 1e9
    cache = qerl.KVCache(bench.random_model("tiny", "nvfp4", 0, "cpu"), 2, 20)
    cache.reserve(20)
    assert row["cache_gb"] == sum(piece.nbytes for pieces in cache.pieces for piece in pieces) / 1e9
    bench_main(monkeypatch, "memory", "--long", 9, 1, 9, "--device", "cpu", "--out", tmp_path)
    result = json.loads(path.read_text())
    kept, = result["rows"]
    assert {key: kept[key] for key in row} == row and "--long" not in kept["command"] and "--long" in result["command"]
    assert [r["length"] for r in result["long"]] == [1, 9]
    assert all(r["ms_a_token"] > 0 and r["seconds"]["update"] > 0 for r in result["long"])
    assert (tmp_path / "cpu" / "memory.png").stat().st_size > 10000
    out = capsys.readouterr().out
    assert "these figures mean nothing" in out and "tiny: completions of 9 tokens fit" in out


@pytest.mark.parametrize("argv,message", [
    (["memory", "--long", "0"], "--long 0: must be at least 1"),
    (["step", "--long"], "--long: step does not take it, only memory"),
    (["memory", "--model", "Qwen2.5-9B"], "no such shape"),
])
def test_bench_memory_refuses(monkeypatch, capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        bench_main(monkeypatch, *argv, "--device", "cpu")
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("place,name,phase", [
    (qerl.Sampler, "steps", "rollout"), (Batch, "logprobs_under", "logprobs"), (torch.Tensor, "backward", "update")])
def test_a_step_that_does_not_fit_is_a_row(monkeypatch, place, name, phase):
    """Of the step that is measured, and of a long completion; an error of another kind is none of memory."""
    settings = memory_bench.MemorySettings(**memory_bench.SMALL)
    model, optimizer, parts = memory_bench.load("tiny", settings, "cpu")
    original = getattr(place, name)
    monkeypatch.setattr(place, name, no_memory)
    row = memory_bench.length_row(model, optimizer, parts, settings, 80.0)
    assert row["out_of_memory"] == phase and all(p.grad is None for p in qerl.trainable(model).values())
    monkeypatch.setattr(place, name, original)
    assert "out_of_memory" not in memory_bench.length_row(model, optimizer, parts, settings, 80.0)

    whole_step = memory_bench.grpo_step

    def step_after_warm_up(model, optimizer, own, phases):
        if phases.current is None:                  # the warm-up's own
            return None
        monkeypatch.setattr(place, name, no_memory)
        return whole_step(model, optimizer, own, phases)
    monkeypatch.setattr(memory_bench, "grpo_step", step_after_warm_up)
    row, = memory_bench.step_rows("tiny", 12.0, settings, "cpu")
    assert row["out_of_memory"] == phase and "weights_gb" in row and "rest_gb" not in row
    assert memory_bench.outcome(row) == f"out of memory under 12 GB in phase {phase}"

    def broken():
        raise RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes"):
        memory_bench.phase_without_memory(broken, memory_bench.Phases("cpu"))


def test_the_longest_that_fits_is_looked_for_where_memory_should_end(monkeypatch):
    """A step of 20 + length / 512 GB, of which the rollout's cache is the most: 30,720 tokens are 80 GB."""
    monkeypatch.setattr(memory_bench, "load", lambda name, settings, device: (None, None, None))

    def row(model, optimizer, parts, settings, cap):
        length = settings.new_tokens
        peaks = {"rollout": 20 + length / 512, "logprobs": 21.0, "update": 20 + length / 1024}
        over = {"out_of_memory": "rollout"} if peaks["rollout"] > limit else {}
        return {"length": length, "cap_gb": cap, "peak_gb": peaks, **over}
    monkeypatch.setattr(memory_bench, "length_row", row)
    for limit, given, expected in (
            (80, [8192, 1024], [1024, 8192, 29696, 30720]),
            (80, [1024, 20000, 32768], [1024, 20000, 32768, 29696, 30720]),
            (75, [1024, 20000], [1024, 20000, 29696, 27648]),                           # as if PyTorch kept 5 GB for later
            (80, [40000], [40000])):
        rows = list(memory_bench.length_rows("Qwen2.5-32B", given, 80.0, memory_bench.MemorySettings(), "cpu"))
        assert [r["length"] for r in rows] == expected
    rows = [{"model": "a", "length": 1024, "cap_gb": 80.0}, {"model": "a", "length": 29696, "cap_gb": 80.0},
            {"model": "a", "length": 32768, "cap_gb": 80.0, "out_of_memory": "update"}, {"model": "b", "failed": "so"}]
    assert memory_bench.longest_that_fit(rows) == {"a": (29696, 32768)}


def test_a_process_that_fails_is_a_row(capfd):
    """Rows come one by one; the last says how the process ended."""
    rows = memory_bench.in_own_process(map, json.loads, ['{"model": "a"}', "nonsense"])
    assert next(rows) == {"model": "a"}
    failed, = rows
    assert memory_bench.outcome(failed) == "its process ended with status 1"
    assert "JSONDecodeError" in capfd.readouterr().err


def memory_row(model, weights, embeddings, cap, phase=None):
    parts = dict(weights=weights, embeddings=embeddings, lora=0.2, optimizer=0.4, gradients=0.2)
    peaks = {"loading": 2 * weights, "rollout": weights + 2, "logprobs": weights + 1.6, "update": weights + 3}
    row = {"model": model, "cap_gb": cap, "cache_gb": 0.9, "peak_gb": peaks, "reserved_gb": weights + 3.5,
           "seconds": dict.fromkeys(peaks, 1.5), **{f"{k}_gb": v for k, v in parts.items()}}
    if phase:
        return {**row, "out_of_memory": phase}
    measured = {p: peaks[p] for p in memory_bench.PHASES}
    return {**row, "rest_gb": memory_bench.what_is_left(measured, parts, 0.9)}


def test_memory_table_and_picture(tmp_path, capsys):
    steps = [memory_row("Qwen2.5-7B", 5.86, 2.18, 12.0), memory_row("Qwen2.5-72B", 44.5, 4.98, 80.0, "update"),
             {"model": "Qwen2.5-14B", "cap_gb": 18.0, "failed": "its process ended with status -9"}]
    # What makes a phase's peak adds up to it: the cache only in the rollout, the gradients only in the update.
    for phase in memory_bench.PHASES:
        stack = memory_bench.stack_of(steps[0], phase)
        assert sum(stack.values()) == pytest.approx(steps[0]["peak_gb"][phase])
        assert (stack["KV cache"] > 0) == (phase == "rollout") and (stack["gradients"] > 0) == (phase == "update")
    peaks = {"rollout": 30.0, "logprobs": 25.0, "update": 28.0}
    long = [{"model": "Qwen2.5-32B", "length": 1024, "cap_gb": 80.0, "cache_gb": 2.4, "peak_gb": peaks, "rest_gb": peaks,
             "ms_a_token": 17.2, "seconds": dict.fromkeys(peaks, 2.0)},
            {"model": "Qwen2.5-32B", "length": 32768, "cap_gb": 80.0, "cache_gb": 69.0, "peak_gb": {}, "seconds": {},
             "out_of_memory": "rollout"},
            {"model": "Qwen2.5-7B", "cap_gb": 80.0, "failed": "its process ended with status 1"}]
    bench.print_memory({"rows": steps, "long": long})
    table = capsys.readouterr().out
    assert "| Qwen2.5-7B | 12 | 5.86 | 5.9 | 0.20 | 0.60 | 0.90 | 7.9 | 7.5 | 8.9 | 9.4 | 1.5 / 1.5 / 1.5 | fits |" in table
    assert "| out of memory under 80 GB in phase update |" in table and "status -9 |" in table
    assert "| Qwen2.5-32B | 1024 | 2.4 | 30.0 | 25.0 | 28.0 | 17.2 | 2.0 / 2.0 | fits |" in table
    assert "Qwen2.5-32B: completions of 1024 tokens fit, 32768 did not" in table and "54.3 GB" in table
    titles = []

    def plot(result, plt):
        figure = memory_bench.plot_memory(result, plt)
        titles.append([axis.get_title() for axis in figure.axes])
        return figure
    for rows, lines in ((steps, long), (steps[:1], []), ([], long), ([], long[1:])):
        save_figure(tmp_path / "memory.png", plot, {"rows": rows, "long": lines})
    whole = "peak of a GRPO step, by phase"
    of_lengths = ["peak of long completions", "decoding at a full cache"]
    assert titles == [[f"{whole}; not shown: Qwen2.5-72B, Qwen2.5-14B", *of_lengths], [whole], of_lengths,
                      [f"{whole}; not shown: Qwen2.5-32B, Qwen2.5-7B"]]


# ------------------------------------------------------------------------------- saving, loading, merging: docs/serving.md

from harness import loading, merge, shards
from safetensors import SafetensorError

FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
ALONE = ("self_attn.o_proj",), ("mlp.down_proj",)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 60_000)


def tensors_of(folder):
    """{name: tensor} of all files of a folder, as its index has them."""
    return {name: file.get_tensor(name) for name, file in qerl.open_tensors(str(folder), "cpu").items()}


def library_logits(folder, tokens):
    """What transformers with compressed-tensors computes of a folder; the library decodes in 16 bit, the rest is in 32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model(tokens[:, :1])                                          # decodes the weights
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.float()
        return model(tokens).logits


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_saved_folder_has_the_librarys_bytes_and_logits(tmp_path, monkeypatch, capsys, small_shards, name):
    source, theirs = make_folder(tmp_path / "source", name)
    out = tmp_path / "out"
    run_main(monkeypatch, "--model", source, "--device", "cpu", "--quantizer", "rtn", "--save-quantized", out)
    assert capsys.readouterr().out.startswith(f"saved {out}, 0.000")
    stored, exact = tensors_of(out), theirs.state_dict()
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for i, leaves in itertools.product(range(2), FUSED + ALONE):
        names = [f"model.layers.{i}.{leaf}" for leaf in leaves]
        # Of layers that vLLM multiplies as one, the bytes are those of one weight, by the library.
        whole, _ = compressed_tensors_nvfp4(torch.cat([exact.pop(f"{n}.weight") for n in names]))
        for part in ("weight_packed", "weight_scale"):
            assert torch.equal(torch.cat([stored.pop(f"{n}.{part}").float() for n in names]), whole[part].float())
        for n in names:
            assert torch.equal(stored.pop(f"{n}.weight_global_scale"), whole["weight_global_scale"])
    if theirs.config.tie_word_embeddings:
        del exact["lm_head.weight"]
    assert stored.keys() == exact.keys() and all(torch.equal(stored[k], exact[k]) for k in exact)
    ours = qerl.load_model(str(out))
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative(ours(tokens), library_logits(out, tokens)) < 0.01
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(os.listdir(out))
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert len(before.encode("12 pens")) == 7 and after.encode("12 pens") == before.encode("12 pens")
    assert not list(tmp_path.glob("*.tmp")) and os.stat(out / files[0]).st_mode & 0o777 == os.stat(out / "config.json").st_mode & 0o777


@pytest.mark.parametrize("quantizer", quantizers.QUANTIZERS)
def test_saved_folder_is_what_a_quantizer_trains_on(qwen, data, tmp_path, cache, monkeypatch, quantizer):
    options = ("--model", qwen[0], "--data", data, "--quantizer", quantizer, "--device", "cpu")
    run_main(monkeypatch, *options, "--save-quantized", tmp_path / "out")
    settings = train_gsm8k.arguments([*options, "--max-new-tokens", "8"])
    model, *_ = train_gsm8k.load_all(settings, methods.find("qerl", settings))
    trained_on, saved = tensors_of(model.name_or_path), tensors_of(tmp_path / "out")
    assert trained_on.keys() == saved.keys() and len(list(cache.iterdir())) == 1
    assert all(torch.equal(saved[k].float(), trained_on[k].float()) for k in saved)
    for i, leaves in itertools.product(range(2), FUSED):
        scale = {saved[f"model.layers.{i}.{leaf}.weight_global_scale"].item() for leaf in leaves}
        assert len(scale) == 1
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(qerl.load_model(str(tmp_path / "out"))(tokens), model(tokens))
        assert relative(model(tokens), library_logits(tmp_path / "out", tokens)) < 0.015


def test_a_chat_template_goes_with_the_saved_folder(tmp_path, quiz, monkeypatch):
    run_main(monkeypatch, "--model", quiz, "--device", "cpu", "--quantizer", "rtn", "--save-quantized", tmp_path / "out")
    ours, theirs = train_gsm8k.ChatText(str(tmp_path / "out"), ""), train_gsm8k.ChatText(quiz, "")
    assert ours.prompt("abc") == theirs.prompt("abc") == [0, 1, 2] and ours.eos == theirs.eos


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_quantised_as_one_whatever_the_pieces(dtype):
    torch.manual_seed(0)
    weights = [(torch.randn(rows, 64) * size).to(dtype) for rows, size in ((50, 1), (33, 0.1), (7, 1e-3))]
    for size in (64, 1000, 10 ** 6):
        pairs = zip(packed_folder.quantize_as_one(weights, size), qerl.quantize_nvfp4(torch.cat(weights)))
        assert all(torch.equal(ours.float(), whole.float()) for ours, whole in pairs)


def test_a_sharded_folder_is_saved_as_a_whole_one(qwen, tmp_path, monkeypatch, data):
    """And what is trained on it is trained on its codes: base model and weights of a run are the folder's."""
    sharded, _ = make_folder(tmp_path / "sharded", max_shard_size="100KB")
    for source, out in ((sharded, "out"), (qwen[0], "whole")):
        run_main(monkeypatch, "--model", source, "--device", "cpu", "--quantizer", "rtn", "--save-quantized", tmp_path / out)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    settings = train_gsm8k.arguments(["--model", str(tmp_path / "out"), "--data", data, "--device", "cpu", "--max-new-tokens", "8"])
    model, *_ = train_gsm8k.load_all(settings, methods.find("qerl", settings))
    stored = tensors_of(tmp_path / "out")
    assert model.name_or_path == str(tmp_path / "out")
    for layer in qerl.load_model(model.name_or_path).quantized_layers():
        for part, expected in zip(layer.weight.parts, ("weight_packed", "weight_scale")):
            assert torch.equal(part.float(), torch.cat([stored[f"{n}.{expected}"].float() for n in layer.names]))


MEMORY = """
import sys, threading, time
import torch
from harness import packed_folder, shards

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

small, big, out = sys.argv[1:]
shards.SHARD_BYTES = 10 ** 7
packed_folder.save_packed(small, out + "-small", "cpu")           # what imports and first uses take
before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
packed_folder.save_packed(big, out, "cpu")
print("grown by", peak[0] - before)
"""


def folder_of_many_files(path, layers):
    """A folder of random bfloat16 weights, 7 MB a layer, each layer in a file of its own; returns its size in 2^20 bytes."""
    config = transformers.Qwen2Config(**{**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers},
                                      tie_word_embeddings=True)
    config.save_pretrained(path)
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.AutoModelForCausalLM.from_config(config).named_parameters()}
    values = {shape: (torch.randn(shape) * 0.02).bfloat16() for shape in set(shapes.values())}
    files = {}
    for name in shapes:
        number = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"{number}.safetensors", {})[name] = values[shapes[name]].clone()
    for file, tensors in files.items():
        save_file(tensors, path / file)
    place = {name: file for file, tensors in files.items() for name in tensors}
    (path / INDEX).write_text(json.dumps({"weight_map": place}))
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2 ** 20


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux what memory is in use")
def test_saving_takes_memory_for_a_part_of_the_model(tmp_path):
    """What is mapped from the files can be dropped at any time and does not count."""
    small, size = (folder_of_many_files(tmp_path / f"{layers}", layers) for layers in (3, 24))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "MALLOC_MMAP_THRESHOLD_": "65536"}                  # glibc gives large blocks back at once
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / "3", tmp_path / "24", tmp_path / "out"], cwd=HERE,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = float(done.stdout.split("grown by")[1])
    assert size > 7 * small > 140 and grown < size / 3, (grown, size)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
@pytest.mark.parametrize("event,number,when", [
    ((shards.safetensors.torch, "save_file"), 2, "before"), ((shards.safetensors.torch, "save_file"), 2, "after"),
    ((os, "rename"), 2, "after"), ((shards.shutil, "copy"), 1, "after"),
])
def test_a_kill_leaves_no_half_folder(qwen, tmp_path, small_shards, event, number, when):
    options = ("--model", qwen[0], "--device", "cpu", "--quantizer", "rtn", "--save-quantized", tmp_path / "out")
    assert killed_at(event, number, when, *options) is None
    left, = tmp_path.iterdir()
    assert re.fullmatch(r"out\.\w{8}\.tmp", left.name)
    assert killed_at(event, 0, when, *options) >= number                      # it is no obstacle
    qerl.load_model(str(tmp_path / "out"))


def full_disk(tensors, path, metadata):
    with open(path, "wb") as f:
        f.write(b"half")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def no_permission(*paths, **options):
    raise PermissionError(errno.EACCES, "Permission denied", str(paths[0]))


@pytest.mark.parametrize("module,name,fails,message", [
    (shards.safetensors.torch, "save_file", full_disk, "No space left on device"),
    (os, "makedirs", no_permission, "Permission denied"),
    (os, "rename", no_permission, "Permission denied"),
])
def test_what_cannot_be_written_is_one_line_and_leaves_nothing(qwen, tmp_path, monkeypatch, capsys, module, name, fails, message):
    out = tmp_path / "out"
    base = ("--model", qwen[0], "--device", "cpu", "--quantizer", "rtn", "--save-quantized", out)
    monkeypatch.setattr(module, name, fails)
    error = refused(monkeypatch, capsys, *base)
    assert str(out) in error and message in error and "choose another folder" in error
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def saved(qwen, tmp_path):
    packed_folder.save_packed(qwen[0], str(tmp_path / "packed"), "cpu")
    return tmp_path / "packed"


def widened(tensors):
    """Give the MLPs 200 inner features, which 16 does not divide."""
    for name, tensor in tensors.items():
        if "mlp" in name:
            tensors[name] = F.pad(tensor, (0, 8) if "down" in name else (0, 0, 0, 8))


def damaged(qwen, tmp_path, *edits):
    (tmp_path / "source").mkdir()
    return break_tensor(qwen[0], tmp_path / "source", *edits)


@pytest.mark.parametrize("options,message", [
    (lambda q, t: ["--weights", "bf16"], "saves NVFP4, not bf16; leave --weights bf16 out"),
    (lambda q, t: ["--weights", "nf4"], "saves NVFP4, not nf4"),
    (lambda q, t: ["--resume"], "leave --resume and --eval-only out"),
    (lambda q, t: ["--eval-only"], "leave --resume and --eval-only out"),
    (lambda q, t: ["--method", "qat"], "leave --method qat out"),
    (lambda q, t: ["--save-quantized", q[0]], "is not empty"),
    (lambda q, t: ["--save-quantized", f"{q[0]}/inside"], "lies in the model's own folder"),
    (lambda q, t: ["--save-quantized", used_folder(t)], "is not empty; choose another folder"),
    (lambda q, t: ["--save-quantized", HERE + "/qerl.py"], "is a file"),
    (lambda q, t: ["--save-quantized", ""], "is empty"),
    (lambda q, t: ["--model", saved(q, t)], "is in 4 bits already"),
    (lambda q, t: ["--model", saved(q, t), "--quantizer", "gptq"], "is in 4 bits already"),
    (lambda q, t: ["--model", "./no/such/folder"], "no such folder"),
    (lambda q, t: ["--model", damaged(q, t, lambda s: s[UP].view(-1)[7].fill_(float("nan")))], "holds NaN"),
    (lambda q, t: ["--model", damaged(q, t, lambda s: s.pop(UP))], f"tensor {UP} is missing"),
    (lambda q, t: ["--model", damaged(q, t, widened, lambda c: c.update(intermediate_size=200))], "block of 16"),
])
def test_what_is_not_saved_is_refused(qwen, tmp_path, monkeypatch, capsys, options, message):
    base = ["--model", qwen[0], "--device", "cpu", "--quantizer", "rtn", "--save-quantized", tmp_path / "new" / "out"]
    assert message in refused(monkeypatch, capsys, *base, *options(qwen, tmp_path))
    assert not (tmp_path / "new" / "out").exists() and not list(tmp_path.rglob("*.tmp"))


def test_the_built_in_policy_is_not_saved(tmp_path, monkeypatch, capsys):
    assert "name it with --model" in refused(monkeypatch, capsys, "--save-quantized", tmp_path / "out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    options = ("--model", "m", "--device", "cpu", "--save-quantized", tmp_path / "out")
    assert "start without torchrun" in refused(monkeypatch, capsys, *options)


def test_a_bar_shows_a_load_that_takes_long(qwen, monkeypatch, capsys):
    asked = []

    def impatient(**options):
        asked.append(options["delay"])
        return loading_bar(**{**options, "delay": 0})
    loading_bar = loading.tqdm
    monkeypatch.setattr(loading, "tqdm", impatient)
    model = loading.load_with_progress(qwen[0], "nf4", lora_rank=2)
    shown = capsys.readouterr()
    assert "loading: 100%" in shown.err and "2/2" in shown.err and shown.out == "" and asked == [2]
    assert model.quantized_layers()[0].rank == 2 and model.quantized_layers()[0].weight.format == qerl.FORMATS["nf4"]
    monkeypatch.setattr(loading, "tqdm", lambda **options: loading_bar(**{**options, "delay": 1000}))
    loading.load_with_progress(qwen[0])
    assert capsys.readouterr().err == ""


def adapter_of(folder, path, seed=1, **options):
    """The folder of a random adapter of this model, and the model with it."""
    model = with_lora(folder, seed, **options)
    save_adapter(model, str(path), str(folder))
    return str(path), model


@pytest.mark.parametrize("train_norms", [False, True])
@pytest.mark.parametrize("name,dtype", [("qwen2", torch.float32), ("qwen3", torch.bfloat16), ("llama", torch.float16)])
def test_merged_weights_equal_pefts(tmp_path, small_shards, capsys, name, dtype, train_norms):
    peft = pytest.importorskip("peft")
    source = str(tmp_path / "source")
    make_folder(source, name)[1].to(dtype).save_pretrained(source, max_shard_size="100KB")
    os.remove(f"{source}/model.safetensors")
    adapter, ours = adapter_of(source, tmp_path / "adapter", weights="bf16", train_norms=train_norms)
    merge.main([adapter, str(tmp_path / "out")])
    assert f"merged {adapter} into {source}" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    theirs = peft.PeftModel.from_pretrained(theirs, adapter).merge_and_unload().state_dict()
    stored, before = tensors_of(tmp_path / "out"), tensors_of(source)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2 and stored.keys() == before.keys()
    for key in stored:
        assert stored[key].dtype == dtype
        limit = 0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps      # PEFT rounds twice
        torch.testing.assert_close(stored[key], theirs[key], rtol=limit, atol=limit * 0.1)
        changed = "_proj.weight" in key or train_norms and "norm" in key
        assert changed != torch.equal(stored[key], before[key]), key
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        merged = qerl.load_model(str(tmp_path / "out"), "bf16")
        assert relative(merged(tokens), ours(tokens)) < (1e-5 if dtype == torch.float32 else 0.02)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").model_type == name


def test_scales_of_activations_are_no_weights_of_the_merged_model():
    stored = ["a.weight_packed", "a.weight_scale", "a.weight_global_scale", "a.input_global_scale", "norm.weight"]
    assert merge.weight_names(stored) == ["a.weight", "norm.weight"]


def test_an_adapter_of_a_saved_folder_is_merged_into_what_its_codes_stand_for(qwen, tmp_path, monkeypatch):
    out = saved(qwen, tmp_path)
    adapter, ours = adapter_of(str(out), tmp_path / "adapter")
    run = subprocess.run([sys.executable, "-m", "harness.merge", adapter, tmp_path / "merged"], cwd=HERE, capture_output=True,
                         text=True)
    assert run.returncode == 0, run.stderr
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative(merged(tokens).logits, ours(tokens)) < 0.01 < relative(qerl.load_model(str(out))(tokens), ours(tokens))
    merge.main([adapter, str(tmp_path / "into-16-bit"), "--model", qwen[0]])
    for key, tensor in tensors_of(tmp_path / "into-16-bit").items():
        exact = tensors_of(qwen[0])[key]
        if "_proj.weight" in key:
            layer = key.removesuffix(".weight")
            A, B = (checkpoint.adapter_tensors(ours)[f"base_model.model.{layer}.lora_{half}.weight"] for half in "AB")
            exact = exact + B @ A
        torch.testing.assert_close(tensor, exact)


def edited(adapter, change=lambda c: None, tensors=lambda t: t):
    """The adapter's files with another config and other tensors."""
    config = json.loads(open(f"{adapter}/adapter_config.json").read())
    change(config)
    with open(f"{adapter}/adapter_config.json", "w") as f:
        json.dump(config, f)
    save_file(tensors(load_file(f"{adapter}/adapter_model.safetensors")), f"{adapter}/adapter_model.safetensors")
    return []


def filled(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    return []


def wide_model(tmp_path):
    return ["--model", make_folder(tmp_path / "wide", "wide")[0]]


def other_norms(qwen, tmp_path):
    return ["--model", break_tensor(qwen[0], tmp_path, lambda s: s["model.norm.weight"].add_(1))]


def without_half(tensors):
    return {k: v for k, v in tensors.items() if "layers.1.mlp.down_proj.lora_B" not in k}


@pytest.mark.parametrize("change,message", [
    (lambda q, t, a: shutil.rmtree(a) or [], "is no readable adapter"),
    (lambda q, t, a: os.truncate(f"{a}/adapter_model.safetensors", 100) or [], "is no readable adapter"),
    (lambda q, t, a: edited(a, lambda c: c.pop("r")), "is no readable adapter"),
    (lambda q, t, a: edited(a, lambda c: c.update(r=0)), "has the rank r = 0"),
    (lambda q, t, a: edited(a, lambda c: c.update(r=2 * c["r"])), "the rank is"),
    (lambda q, t, a: edited(a, lambda c: c.update(lora_alpha=math.nan)), "has lora_alpha = nan"),
    (lambda q, t, a: edited(a, lambda c: c.update(lora_alpha="16")), "has lora_alpha = 16"),
    (lambda q, t, a: edited(a, tensors=lambda s: {}), "holds no tensor"),
    (lambda q, t, a: edited(a, tensors=lambda s: {k: v * math.nan if "layers.1.mlp.down_proj.lora_B" in k else v for k, v in s.items()}),
     "layers.1.mlp.down_proj.lora_B.weight holds NaN"),
    (lambda q, t, a: edited(a, tensors=lambda s: {k: v[:, :1].contiguous() if "lora_B" in k else v for k, v in s.items()}), "the rank is"),
    (lambda q, t, a: edited(a, lambda c: c.update(base_model_name_or_path=None)), "names no model; name it by --model"),
    (lambda q, t, a: edited(a, lambda c: c.update(use_dora=True)), "asks for use_dora"),
    (lambda q, t, a: edited(a, lambda c: c.update(peft_type="IA3")), "asks for IA3"),
    (lambda q, t, a: edited(a, lambda c: c.update(base_model_name_or_path="./gone")), "or name the model by --model"),
    (lambda q, t, a: ["--model", "./gone"], "model ./gone: no such folder"),
    (lambda q, t, a: edited(a, lambda c: c.update(base_model_name_or_path=str(t / "gone"))), "makes those of a cache again"),
    (lambda q, t, a: edited(a, tensors=without_half), "lacks LoRA's A or B"),
    (lambda q, t, a: edited(a, tensors=lambda s: s | {f"base_model.model.lm_head.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}),
     "adapts lm_head.weight, which the model does not have"),
    (lambda q, t, a: wide_model(t) + edited(a, lambda c: c.update(base_model_name_or_path="./gone")), "is (128, 192), the model's (256, 512)"),
    (lambda q, t, a: other_norms(q, t), "its model.norm.weight is not that of"),
    (lambda q, t, a: ["--model", t], "model.safetensors: cannot be read"),
    (lambda q, t, a: ["--step"], "unrecognized arguments: --step"),
    (lambda q, t, a: filled(t / "out"), "is not empty"),
])
def test_what_is_not_merged_is_one_line_and_exit_2(qwen, tmp_path, capsys, change, message):
    adapter, _ = adapter_of(qwen[0], tmp_path / "adapter")
    options = change(qwen, tmp_path, adapter)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        merge.main([adapter, str(tmp_path / "out"), *map(str, options)])
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(error) == 1 and message in error[0]
    assert not (tmp_path / "out" / "config.json").exists() and not list(tmp_path.glob("*.tmp"))


def serving_blocks(kind):
    with open(f"{HERE}/docs/serving.md", encoding="utf-8") as f:
        return re.findall(rf"^```{kind}\n(.*?)^```$", f.read(), flags=re.MULTILINE | re.DOTALL)


def test_serving_snippet_gives_the_trained_policys_answer(qwen, tmp_path, capsys):
    out = saved(qwen, tmp_path)
    adapter, ours = adapter_of(str(out), tmp_path / "adapter", dtype=torch.bfloat16)
    snippet, = serving_blocks("python")
    places = {"qwen-32b-nvfp4": str(out), "runs/qwen-32b-nvfp4-nvfp4-grpo-1/adapter": adapter}
    for name in sorted(places, key=len, reverse=True):
        assert f'"{name}"' in snippet
        snippet = snippet.replace(f'"{name}"', repr(places[name]))
    variables = {}
    exec(compile(snippet, "docs/serving.md", "exec"), variables)
    assert "12 pens" in capsys.readouterr().out
    tokens = variables["inputs"]["input_ids"]
    with torch.no_grad():
        theirs = variables["model"](tokens).logits.float()
        assert relative(theirs, ours(tokens).float()) < 0.03 < relative(theirs, qerl.load_model(str(out))(tokens))


def test_serving_commands_are_known():
    commands = [shlex.split(line, comments=True) for block in serving_blocks("sh") for line in block.splitlines()
                if line.startswith(".venv")]
    trained = [train_gsm8k.arguments([*words[2:], "--device", "cpu"]) for words in commands if words[1] == "train_gsm8k.py"]
    assert [s.save_quantized for s in trained] == ["qwen-32b-nvfp4", None] and trained[1].model == "qwen-32b-nvfp4"
    assert [words[1:3] for words in commands if words[1] == "-m"] == [["-m", "harness.merge"]] * 2
    curl, = (block for block in serving_blocks("sh") if "curl" in block)
    request = json.loads(shlex.split(curl.replace("\\\n", ""))[-1])
    assert request["messages"][0]["content"] == train_gsm8k.SYSTEM["answer"] and request["model"] + "=" in curl


# --------------------------------------------------------------------------------------------- what a hostile tester tried

def test_ctrl_c_in_bench_is_one_line(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["bench.py", "step", "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 130 and capsys.readouterr().err == "\nstopped\n"


def test_the_same_question_with_two_answers_is_left_out(tmp_path, capsys):
    path = tmp_path / "mixed.jsonl"
    write_jsonl(path, [{"question": "a?", "answer": "5"}, {"question": "b?", "answer": "7"}, {"question": "a?", "answer": "6"},
                       {"question": "b?", "answer": "7"}])
    kept = math_questions(str(path))
    assert [q["question"] for q in kept] == ["b?"]
    assert "1 of 2 questions stand there with different answers" in capsys.readouterr().out


def test_a_number_of_many_digits_is_no_answer(tmp_path):
    path = tmp_path / "large.jsonl"
    path.write_text('{"question": "a?", "answer": 1' + 400 * "0" + "}\n")
    with pytest.raises(qerl.UserError, match="no question or no answer"):
        math_questions(str(path))


def test_an_empty_question_is_no_question(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": " ", "answer": "#### 5"}\n')
    with pytest.raises(qerl.UserError, match="train.jsonl:1: not a line"):
        questions.load_questions(str(tmp_path), None, None)


def test_two_held_out_files_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "test.jsonl", [{"question": f"{folder}?", "answer": "5"}])
    with pytest.raises(qerl.UserError, match="two of them are called test.jsonl"):
        questions.load_questions(None, [str(tmp_path / "a" / "test.jsonl"), str(tmp_path / "b" / "test.jsonl")], None)


@pytest.mark.parametrize("flag", ["--prompts", "--eval-samples", "--steps", "--max-new-tokens"])
def test_counts_that_nothing_can_hold_are_refused(flag):
    with pytest.raises(qerl.UserError, match=f"{flag} 1{20 * '0'}: must be"):
        train_gsm8k.arguments([flag, f"1{20 * '0'}", "--updates", "1", "--device", "cpu"])


@pytest.mark.parametrize("name,entry", [
    ("metrics.jsonl", {"kl": "abc"}), ("metrics.jsonl", {"kl": [1.0]}), ("samples.jsonl", {"completions": 5}),
    ("samples.jsonl", {"completions": [3]})])
def test_a_changed_line_of_the_log_is_no_step(name, entry):
    step, = logged_steps(1)
    assert run_folder.is_step(step, name) and not run_folder.is_step(step | entry, name)


def test_the_report_of_changed_files_is_one_line(tmp_path, monkeypatch):
    def broken(folder):
        raise KeyError("accuracy")
    monkeypatch.setattr(report, "write_report", broken)
    with pytest.raises(qerl.UserError, match="its files are not those of a run"):
        report.report_on(str(tmp_path))


def test_entropy_of_one_question_has_no_standard_error(tmp_path):
    options = ["--prompts", "1", "--draws", "1", "--weights", "nvfp4", "nvfp4", "--slots", "8", "--sigmas", "0.01", "--device", "cpu"]
    assert entropy.main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "entropy.json").read_text())["rows"]
    assert [row["standard_error"] for row in rows] == [None]


def test_an_empty_box_is_no_answer(tmp_path):
    """Else a completion with an empty box would be right."""
    for answer in ("\\\\boxed{}", "so \\\\boxed{ }"):
        (tmp_path / "q.jsonl").write_text(f'{{"problem": "q", "answer": "{answer}"}}\n')
        with pytest.raises(qerl.UserError, match="q.jsonl:1: no question or no answer"):
            math_data.math_questions(str(tmp_path / "q.jsonl"))


def test_a_folder_is_no_file_of_questions(tmp_path):
    with pytest.raises(qerl.UserError, match="is a folder; name a file in it"):
        math_data.math_questions(str(tmp_path))


def test_a_run_that_another_study_has_finished_meanwhile_is_noted_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    options = ["--arms", "bf16", "--seeds", "0", "--out", str(tmp_path), *quick_study()]
    run_it, noted = subprocess.call, []

    def run_and_be_overtaken(command, **keywords):
        status = run_it(command, **keywords)
        if not noted:
            noted.append("the other study, in the same folder")
            assert claims.main(options) == 0
        return status
    monkeypatch.setattr(subprocess, "call", run_and_be_overtaken)
    assert claims.main(options) == 0 and noted
    assert len(study.finished_runs(str(tmp_path))) == 1


def test_metrics_that_lack_a_step_make_no_tables(tmp_path):
    steps = [{"step": 1}, {"step": 3}]
    for found, count in ((steps, 3), ([*steps, {"step": 2}], 3), ([{"step": 1}, {"step": 1}], 1)):
        with pytest.raises(qerl.UserError, match="m.jsonl: does not hold the steps 1 to .*, each once; remove the run"):
            study.require_all_steps("m.jsonl", found, count)
    study.require_all_steps("m.jsonl", [{"step": 1}, {"step": 2}], 2)


def test_entropy_without_noise_and_beside_a_damaged_file(tmp_path):
    options = ["--prompts", "1", "--draws", "1", "--weights", "bf16", "--sigmas", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert entropy.main(options) == 0
    assert (tmp_path / "entropy.png").exists()
    path = tmp_path / "entropy.json"
    whole = json.loads(path.read_text())
    for change in ({"weights": ["bf16"]}, {"sigma": None}, {"entropy": "x"}):
        path.write_text(json.dumps({"rows": [{**whole["rows"][0], **change}]}))
        with pytest.raises(qerl.UserError, match="a row is none of bench.py's; remove the file"):
            entropy.main(options)
    path.write_text("[" * 100_000)
    with pytest.raises(qerl.UserError, match="not what bench.py writes"):
        entropy.main(options)
    path.unlink()
    with pytest.raises(qerl.UserError, match="--prompts 100000: there are .* questions; lower it"):
        entropy.main([*options, "--prompts", "100000"])
    with pytest.raises(qerl.UserError, match="--data '': is empty"):
        entropy.main([*options, "--data", ""])


def test_folders_that_runs_choose_at_the_same_time_differ(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: choose_folder(f"{tmp_path}/small", resume=False), range(24)))
    assert len(set(chosen)) == 24 and all(map(os.path.isdir, chosen))


def test_advice_on_a_folder_in_use_can_be_followed(tmp_path):
    (tmp_path / "answers_now.jsonl").write_text("")
    with pytest.raises(qerl.UserError, match="already holds a run .*; choose another folder"):
        run_folder.open_folder(str(tmp_path), resume=False)
    with pytest.raises(qerl.UserError, match="has no checkpoint.safetensors"):
        run_folder.open_folder(str(tmp_path), resume=True)
    (tmp_path / "answers_now.jsonl").unlink()
    (tmp_path / "wandb_id").write_text("a")                                              # stopped before its first checkpoint
    with pytest.raises(qerl.UserError, match="add --resume"):
        run_folder.open_folder(str(tmp_path), resume=False)
    run_folder.open_folder(str(tmp_path), resume=True).close()


@pytest.mark.parametrize("flag", ["--model", "--data", "--out", "--eval", "--save-quantized"])
def test_an_empty_value_is_refused(monkeypatch, capsys, flag):
    assert f"{flag} '': is empty" in refused(monkeypatch, capsys, "--steps", 1, flag, "")


def test_a_short_name_is_explained_once_by_several_processes(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert full_name("Qwen2.5-3B") == "Qwen/Qwen2.5-3B-Instruct"
    assert capsys.readouterr().out.count("means") == 1


def test_models_of_one_name_are_no_study(tmp_path):
    with pytest.raises(qerl.UserError, match="--model same: is what two of them are called"):
        claims.main(["--model", "a/same", "b/same", "--out", str(tmp_path)])


def test_a_row_names_the_commit_at_which_its_run_began(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    commits = iter(["first", "second"])
    monkeypatch.setattr(study, "commit", lambda: next(commits))

    def call(command, **_):
        return finished_run(command)
    monkeypatch.setattr(study.subprocess, "call", call)
    args = study_arguments(tmp_path, "--seeds", "0")
    run_missing({"a": [], "b": []}, args)
    assert [row["commit"] for row in study.finished_runs(args.out)] == ["first", "second"]


def test_changed_code_is_no_commits(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    git = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    git(["git", "init", "-q"])
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "runs.jsonl").write_text("")
    git(["git", "add", "."])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"])
    monkeypatch.setattr(study, "TRAIN", str(tmp_path / "a.py"))
    clean = study.commit()
    (tmp_path / "runs.jsonl").write_text("a result")
    assert study.commit() == clean and re.fullmatch("[0-9a-f]{7,}", clean)
    (tmp_path / "a.py").write_text("2")
    assert study.commit() == f"{clean}-dirty"


def test_ranks_differ_at_any_step_and_seed():
    ranks, drawn = Ranks(), set()
    ranks.main = False
    for rank, seed, step in itertools.product((1, 2), (0, 2 ** 62), (0, 2 ** 31)):
        ranks.rank = rank
        generator = torch.Generator()
        ranks.differ(generator, seed, step)
        drawn.add(generator.initial_seed())
    assert len(drawn) == 8


def test_codes_are_found_anew_once_the_calibration_has_changed(qwen, monkeypatch):
    keys = []
    monkeypatch.setattr(quantizers, "cached_folder", lambda folder, name, key, make: keys.append(key))
    for source in ("a", "b"):
        monkeypatch.setattr(quantizers.inspect, "getsource", lambda part: source if part is calibration else "")
        monkeypatch.setattr(quantizers, "worked_sequences", lambda *_: [])
        quantizers.quantized_folder(qwen[0], "gptq", [], ByteText(), "cpu")
    assert keys[0] != keys[1]


def test_the_question_of_a_chat_is_its_users(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [{"role": "system", "content": "You are a bot."},
                                                      {"role": "user", "content": f"{k}?"}], "answer": str(k)} for k in range(2)])
    assert [q["question"] for q in math_questions(str(tmp_path / "rows.jsonl"))] == ["0?", "1?"]
    (tmp_path / "rows.csv").write_text("question,answer")
    with pytest.raises(qerl.UserError, match="none of .jsonl"):
        math_questions(str(tmp_path / "rows.csv"))


def test_a_run_does_not_go_on_with_other_weights_or_another_chat_template(qwen, data, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    options = ("--model", model, "--data", data, *QUICK, "--steps", 1, "--quantizer", "rtn", "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    tensors = load_file(model / "model.safetensors")
    save_file({name: t.flip(0).contiguous() for name, t in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    for more in ((), ("--eval-only",)):
        assert "was begun with other weights" in refused(monkeypatch, capsys, *options, "--resume", *more)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(train_gsm8k, "SYSTEM", dict.fromkeys(train_gsm8k.SYSTEM, "Sing."))
    assert "other questions, answers or prompts" in refused(monkeypatch, capsys, *options, "--resume")


def test_a_cut_off_model_of_the_cache_is_made_again(qwen, cache, capsys):
    def make(path):
        shutil.copy(f"{qwen[0]}/model.safetensors", path)
    folder = packed_folder.cached_folder(qwen[0], "codes", ["key"], make)
    os.truncate(f"{folder}/model.safetensors", 1000)
    assert packed_folder.cached_folder(qwen[0], "codes", ["key"], make) == folder
    assert "is broken and is made again" in capsys.readouterr().out
    assert os.path.getsize(f"{folder}/model.safetensors") == os.path.getsize(f"{qwen[0]}/model.safetensors")


def test_a_saved_model_has_the_tokenizer_of_now(qwen, data, tmp_path, cache, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    for name in ("first", "second"):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "note": name}))
        run_main(monkeypatch, "--model", model, "--data", data, "--device", "cpu", "--save-quantized", tmp_path / name)
        assert json.loads((tmp_path / name / "generation_config.json").read_text())["note"] == name
        assert "quantization_config" in json.loads((tmp_path / name / "config.json").read_text())


def test_an_index_names_no_file_elsewhere(qwen, tmp_path):
    shutil.copytree(qwen[0], tmp_path / "model")
    os.rename(tmp_path / "model/model.safetensors", tmp_path / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / "weights.safetensors"), "../weights.safetensors")}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(qerl.UserError, match="names ../weights.safetensors, which is no file of this folder"):
        qerl.load_model(str(tmp_path / "model"))


def test_torchruns_variables_half_set_are_one_process(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for name, value in (("WORLD_SIZE", "x"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        assert Ranks().count == 1
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Ranks().count == 2


@pytest.mark.parametrize("closed", [True, False])
def test_a_run_ends_well_where_nobody_can_read_it(closed):
    """Standard output closed before the start, or of an encoding without a folder's letters."""
    program = "from harness.stops import one_line\nwith one_line():\n    print('\\xfc')"
    command = [sys.executable, "-c", program]
    if closed:
        command = ["bash", "-c", f"{shlex.join(command)} >&-"]
    ended = subprocess.run(command, cwd=HERE, env=os.environ | {"PYTHONIOENCODING": "ascii:strict"}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout == ("" if closed else "\\xfc\n")
