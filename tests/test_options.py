"""What a run can be asked for beside the paper's recipe: choosing by validation, own rewards and so on."""
import itertools
import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers

import qerl
import train_gsm8k
from common import LEARNING, recorded, refused, run_main
from harness.export import load_adapter
from harness.folders import read_jsonl


def size(tensors):
    return sum(t.double().square().sum() for t in tensors.values()).item()


def test_the_best_adapter_on_questions_kept_apart(quick, data, monkeypatch, tmp_path):
    """They are the last training questions; none of them is trained on."""
    kept = [q["question"] for q in read_jsonl(f"{data}/train.jsonl")[-8:]]
    asked = []
    accuracies = iter([0.2, 0.5, 0.3])
    evaluate = train_gsm8k.evaluate

    def evaluated(model, tokenizer, questions, settings, when, ranks):
        result = evaluate(model, tokenizer, questions, settings, when, ranks)
        if when == "validation":
            asked.append([q["question"] for q in questions])
            result["accuracy_validation"] = next(accuracies)
        return result

    monkeypatch.setattr(train_gsm8k, "evaluate", evaluated)
    calls = recorded(monkeypatch)
    run_main(monkeypatch, *quick, *LEARNING, "--steps", 6, "--reward", "random",
             "--validation", 8, "--eval-every", 2, "--out", tmp_path)
    assert asked == [kept] * 3
    rollouts = [call for call in calls if call.drawn_with == {(1.0, 1.0)}]
    prompts_kept = {tuple(p) for call in calls for p in call.prompts if len(call.prompts) == 8}
    assert not prompts_kept & {tuple(p) for call in rollouts for p in call.prompts}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"] == {"accuracy": 0.5, "step": 4}
    best = safetensors.torch.load_file(tmp_path / "adapter-best/adapter_model.safetensors")
    assert abs(size(best) - size(rollouts[4].policy)) < 1e-9           # the policy after four steps
    assert abs(size(best) - size(rollouts[5].policy)) > 1e-6
    log = read_jsonl(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in log if "greedy_validation" in m] == [2, 4, 6]


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers():
    for right in itertools.product([0, 1], repeat=4):
        for k in (1, 2, 4):
            chosen = [any(some) for some in itertools.combinations(right, k)]
            expected = sum(chosen) / len(chosen)
            assert train_gsm8k.pass_at(k, sum(right), 4) == pytest.approx(expected)


def short(folder, body):
    path = folder / "words.py"
    path.write_text(f"def short(completion, question):\n    {body}\n")
    return f"{path}:short"


def test_an_own_reward_is_what_training_sees(tmp_path):
    """With its weight, and beside one of ours; it gets the question as a dict."""
    own = short(tmp_path, "return -len(completion.split()) + float(question['right'])")
    assert train_gsm8k.find_reward(own)("two words", {"right": 5}) == 3
    assert train_gsm8k.find_reward(own) is train_gsm8k.find_reward(own)      # its file is run once
    both = train_gsm8k.find_reward(f"answer+0.5*{own}")
    assert both("so \\boxed{5}", {"right": 5}) == 1 + 0.5 * 3
    assert train_gsm8k.instruction(f"0.1*{own}+paper") == train_gsm8k.SYSTEM["paper"]


def test_a_run_goes_on_with_the_reward_that_it_began_with(tmp_path, monkeypatch, capsys):
    options = ("--reward", short(tmp_path, "return len(completion)"), "--prompts", 2, "--updates", 1,
               "--skip-eval-before", "--eval-questions", 2, "--out", tmp_path / "run")
    run_main(monkeypatch, *options, "--steps", 1)
    short(tmp_path, "return -len(completion)")
    line = refused(monkeypatch, capsys, "--resume", "--out", tmp_path / "run", "--steps", 2)
    assert "was begun, the file of --reward changed" in line


