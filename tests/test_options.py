"""What a run can be asked for beside the paper's recipe: choosing by validation, own rewards and so on."""
import itertools
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from harness import fast
import train_gsm8k
from common import LEARNING, refused, run_main, run_python
from harness.errors import UserError
from harness.evaluation import pass_at
from harness.export import adapter_settings, adapter_tensors, load_adapter
from harness.folders import read_json, read_jsonl
from test_qerl import TOKENS, relative


def test_the_best_adapter_on_questions_kept_apart(quick, data, monkeypatch, tmp_path, capsys):
    """They are the last training questions."""
    last = [q["question"] for q in read_jsonl(f"{data}/train.jsonl")[-8:]]
    accuracies = iter([0.2, 0.5, 0.3])
    adapters = []

    def evaluated(model, tokenizer, questions, settings, when, ranks):
        if when == "after":
            return {}
        assert [q["question"] for q in questions] == last
        adapters.append({name: t.clone() for name, t in adapter_tensors(model).items()})
        return {"accuracy_validation": next(accuracies)}

    monkeypatch.setattr(train_gsm8k, "evaluate", evaluated)
    run_main(*quick, LEARNING,
             "--steps 6 --reward random --validation 8 --eval-every 2 --skip-eval-before --out", tmp_path)
    summary = read_json(tmp_path / "summary.json")
    assert summary["best"] == {"accuracy": 0.5, "step": 4}
    assert "best in validation: step 4, 50.0% right" in capsys.readouterr().out
    log = read_jsonl(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in log if "accuracy_validation" in m] == [2, 4, 6]
    best = load_file(tmp_path / "adapter-best/adapter_model.safetensors")
    torch.testing.assert_close(best, adapters[1], rtol=0, atol=0)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers():
    for right in itertools.product([0, 1], repeat=4):
        for k in (1, 2, 4):
            chosen = list(map(any, itertools.combinations(right, k)))
            expected = sum(chosen) / len(chosen)
            assert pass_at(k, sum(right), 4) == pytest.approx(expected)


@pytest.mark.parametrize("body,said", {
    "return 1 / 0": "ZeroDivisionError: division by zero ({path}:2)",
    "return float('nan')": "gave nan, which is no finite number",
    "raise SystemExit": "SystemExit: ",
    "return '1'": "TypeError: must be real number, not str",
    "return 1 +": "SyntaxError",
    "pass\ndef short(completion): pass": "takes 1 positional argument but 2 were given",
}.items())
def test_an_own_reward_that_fails_is_one_line(quick, tmp_path, monkeypatch, body, said):
    """Before anything is sampled."""
    monkeypatch.setattr(fast, "generate", None)
    path = tmp_path / "words.py"
    path.write_text(f"def short(completion, question):\n    {body}\n")
    line = refused(*quick, "--reward", f"{path}:short")
    assert line.startswith(f"error: --reward {path}:short")
    assert said.format(path=path) in line


IN_A_POOL = """
from __future__ import annotations
import concurrent.futures, dataclasses, multiprocessing, pickle, typing

@dataclasses.dataclass
class Words:
    count: int

def counted(text):
    return Words(len(text.split()))

def short(completion: str, question: dict):
    assert typing.get_type_hints(Words) == {"count": int}
    assert pickle.loads(pickle.dumps(counted)) is counted
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(counted, completion).result().count
"""


def test_an_own_reward_is_a_module(tmp_path):
    """It may have dataclasses, pickles and processes."""
    path = tmp_path / "reward_with_a_pool.py"
    path.write_text(IN_A_POOL)
    assert run_python("-c", f"""
import train_gsm8k
if __name__ == "__main__":
    print(train_gsm8k.find_reward("{path.as_posix()}:short")("a b c", {{}}))
""").stdout == "3.0\n"


def test_what_an_own_reward_changes_in_a_question_is_its_own(tmp_path):
    path = tmp_path / "careless.py"
    path.write_text("def f(text, question):\n    question.get('prompt', []).clear()\n"
                    "    question.clear()\n    return 1\n")
    question = {"right": 5, "prompt": [1]}
    train_gsm8k.find_reward(f"{path}:f")("", question)
    assert question == {"right": 5, "prompt": [1]}


