"""Fixtures that several test files use."""
# First, because test_qerl sets the number of threads before PyTorch starts.
from test_qerl import CUDA, family, made_qwen, model, qwen, same_random_numbers  # noqa: F401

from unittest import mock

import matplotlib.axis
import matplotlib.figure
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from common import QUICK, QUIZ_EOS, QUIZ_TOKENS, needs_fork, run_main, run_python
from harness import answers, folders, run
from harness.folders import write_jsonl
from harness.small_policy import made_up_problems


def pytest_pyfunc_call(pyfuncitem):
    """On a machine with a GPU a test that forks runs in a pytest of its own that sees none.

    A child of a process that has used a GPU can use neither CUDA nor autograd.
    """
    if CUDA and needs_fork.mark in pyfuncitem.iter_markers():
        ended = run_python("-m", "pytest", pyfuncitem.nodeid, CUDA_VISIBLE_DEVICES="")
        assert "1 passed" in ended.stdout, ended.stdout
        return True


@pytest.fixture(scope="session", autouse=True)
def tex_needs_math_verify():
    """A test that comes to compare TeX skips where math-verify is missing."""
    comparison = answers.tex_comparison
    with mock.patch.object(answers, "tex_comparison",
                           lambda: pytest.importorskip("math_verify") and comparison()):
        yield


@pytest.fixture(scope="module")
def quiz(tmp_path_factory):
    """A folder with a tiny random policy and problems of which it gets about a third right.

    Ten questions to train on and six held out, of one to four letters; the answer is 1 or 2.
    """
    folder = tmp_path_factory.mktemp("quiz")
    torch.manual_seed(5)
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=len(QUIZ_TOKENS), max_position_embeddings=64,
        eos_token_id=QUIZ_EOS,
    )
    policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for p in policy.parameters():
        p.data = 0.2 * torch.randn_like(p) if p.dim() > 1 else p.data + 0.3 * torch.randn_like(p)
    policy.save_pretrained(folder)
    vocabulary = {token: i for i, token in enumerate(QUIZ_TOKENS)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), eos_token="<eos>",
        chat_template="{{ messages[-1]['content'].split()[-1] }}",
    ).save_pretrained(folder)
    questions = "bb ccb baaa bcaa bba ba b bca cbab ccc cb abcc c ccac aa baa".split()
    problems = [{"question": q, "answer": f"#### {1 + len(q) % 2}"} for q in questions]
    write_jsonl(folder / "train.jsonl", problems[:10])
    write_jsonl(folder / "test.jsonl", problems[10:])
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    train, held_out = made_up_problems()
    write_jsonl(folder / "train.jsonl", train[:64])
    write_jsonl(folder / "test_first.jsonl", held_out[:6])
    return str(folder)


@pytest.fixture
def quick(request, qwen, data, tmp_path):
    """The command line of a run of a few seconds in tmp_path/run; flags behind it win."""
    engine = getattr(request, "param", "fast")
    return ("--model", qwen, "--data", data, *QUICK, "--engine", engine, "--out", tmp_path / "run")


@pytest.fixture(scope="session", autouse=True)
def plain_pictures():
    """Pictures without axes and layout, which take most of a short run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "set_layout_engine", lambda *_, **__: None)
        patch.setattr(matplotlib.axis.Axis, "get_visible", lambda axis: False)
        yield


@pytest.fixture(scope="module")
def finished(qwen, data, tmp_path_factory):
    """The folder of a run of two steps, which a test copies before it breaks it.

    Another version made it, which has a setting more than ours and lacks one.
    """
    out = tmp_path_factory.mktemp("finished") / "run"
    lasting = run.lasting

    def theirs(settings):
        return {name: v for name, v in lasting(settings).items() if name != "exact"} | {"more": 3}

    with mock.patch.object(run, "lasting", theirs):
        run_main("--model", qwen, "--data", data, *QUICK, "--steps 2 --out", out)
    return out


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder in which quantised models are kept, for one test."""
    monkeypatch.setattr(folders, "CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
