"""The lab's checker gives the right points, names likely mistakes, survives what students write."""
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import shutil
import textwrap
import types

import pytest

import qerl
import train_gsm8k
from common import run_python
from test_qerl import HERE

LAB = HERE / "docs/lab"
SPEC = importlib.util.spec_from_file_location("check", LAB / "check.py")
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)

SOLUTION = "import contextlib\nimport torch\nimport qerl\nfrom qerl import *\n"


def instead(name, body, decorator=""):
    """The solution, where this function has another body."""
    signature = inspect.signature(getattr(qerl, name))
    # What harness/fast.py hands in, a function, is no business of the lab.
    asked = [p for p in signature.parameters.values() if p.default is p.empty or not callable(p.default)]
    signature = signature.replace(parameters=asked)
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"{SOLUTION}\n{decorator}\ndef {name}{signature}:\n{body}\n"


# Each is a likely mistake: a function's body, what of its points is left, and words of the help.
MISTAKES = {
    "ties rounded up": ("quantize_nvfp4", """
        x = weight / (weight.abs().max().clamp_min(1e-9) / 6)
        bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        codes = (torch.bucketize(x.abs(), bounds, right=True) + 8 * (x < 0)).to(torch.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4, *qerl.quantize_nvfp4(weight)[1:]
        """, 7, "you round ties up"),
    "all small scales raised": ("quantize_nvfp4", """
        _, scale, global_scale = qerl.quantize_nvfp4(weight)
        scale = scale.float().clamp(min=0.125)
        packed = qerl.encode_e2m1(weight, scale / global_scale)
        return packed, scale.to(torch.float8_e4m3fn), global_scale
        """, 14, "you raise every block scale below 0.125"),
    "scale not rounded": ("quantize_nvfp4", """
        packed, scale, global_scale = qerl.quantize_nvfp4(weight)
        unrounded = weight.unflatten(1, (-1, 16)).abs().amax(-1).clamp_min(1e-9) / 6
        return qerl.encode_e2m1(weight, unrounded), scale, global_scale
        """, 11, "before its rounding"),
    "scales of the first row": ("dequantize_blocks", """
        return qerl.dequantize_blocks(packed, table, scale[:1].expand_as(scale), dtype)
        """, 3, "you use the scales of the first row"),
    "no gradient of LoRA's part": ("lora_linear", """
        y = weight.multiply(x) + scale * (x.detach() @ A.T) @ B.T
        return y if bias is None else y + bias
        """, 7, "you stop the gradient of LoRA's part"),
    "no finally": ("adaptive_quantization_noise", """
        with qerl.adaptive_quantization_noise(model, sigma, generator):
            pass
        norms = [norm for norm in model.modules() if isinstance(norm, qerl.RMSNorm)]
        for norm in norms:
            z = torch.randn(norm.weight.shape, generator=generator)
            norm.noisy_weight = norm.weight.detach() + sigma * z
        yield
        for norm in norms:
            norm.noisy_weight = None
        """, 10, "it should be in try and finally"),
    "the model's own norms alone": ("adaptive_quantization_noise", """
        with qerl.adaptive_quantization_noise(model[0], sigma, generator):
            yield
        """, 7, "model.modules() should give all"),
    "uniform noise": ("adaptive_quantization_noise", """
        with qerl.adaptive_quantization_noise(model, sigma, generator):
            for norm in model.modules():
                if isinstance(norm, qerl.RMSNorm):
                    z = torch.rand(norm.weight.shape, generator=generator) - 0.5
                    norm.noisy_weight = norm.weight.detach() + 12 ** 0.5 * sigma * z
            yield
        """, 7, "you draw from a uniform distribution"),
    "error swallowed": ("adaptive_quantization_noise", """
        with qerl.adaptive_quantization_noise(model, sigma, generator):
            with contextlib.suppress(Exception):
                yield
        """, 10, "you swallow the error"),
    "no yield": ("adaptive_quantization_noise", "pass", 0, "you have no `yield`"),
    "start and end not used": ("noise_sigma", """
        return qerl.noise_sigma(step, steps, stages, schedule=schedule)
        """, 6, "they should be the arguments start and end"),
    "not mapped back": ("sample", """
        token, logprob, entropy = qerl.sample(logits, temperature, top_p, generator)
        place = logits.argsort(descending=True).argsort().gather(-1, token[:, None])[:, 0]
        return (token if temperature == 0 else place), logprob, entropy
        """, 3, "you give the place in the sorted row"),
    "cut before the temperature": ("sample", """
        cut = qerl.nucleus(logits.softmax(-1), top_p) == 0
        token, _, _ = qerl.sample(logits.masked_fill(cut, -1e9), temperature, 1.0, generator)
        return token, *qerl.sample(logits, temperature, top_p, generator)[1:]
        """, 11, "you cut before the temperature"),
    "one set for all rows": ("sample", """
        p = (logits.float() / (temperature or 1.0)).softmax(-1)
        entropy = -(p * p.log()).sum(-1)
        kept = p * (qerl.nucleus(p[:1], top_p) > 0)
        token = p.argmax(-1, keepdim=True) if temperature == 0 else torch.multinomial(
            kept, 1, generator=generator)
        return token[:, 0], p.gather(-1, token)[:, 0].log(), entropy
        """, 8, "you cut every row as the first"),
    "generator not used": ("sample", """
        return qerl.sample(logits, temperature, top_p)
        """, 11, "you do not draw from `generator`"),
    "biased deviation": ("group_advantages", """
        centred = rewards - rewards.mean(1, keepdim=True)
        return centred / (rewards.std(1, keepdim=True, correction=0) + 1e-4)
        """, 0, "with the divisor G;"),
    "rounding left": ("group_advantages", """
        return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        """, 7, "you leave what the rounding of the mean gives"),
    "shifted by one": ("token_logprobs", """
        result = torch.zeros(completions.shape)
        for i, prompt in enumerate(prompts):
            row = torch.cat([torch.tensor(prompt), completions[i]])
            table = (model(row[None])[0] / temperature).log_softmax(-1)
            for j in range(length[i]):
                result[i, j] = table[len(prompt) + j, completions[i, j]]
        return result
        """, 2, "predict the NEXT token"),
    "padding by its id": ("token_logprobs", """
        whole = torch.full_like(length, completions.shape[1])
        logprobs = qerl.token_logprobs(model, prompts, completions, whole, temperature)
        return logprobs * (completions != 0)
        """, 6, "you count padding"),
    "clip on the wrong side": ("policy_loss", """
        ratio = (logprobs - old_logprobs).exp()
        advantage = advantages.view(len(logprobs), -1)
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        gain = torch.maximum(ratio * advantage, clipped * advantage)
        x = torch.zeros_like(logprobs) if ref_logprobs is None else ref_logprobs - logprobs
        kl = x.exp() - x - 1
        return ((beta * kl - gain) * weights).sum(), (kl * weights).sum().detach()
        """, 6, "you clip on the wrong side"),
    "old log-probabilities and bounds not used": ("policy_loss", """
        return qerl.policy_loss(logprobs, 0 * logprobs.detach(), advantages, weights, 0.2, 0.28,
                                ref_logprobs, beta, None, tis, objective)
        """, 12, "you ignore old_logprobs"),
    "K3 without weights or gradient": ("policy_loss", """
        loss, kl = qerl.policy_loss(logprobs, old_logprobs, advantages, weights, clip_low, clip_high,
                                    None, 0.0, None, tis, objective)
        if ref_logprobs is not None:
            x = (ref_logprobs - logprobs).detach()
            kl = (x.exp() - x - 1).sum()
        return loss + beta * kl, kl
        """, 11, "you leave out the weights of K3"),
}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_likely_mistake_costs_its_points_and_is_named(mistake, tmp_path):
    name, body, left, help_ = MISTAKES[mistake]
    decorator = "@contextlib.contextmanager" if name.startswith("adaptive") else ""
    text = instead(name, body, decorator)
    points, lines = check.grade(name, write(tmp_path / "student.py", text))
    assert points == left, lines
    assert any(line.startswith("  likely: ") and help_ in line for line in lines), lines