def peft_adapter(folder, out, layers="all-linear"):
    """A random adapter that PEFT made and saved -> PEFT's model."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=layers, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    model.save_pretrained(out)
    return model


def test_training_starts_from_an_adapter_of_peft(quick, qwen, tmp_path):
    """Its policy is PEFT's; the KL to the reference is 0 in the first minibatch, whose policy it is."""
    theirs = peft_adapter(qwen, tmp_path / "adapter")
    ours = fast.load_model(qwen, "bf16", lora_rank=2, lora_alpha=8)
    load_adapter(ours, tmp_path / "adapter")
    with torch.no_grad():
        assert relative(ours(TOKENS), theirs(TOKENS).logits) < 1e-4
    run_main(*quick, LEARNING, "--steps 2 --weights bf16 --reward random --beta 0.1 --skip-eval-before",
             "--adapter", tmp_path / "adapter")
    settings = read_json(tmp_path / "run/summary.json")["settings"]
    assert (settings["lora_rank"], settings["lora_alpha"]) == (2, 8)
    kl = [m["kl"] for m in read_jsonl(tmp_path / "run/metrics.jsonl")]
    assert kl[0] < 1e-9 < kl[1]


def test_an_adapter_that_does_not_fit_is_refused(quick, qwen, tmp_path):
    options = (*quick, "--adapter", tmp_path)
    assert "adapter_config.json cannot be read" in refused(*options)
    peft_adapter(qwen, tmp_path, ["q_proj", "k_proj", "v_proj", "o_proj"])
    assert "does not fit; use an adapter of this model" in refused(*options)
    assert "--lora-alpha 99.0: is 8.0 in --adapter" in refused(*options, "--lora-alpha 99")
    assert "--lora-rank 1: is 2 in --adapter" in refused(*options, "--lora-rank 1")


def test_an_adapter_of_other_codes_is_said(quick, qwen, tmp_path, capsys, cache):
    """The model's own rounding and GPTQ's codes are two policies, and so are those of two seeds."""
    run_main(*quick, LEARNING, "--steps 1 --skip-eval-before --quantizer gptq --reward random")
    measured = *quick[:-2], "--eval-only --adapter", tmp_path / "run/adapter"
    assert "warning" not in capsys.readouterr().out
    for flags, warned in (("--quantizer gptq", False), ("--quantizer gptq --seed 1", True), ("", True)):
        run_main(*measured, *flags.split())
        assert ("run/adapter: was trained on" in capsys.readouterr().out) == warned


@pytest.mark.parametrize("command", ["", "--engine plain", "--save-quantized packed", "--dry-run"])
def test_a_model_that_holds_an_adapter_says_so(qwen, data, tmp_path, monkeypatch, command):
    """Beside the whole model, where transformers would apply it."""
    monkeypatch.chdir(tmp_path)
    peft_adapter(qwen, tmp_path / "model")
    shutil.copytree(qwen, tmp_path / "model", dirs_exist_ok=True)
    line = refused("--model", "model", "--data", data, "--device cpu", *command.split())
    assert "model model: holds an adapter, adapter_" in line and "give that by --adapter" in line
    assert not (tmp_path / "packed").exists()


PLAIN = dict(lora_dropout=0.1, init_lora_weights="gaussian", revision="main", task_type="CAUSAL_LM")


@pytest.mark.parametrize("fields", [
    dict(r=0), dict(alpha_pattern={"o_proj": 4}), dict(init_lora_weights="olora"),
    dict(a_field_of_tomorrow=1),
], ids=str)
def test_only_plain_lora_is_taken(tmp_path, fields):
    """With the fields of PEFT that do not change the function; others are refused by name."""
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=2, lora_alpha=3).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    config = read_json(path) | PLAIN
    path.write_text(json.dumps(config))
    assert adapter_settings(tmp_path) == {"lora_rank": 2, "lora_alpha": 3}
    path.write_text(json.dumps(config | fields))
    with pytest.raises(UserError, match=f" {next(iter(fields))} "):
        adapter_settings(tmp_path)


def test_the_chat_template_gets_what_the_user_says(quick, qwen, tmp_path, capsys):
    """Qwen3's way to switch thinking off; the first prompt is shown with its special tokens."""
    model = tmp_path / "model"
    shutil.copytree(qwen, model)
    (model / "chat_template.jinja").write_text(
        "{{ messages[-1].content }}<eos>{% if enable_thinking is false %}<think></think>{% endif %}")
    run_main(*quick, "--model", model, "--eval-only --chat-template-kwargs", '{"enable_thinking": false}')
    said = capsys.readouterr().out
    shown = next(line for line in said.splitlines() if "the first prompt" in line)
    assert shown.replace(" ", "").endswith("<eos><think></think>'")
