"""One-line faults, and whether the tests that are named for them notice them.

    python tests/faults.py                all of them, one after the other: minutes
    python tests/faults.py WORD           those in whose file, text or tests this stands

The checkout is copied to a temporary folder. There each fault is put into its file, its tests run,
and the file is put back. A fault is caught if a test fails, and missed if all pass.
"""
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# {file: [(old text, new text, arguments of pytest)]}
FAULTS = {
    "qerl.py": [
        ("torch.nextafter(E2M1_BOUNDS[1::2], torch.zeros(3))", "E2M1_BOUNDS[1::2]",
         "test_qerl.py -k bytes_equal"),
        ("torch.finfo(torch.float8_e4m3fn).eps, scale)", "1.0, scale)",
         "test_qerl.py -k bytes_equal"),
        ("torch.cat([grad, grad_h], 1) @ torch.cat([weight, A])", "grad @ weight",
         "test_qerl.py -k linear_and"),
        ("(grad @ weight).addmm_(grad_h, A)", "grad @ weight", "test_qerl.py -k linear_and"),
        ("            norm.noisy_weight = None", "            pass",
         "test_qerl.py -k normal_around"),
        ("norm.weight.detach() + sigma * z", "norm.weight.detach() * (1 + sigma * z)",
         "test_qerl.py -k normal_around"),
        ("(stage - 1) / max(K - 1, 1)", "(stage - 1) / K", "test_qerl.py -k schedules"),
        ("total - ordered >= top_p", "total - ordered > top_p", "test_qerl.py -k nucleus"),
        ("busy <= len(idle)", "busy <= len(idle) + 1", "test_qerl.py -k fewer_slots"),
        ("kv_cache[1, slot, :, filled] =", "kv_cache[1, slot, :, filled - 1] =",
         "test_qerl.py -k 'training_logprobs or fewer_slots'"),
        ("torch.where(has_signal(rewards)[:, None], advantages, 0)", "advantages",
         "test_qerl.py -k group_relative"),
        ("ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)",
         "test_qerl.py -k equal_trl"),
        ("return log_ratio.clamp(-20, 20)", "return log_ratio",
         "test_qerl.py -k whatever_the_ratio"),
        ('if "lora" not in name}', "if False}", "test_qerl.py -k reference_policy"),
        ("ends[1:][owner] - 1", "ends[1:][owner] - 2",
         "test_qerl.py -k 'holds_each_prompt or training_logprobs'"),
        ("zip(hidden.split(chunk), tokens.split(chunk))", "[(hidden, tokens)]",
         "test_qerl.py -k in_chunks"),
        ("if place.get(tensor, name) == name}", "}", "test_qerl.py -k index_says"),
        ("except ImportError:", "except ZeroDivisionError:", "test_qerl.py -k works_alone"),
        ("hidden = hidden / temperature", "hidden = hidden * temperature",
         "test_qerl.py -k equal_trl"),
        ("trained[name].data = value", "pass", "tests/test_options.py -k starts_from"),
        ("global_scale = 1 / self.read", "global_scale = self.read",
         "tests/test_folders.py -k all_layouts"),
    ],
    "harness/folders.py": [
        ("temporary.unlink(missing_ok=True)", "pass", "tests/test_bad_input.py -k system_refuses"),
        ("    if not resume:", "    if False:", "tests/test_bad_input.py -k no_empty_folder"),
        ("lock.acquire(blocking=False)", "pass", "tests/test_bad_input.py -k folder_that_is_used"),
        ('if o["step"] <= last_step]', "]", "tests/test_bad_input.py -k after_its_checkpoint"),
        ("f.read() + repr(sorted(eos)).encode()", "f.read()",
         "tests/test_bad_input.py -k does_not_go_on"),
    ],
    "harness/run.py": [
        ('"chat_template_kwargs", "data",', '"chat_template_kwargs",',
         "tests/test_bad_input.py -k goes_on_longer"),
        ("hashlib.sha256(stored[:-32]).digest() == stored[-32:]", "stored",
         "tests/test_bad_input.py -k flipped_bit"),
        ('(q["question"], q["answer"], q["prompt"])', '(q["question"], q["prompt"])',
         "tests/test_bad_input.py -k does_not_go_on"),
        ("require(then[part] == ours", "require(True",
         "tests/test_bad_input.py -k does_not_go_on"),
        ('require_finite("the', 'print("the',
         "tests/test_bad_input.py -k nan_ends"),
        ("if method_state:", "if False:", "tests/test_methods.py -k 'resumes and noise_control'"),
        ("        if due:   ", "        if False: ", "tests/test_bad_input.py -k nan_ends"),
        ('accuracy <= best["accuracy"]', "not accuracy", "tests/test_options.py -k best_adapter"),
    ],
    "harness/machine.py": [
        ("2 * size <= free", "size <= free", "tests/test_memory.py -k decoded"),
        ("(9 / 16 if", "(1 / 2 if", "tests/test_estimate.py -k memory"),
    ],
    "train_gsm8k.py": [
        ("or scaler.get_scale() <= 1 else", "or True else", "tests/test_run.py -k float16"),
        ("(values | given))", "(given | values))", "tests/test_bad_input.py -k flags_win"),
        ("next_questions(data.train,", "next_questions(sum(data, []),",
         "tests/test_options.py -k best_adapter"),
        ("math.comb(samples - correct, k)", "(samples - correct) ** k",
         "tests/test_options.py -k pass_at_k"),
        ("temperature=settings.temperature, ", "", "tests/test_run.py -k equations"),
        ("if number == 0:", "if number == 1:", "tests/test_run.py -k equations"),
    ],
    "harness/data.py": [
        ('len(prompts) >= len({q["question"] for q in questions})', "True",
         "tests/test_bad_input.py -k bad_input_is_one_line"),
        ("ONE_DAY + self", "self", "tests/test_bad_input.py -k tomorrow"),
        ("if len(answers) == 1]", "]", "tests/test_answers.py -k different_answers"),
        ("if box is not None or prose:", "if box is not None:",
         "tests/test_answers.py -k unfit_file"),
    ],
    "harness/command.py": [
        ('require(not any(word == "" or', "require(True or any(word or",
         "tests/test_bad_input.py -k every_program"),
        ("        shutil.rmtree(folder, ignore_errors=True)", "        pass",
         "tests/test_bad_input.py -k no_empty_folder"),
    ],
    "studies/results.py": [
        ("scale * spread / len(values) ** 0.5", "scale * spread",
         "tests/test_studies.py -k standard_error"),
    ],
    "studies/decide.py": [
        ("error = math.sqrt(of_runs + of_starts)", "error = math.sqrt(of_runs)",
         "tests/test_studies.py -k starts_add"),
    ],
    "methods/deep_grpo.py": [
        ("max_new_tokens - len(begun)", "max_new_tokens", "tests/test_methods.py -k branches_join"),
    ],
    "harness/export.py": [
        ('weight_global_scale"] = global_scales[0]', 'weight_global_scale"] = 2 * global_scales[0]',
         "tests/test_serving.py -k librarys_bytes"),
        ('("bos_token_id", "eos_token_id", "pad_token_id")',
         '("bos_token_id", "eos_token_id", "pad_token_id", "top_k")',
         "tests/test_serving.py -k samples_from"),
    ],
    "harness/ranks.py": [
        ("dist.all_reduce(tensor)", "pass", "tests/test_processes.py -k steps_of_one"),
    ],
    "harness/layers.py": [
        ("line.chunk(ranks.count)[ranks.rank]", "line.chunk(ranks.count)[0]",
         "tests/test_processes.py -k steps_of_one"),
    ],
    "methods/speculative.py": [
        ("right.cumprod(0).sum(0)", "right.sum(0)",
         "tests/test_speculative.py -k 'frequencies or greedy'"),
        ("& goes_on[:-1]", "", "tests/test_speculative.py -k greedy"),
        ("max_len + 7", "max_len", "tests/test_speculative.py -k greedy"),
    ],
    "methods/rilq.py": [
        ("    model.load_state_dict(best, strict=False)", "    pass",
         "tests/test_quantizers.py -k rilq_keeps"),
    ],
    "methods/awq.py": [
        ("divisor[-layer.sizes[-1]:] = scales[reader]", "pass", "tests/test_quantizers.py -k folded"),
    ],
    "methods/parts/calibration.py": [
        ("            layer.weight = weight", "            pass",
         "tests/test_quantizers.py -k a_block_in_memory"),
    ],
    "methods/qat.py": [
        ("encode_e2m1(self.master.detach(), self.scale)",
         "encode_e2m1(self.master.detach(), 2 * self.scale)",
         "tests/test_quantizers.py -k ends_in_its_bytes"),
    ],
    "methods/parts/eight_bit.py": [
        ("codes.double() @ weight_codes.double().T", "codes.float() @ weight_codes.float().T",
         "tests/test_methods.py -k int8"),
        ("weight + (B @ A).detach()", "weight", "tests/test_methods.py -k eight_bit"),
    ],
    "methods/jetrl.py": [
        ("y.addmm_(rows @ A.T, B.T)", "y", "tests/test_jetrl.py -k fp8_layer"),
        ("y = y + layer.bias.to(x.dtype)", "pass", "tests/test_jetrl.py -k fp8_layer"),
        ("layer.fp8 = training", "layer.fp8 = True", "tests/test_jetrl.py -k leaves_the_rollout"),
    ],
    "harness/batches.py": [
        ("rows[teaches[rows]].tolist()", "rows.tolist()", "tests/test_run.py -k equations"),
        ("for part in mask.tensor_split(", "for part in (mask & teaches[:, None]).tensor_split(",
         "tests/test_run.py -k equations"),
    ],
}


def outcome(folder, file, old, new, tests):
    """Put one fault into a copy of the checkout -> "caught", "missed" or what is wrong with it."""
    path = folder / file
    sound = path.read_text(encoding="utf-8")
    if sound.count(old) != 1:
        return f"its text stands there {sound.count(old)} times"
    path.write_text(sound.replace(old, new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", *shlex.split(tests)]
    status = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL).returncode
    path.write_text(sound, encoding="utf-8")
    said = {0: "missed", 1: "caught", 5: "no test has such a name"}
    return said.get(status, f"pytest ended with {status}")


def main(word=""):
    faults = [(file, *fault) for file in FAULTS for fault in FAULTS[file]]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(Path(__file__).parents[1], copy,
                        ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        for fault in faults:
            if word in " ".join(fault):
                found.append(outcome(copy, *fault))
                print("{}: {} -> {}: ".format(*fault), found[-1], flush=True)
    print(f"{found.count('caught')} of {len(found)} caught")
    return found.count("caught") != len(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