def run_check(*args):
    """(exit status, what --json prints)"""
    result = run_python(LAB / "check.py", "--json", *args)
    assert "Traceback" not in result.stderr
    return result.returncode, json.loads(result.stdout)


def test_a_right_solution_has_all_points(tmp_path):
    """It is qerl.py, which other tests hold to the libraries: so the recorded results are right."""
    status, result = run_check("--file", write(tmp_path / "solution.py", SOLUTION))
    assert (status, result["points"], result["of"]) == (0, 100, 100), result


NOT_WRITTEN = "not written yet: the file has no `def` of it, or still NotImplementedError"


def test_hidden_cases_are_made_as_the_page_says(tmp_path):
    """Its code computes the results of another model, and a right solution has them."""
    for folder in ("lab", "grading"):
        shutil.copytree(LAB, tmp_path / "docs" / folder)
    code = re.search(r"```python\n(.*?)```", (LAB / "instructor.md").read_text(), re.DOTALL)[1]
    made = run_python("-c", code, cwd=tmp_path, PYTHONPATH=str(HERE))
    assert made.returncode == 0, made.stderr
    assert json.loads((tmp_path / "docs/grading/cases.json").read_text()) != check.CASES
    solution = write(tmp_path / "solution.py", SOLUTION)
    graded = run_python("docs/grading/check.py", "--json", "--file", solution, cwd=tmp_path,
                        PYTHONPATH=str(HERE))
    assert json.loads(graded.stdout)["points"] == 100