@pytest.mark.parametrize("body,said", [
    ("return 1 / 0", "ZeroDivisionError: division by zero ({path}:2)"),
    ("return float('nan')", "gave nan, which is no finite number"),
    ("return 'good'", "gave 'good', which is no finite number"),
    ("return 1 +", "SyntaxError"),
])
def test_an_own_reward_that_fails_is_one_line(tmp_path, monkeypatch, capsys, body, said):
    own = short(tmp_path, body)
    line = refused(monkeypatch, capsys, "--reward", own, "--steps", 1, "--skip-eval-before",
                   "--out", tmp_path / "run")
    assert line.startswith(f"error: --reward {own}")
    assert said.format(path=own.partition(":")[0]) in line


@pytest.mark.parametrize("name,said", [
    ("none.py:f", "there is no file none.py"),
    ("good", "unknown; choose answer, paper, random or FILE.py:FUNCTION"),
    ("heavy*answer", "heavy is no number"),
])
def test_an_unknown_reward_is_refused(monkeypatch, capsys, name, said):
    assert said in refused(monkeypatch, capsys, "--reward", name)


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_adapter(folder, out, rank=4, layers=PROJECTIONS):
    """A random adapter that PEFT made and saved -> PEFT's model."""
    import peft
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=layers, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    model.save_pretrained(out)
    return model


def test_training_starts_from_an_adapter_of_peft(quick, qwen, tmp_path, monkeypatch, capsys):
    """Its policy is PEFT's; the KL to the reference is 0 in the first minibatch, whose policy it is."""
    torch.manual_seed(0)
    theirs = peft_adapter(qwen[0], tmp_path / "adapter", rank=2)
    ours = qerl.load_model(qwen[0], "bf16", lora_rank=2, lora_alpha=8)
    ours.fingerprints = {}
    load_adapter(ours, tmp_path / "adapter")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        before = ours(tokens)
        for p in qerl.trainable(ours).values():
            p += 0.1
        with qerl.adapters_off(ours):
            assert ours(tokens).equal(before)
        assert not ours(tokens).equal(before)
    run_main(monkeypatch, *quick, *LEARNING, "--steps", 2, "--weights", "bf16",
             "--reward", "random", "--beta", 0.1, "--skip-eval-before",
             "--adapter", tmp_path / "adapter")
    assert "with which --beta compares" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["settings"]["lora_rank"], summary["settings"]["lora_alpha"]) == (2, 8)
    kl = [m["kl"] for m in read_jsonl(tmp_path / "run/metrics.jsonl")]
    assert kl[0] < 1e-9 < kl[1]


@pytest.mark.parametrize("options,said", [
    (dict(layers=PROJECTIONS[:4]), "does not fit, the adapter lacks base_model.model.model.layers.0.mlp"),
    (None, "adapter_config.json cannot be read"),
])
def test_an_adapter_that_does_not_fit_is_refused(quick, qwen, tmp_path, monkeypatch, capsys, options, said):
    if options:
        peft_adapter(qwen[0], tmp_path / "adapter", **options)
    options = (*quick, "--adapter", tmp_path / "adapter")
    assert said in refused(monkeypatch, capsys, *options)


def test_the_chat_template_gets_what_the_user_says(quick, qwen, tmp_path, monkeypatch, capsys):
    """Qwen3's way to switch thinking off; the first prompt is shown with its special tokens."""
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is false %}<think></think>{% endif %}")
    (model / "chat_template.jinja").write_text(template)
    text = [train_gsm8k.ChatText(str(model), "Reason.", options).prompt("1 + 1?")
            for options in ({}, {"enable_thinking": False})]
    assert text[0] == text[1][:len(text[0])] != text[1]
    run_main(monkeypatch, *quick, "--model", model, "--eval-only", "--eval-samples", 4,
             "--chat-template-kwargs", '{"enable_thinking": false}')
    said = capsys.readouterr().out
    assert all(f"pass@{k} now: " in said for k in (1, 2, 4)) and "pass@8" not in said
    shown = next(line for line in said.splitlines() if "the first prompt" in line)
    assert "<think></think>'" in shown.replace(" ", "")
    line = refused(monkeypatch, capsys, "--chat-template-kwargs", "[1]")
    assert "is no JSON object" in line