def test_the_empty_file_has_none():
    status, result = run_check()
    assert (status, result["points"], result["of"]) == (1, 0, 100)
    assert {tuple(one["help"]) for one in result["functions"].values()} == {(NOT_WRITTEN,)}


BROKEN = SOLUTION + """
def noise_sigma(*args, **options):
    while True:
        pass

def sample(*args, **options):
    exit(3)

def group_advantages(rewards):
    print("a print is no harm")
    return rewards.no_such_method()
"""


def test_a_function_that_hangs_exits_or_raises_costs_its_own_points_alone(tmp_path):
    file = write(tmp_path / "broken.py", BROKEN)
    names = ["noise_sigma", "sample", "group_advantages", "lora_linear"]
    status, result = run_check(*names, "--file", file, "--limit", 15)
    functions = result["functions"]
    assert (status, [functions[name]["points"] for name in names]) == (1, [0, 0, 0, 8])
    assert "no result within 15 seconds" in functions["noise_sigma"]["help"][0]
    assert "exit()" in functions["sample"]["help"][-1]
    line = BROKEN.splitlines().index("    return rewards.no_such_method()") + 1
    assert f"AttributeError in line {line} of broken.py" in functions["group_advantages"]["help"][2]


def test_a_wrong_dtype_costs_half_and_a_comment_nothing(tmp_path):
    text = instead("dequantize_blocks", """
        # raise NotImplementedError
        return qerl.dequantize_blocks(packed, table, scale, torch.float64)
        """)
    assert check.grade("dequantize_blocks", write(tmp_path / "student.py", text))[0] == 4


@pytest.mark.parametrize("end, line", [
    ("del sample", NOT_WRITTEN),
    ("import functools\nsample = functools.partial(sample, top_p=1)", NOT_WRITTEN),
    ("def sample(*args, **options): raise ValueError('two\\nlines')",
     "  found ValueError in line 6 of student.py: two")])
def test_what_is_no_function_and_what_raises_is_said_in_a_line(end, line, tmp_path):
    _, lines = check.grade("sample", write(tmp_path / "student.py", f"{SOLUTION}\n{end}\n"))
    assert line in lines, lines


def test_a_file_that_does_not_load_is_said_in_a_line(tmp_path):
    file = write(tmp_path / "broken.py", "def sample(:\n")
    result = run_python(LAB / "check.py", "sample", "--file", file)
    assert result.returncode == 1 and not result.stderr
    assert "broken.py cannot be loaded: SyntaxError" in result.stdout


@pytest.mark.parametrize("args", [["no_such"], ["--file", "no_such.py"]])
def test_what_cannot_be_checked_is_refused(args):
    result = run_python(LAB / "check.py", *args)
    assert result.returncode == 2 and "no_such" in result.stderr.splitlines()[-1]


def test_the_functions_are_called_as_those_of_qerl():
    """So that the training can use them."""
    student = types.SimpleNamespace(**runpy.run_path(str(LAB / "student.py")))
    for name in check.CASES:
        theirs, ours = (list(inspect.signature(getattr(module, name)).parameters.values())
                        for module in (qerl, student))
        assert theirs[:len(ours)] == ours, name


# --------------------------------------------------------------------------------------------------
# The page

PAGE = (LAB / "README.md").read_text(encoding="utf-8")


def test_the_page_lists_the_functions_with_their_points():
    rows = re.findall(r"^\| \d \| `(\w+)` \| (\d+) \|", PAGE, flags=re.MULTILINE)
    points = {name: sum(case["points"] for case in cases) for name, cases in check.CASES.items()}
    assert {name: int(of) for name, of in rows} == points
    assert sum(points.values()) == 100


def test_the_commands_of_the_page_are_understood(tmp_path, monkeypatch):
    """Its trainings, but for those with a student's file."""
    reward = re.search(r"cat > (\S+) << 'END'\n(.*?)END\n", PAGE, flags=re.DOTALL)
    write(tmp_path / reward[1], reward[2])
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^ *python train_gsm8k\.py (.*)$", PAGE, flags=re.MULTILINE)
    understood = [train_gsm8k.arguments(shlex.split(command.replace("$seed", "1")))
                  for command in commands if "--plain" not in command]
    assert understood
