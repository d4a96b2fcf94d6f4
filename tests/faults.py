"""One-line faults, and whether the tests that are named for them notice them.

    python tests/faults.py                all of them, one after the other: minutes
    python tests/faults.py -k NAME        those whose name contains NAME

The checkout is copied to a temporary folder. There each fault is put into its file, its tests run,
and the file is put back. A fault is caught if a test fails, and missed if all pass.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# (name, file, old text, new text, file of the tests, pytest's -k)
FAULTS = [
    ("ties", "qerl.py", "torch.nextafter(E2M1_BOUNDS[1::2], torch.zeros(3))", "E2M1_BOUNDS[1::2]",
     "test_qerl", "bytes_equal"),
    ("nibbles", "qerl.py", "codes[:, ::2] | codes[:, 1::2] << 4", "codes[:, 1::2] | codes[:, ::2] << 4",
     "test_qerl", "bytes_equal"),
    ("empty blocks", "qerl.py", "torch.finfo(torch.float8_e4m3fn).eps, scale)", "1.0, scale)",
     "test_qerl", "bytes_equal"),
    ("alpha", "qerl.py", "A = self.alpha / self.rank * self.lora_A", "A = self.lora_A", "test_qerl",
     "linear_and"),
    ("narrow gradient", "qerl.py", "torch.cat([grad, grad_h], 1) @ torch.cat([weight, A])",
     "grad @ weight", "test_qerl", "linear_and"),
    ("wide gradient", "qerl.py", "(grad @ weight).addmm_(grad_h, A)", "grad @ weight", "test_qerl",
     "linear_and"),
    ("noise", "qerl.py", "norm.weight.detach() + sigma * z", "norm.weight.detach() * (1 + sigma * z)",
     "test_qerl", "normal_around"),
    ("noise stays", "qerl.py", "            norm.noisy_weight = None", "            pass", "test_qerl",
     "ends_with"),
    ("last stage", "qerl.py", "(stage - 1) / max(K - 1, 1)", "(stage - 1) / K",
     "test_qerl", "schedules"),
    ("nucleus", "qerl.py", "of_likelier >= top_p", "of_likelier > top_p", "test_qerl", "nucleus"),
    ("odd slots", "qerl.py", "busy <= len(idle)", "busy <= len(idle) + 1", "test_qerl", "odd_number"),
    ("cache piece", "qerl.py", "place = filled[rows] - i * CACHE_PIECE", "place = filled[rows] % 8",
     "test_qerl", "training_logprobs or in_pieces"),
    ("signal", "qerl.py", "torch.where(has_signal(rewards)[:, None], advantages, 0)", "advantages",
     "test_qerl", "group_relative"),
    ("clip", "qerl.py", "ratio.clamp(1 - clip_low, 1 + clip_high)",
     "ratio.clamp(1 - clip_high, 1 + clip_low)", "test_qerl", "equal_trl"),
    ("pessimism", "qerl.py", "torch.minimum(ratio", "torch.maximum(ratio", "test_qerl", "equal_trl"),
    ("bounds", "qerl.py", "return log_ratio.clamp(-20, 20)", "return log_ratio", "test_qerl",
     "whatever_the_ratio"),
    ("reference", "qerl.py", "return self.weight if self.use_adapter else self.reference_weight",
     "return self.weight", "test_qerl", "reference_policy"),
    ("token before", "qerl.py", "ends[1:][owner] - 1", "ends[1:][owner] - 2", "test_qerl",
     "holds_each_prompt or training_logprobs"),
    ("chunks", "qerl.py", "zip(hidden.split(chunk), tokens.split(chunk))", "[(hidden, tokens)]",
     "test_qerl", "in_chunks"),
    ("other files", "qerl.py", "if place.get(tensor, name) == name}", "}", "test_qerl",
     "index_says"),
    ("no kernels", "qerl.py", "except ImportError:", "except ZeroDivisionError:", "test_qerl",
     "works_alone"),
    ("overwrite", "harness/folders.py", "if found and not resume:", "if False:", "test_bad_input",
     "overwritten or advice"),
    ("two runs", "harness/folders.py", "            lock.acquire(blocking=False)", "            pass",
     "test_bad_input", "in_use"),
    ("late lines", "harness/folders.py", 'if o["step"] <= last_step]', "]", "test_bad_input",
     "lost_log"),
    ("hash", "harness/run.py", "require(sound,", "require(True,",
     "test_bad_input", "flipped_bit"),
    ("mapped file", "harness/run.py", "f.get_tensor(name).clone()", "f.get_tensor(name)",
     "test_bad_input", "open_file"),
    ("other answers", "harness/run.py", '(q["question"], q["answer"], q["prompt"])',
     '(q["question"], q["prompt"])', "test_bad_input", "other_data"),
    ("other weights", "harness/run.py", "require(state[part] == ours", "require(True",
     "test_bad_input", "does_not_go_on"),
    ("other EOS", "harness/folders.py", "f.read() + repr(sorted(eos)).encode()", "f.read()",
     "test_bad_input", "does_not_go_on"),
    ("room", "harness/machine.py", "size <= share * free", "size <= free", "test_memory", "decoded"),
    ("estimated weights", "harness/machine.py", "(9 / 16 if", "(1 / 2 if", "test_estimate", "memory"),
    ("estimated passes", "harness/machine.py", "passes = 4 -", "passes = 3 -", "test_estimate", "quarter"),
    ("overflow", "harness/run.py", "(math.isfinite(norm) or left_out)", "math.isfinite(norm)",
     "test_run", "float16"),
    ("NaN rollout", "harness/run.py", "require_finite({\"the policy's", "len({\"the policy's",
     "test_bad_input", "nan_ends"),
    ("NaN policy", "train_gsm8k.py", "    require_finite_policy(model, batch.prompts[0])", "    pass",
     "test_bad_input", "nan_ends"),
    ("equal prompts", "harness/data.py",
     'len(prompts) >= len({q["question"].strip() for q in questions})', "True", "test_bad_input",
     "bad_input_is_one_line"),
    ("date", "harness/data.py", "ONE_DAY + self", "self", "test_bad_input", "tomorrow"),
    ("two answers", "harness/data.py", "if len(answers[text]) == 1]", "]", "test_answers",
     "different_answers"),
    ("empty box", "harness/data.py", "answer = answer if box is None else box",
     "pass", "test_answers", "unfit_file"),
    ("empty value", "harness/command.py", 'require_flag("" not in values', "require_flag(True",
     "test_bad_input", "empty_value"),
    ("preset", "train_gsm8k.py", "{**values, **given})", "{**given, **values})", "test_bad_input",
     "flags_win"),
    ("calibrated", "train_gsm8k.py", 'policy += ("data",)', "pass", "test_bad_input",
     "codes_fitted"),
    ("empty folder", "harness/command.py",
     "    except (OSError, safetensors.SafetensorError) as e:\n        leave_no_empty_folder(run.lock)",
     "    except (OSError, safetensors.SafetensorError) as e:", "test_bad_input", "no_empty_folder"),
    ("error bar", "studies/study.py", "stdev(values) / len(values) ** 0.5", "stdev(values)",
     "test_studies", "claims_tables"),
    ("other flags", "studies/study.py", "require_flag(theirs[name] == settings[name]",
     "require_flag(True", "test_studies", "other_flags"),
    ("arm's flags", "studies/study.py", '*args.more, *flags[run["arm"]].split(),',
     '*flags[run["arm"]].split(), *args.more,', "test_studies", "arms_flags"),
    ("MASPO", "methods/maspo.py", "1 / (1 - 0.03 * advantages)", "1 + 0.03 * advantages",
     "test_methods", "gradient_of_its"),
    ("cap", "methods/rollout_correction.py", "value.clamp(max=cap)", "value", "test_methods",
     "gradient_of_its"),
    ("pooled rows", "methods/pooled_noise.py", "rows.transpose(0, 1).flatten()", "rows.flatten()",
     "test_methods", "pooled_noise_shares"),
    ("room of a branch", "methods/deep_grpo.py", "max_new_tokens - len(begun)", "max_new_tokens",
     "test_methods", "branches_join"),
    ("UAQ", "methods/qurl.py", "layer.master.data /= s", "pass", "test_methods", "update_aware"),
    ("one scale", "harness/export.py", "named_parts(name, codes, scales, global_scale)",
     "named_parts(name, codes, scales, 2 * global_scale)", "test_serving", "librarys_bytes"),
    ("sampling", "harness/export.py", '("bos_token_id", "eos_token_id", "pad_token_id")',
     '("bos_token_id", "eos_token_id", "pad_token_id", "top_k")', "test_serving", "samples_from"),
    ("gradients", "harness/ranks.py", "dist.all_reduce(line)", "pass", "test_processes",
     "steps_of_one"),
    ("piece", "harness/layers.py", "line.chunk(ranks.count)[ranks.rank]",
     "line.chunk(ranks.count)[0]", "test_processes", "ranks_keep"),
    ("first wrong token", "methods/speculative.py", "right.cumprod(0).sum(0)", "right.sum(0)",
     "test_speculative", "frequencies or greedy"),
    ("behind the end", "methods/speculative.py", "& ~ends[:-1]", "", "test_speculative", "greedy"),
    ("overhang", "methods/speculative.py", "max_len + 7", "max_len", "test_speculative", "greedy"),
    ("GPTQ", "methods/gptq.py", "W[:, behind] -= losses", "W[:, behind] += losses", "test_quantizers",
     "gptq"),
    ("best adapter", "methods/rilq.py", "    model.load_state_dict(best, strict=False)", "    pass",
     "test_quantizers", "rilq_keeps"),
    ("four or six", "methods/four_over_six.py", "error_4 < error_6", "error_6 < error_4",
     "test_quantizers", "four_over_six"),
    ("AWQ", "methods/awq.py", "weight[last] /= scales[reader][:, None]", "pass", "test_quantizers",
     "folded"),
    ("read anew", "methods/parts/calibration.py", "            layer.weight = weight",
     "            pass", "test_quantizers", "a_block_in_memory"),
    ("straight through", "methods/qat.py", "(rounded + (self.master - W))",
     "(rounded + 2 * (self.master - W))", "test_quantizers", "straight_through"),
    ("scales stay", "methods/qat.py", "encode_e2m1(self.master.detach(), self.scale)",
     "encode_e2m1(self.master.detach(), 2 * self.scale)", "test_quantizers", "ends_in_its_bytes"),
    ("INT8 sums", "methods/parts/eight_bit.py", "(x.double() @ weight.double().T).float()",
     "(x.float() @ weight.float().T)", "test_methods", "int8"),
    ("LoRA in 8 bits", "methods/parts/eight_bit.py", "weight + (B @ A).detach()", "weight",
     "test_methods", "eight_bit"),
    ("LoRA beside FP8", "methods/parts/fp8_layers.py", "y.addmm_(rows @ A.T, B.T)", "y",
     "test_jetrl", "fp8_layer"),
    ("FP8 bias", "methods/parts/fp8_layers.py", "y = y + self.bias.to(x.dtype)", "pass",
     "test_jetrl", "fp8_layer"),
    ("FP8 layout", "methods/parts/fp8_blocks.py", "x.scale.T.contiguous().T", "x.scale",
     "test_jetrl", "cublas"),
    ("wrong GPU", "methods/parts/fp8_blocks.py", "            return False", "            pass",
     "test_jetrl", "tried"),
    ("dW", "methods/jetrl.py", "quantize(ctx.x.dequantize().T, ctx.block)",
     "quantize(2 * ctx.x.dequantize().T, ctx.block)", "test_jetrl", "products"),
    ("dX", "methods/jetrl.py", "transposed(ctx.weight)", "ctx.weight", "test_jetrl", "products"),
    ("gspo", "qerl.py", "x.sum(1, keepdim=True) / own_length(mask)", "x.sum(1, keepdim=True)",
     "test_qerl", "equal_trl"),
    ("cispo", "qerl.py", "clipped.detach() * advantage * logprobs", "clipped * advantage * logprobs",
     "test_qerl", "equal_trl"),
    ("others' mean", "qerl.py", "lambda rewards: 1 - 1 / rewards.shape[1]", "lambda rewards: 1",
     "test_qerl", "group_relative"),
    ("temperature", "qerl.py", "hidden = hidden / temperature", "hidden = hidden * temperature",
     "test_qerl", "equal_trl"),
    ("best", "harness/run.py", 'accuracy > self.state["best"]["accuracy"]', "accuracy > 0",
     "test_options", "best_adapter"),
    ("kept apart", "train_gsm8k.py", "next_questions(data.train,", "next_questions(sum(data, []),",
     "test_options", "best_adapter"),
    ("reference", "qerl.py", "p.data.copy_(model.reference[name])", "pass", "test_options",
     "starts_from"),
    ("pass at k", "train_gsm8k.py", "math.comb(samples - correct, k)", "(samples - correct) ** k",
     "test_options", "pass_at_k"),
    ("ModelOpt", "qerl.py", '1 / scale if last == "weight_scale_2" else scale', "scale",
     "test_folders", "all_layouts"),
    ("which passes", "methods/jetrl.py", "switch_fp8(model, self.training_in_fp8)", "pass",
     "test_jetrl", "which_passes"),
    ("left out", "harness/batches.py", "rows[teaches[rows]].tolist()", "rows.tolist()", "test_run",
     "equations"),
    ("divisors", "harness/batches.py", "algo.token_weights(mask[rows],",
     "algo.token_weights(mask[rows] & teaches[rows][:, None],", "test_run", "gives_up"),
    ("first minibatch", "train_gsm8k.py", "if number == 0:", "if number == 1:", "test_run",
     "equations"),
    ("later minibatches", "harness/batches.py", "sum(self.minibatches[1:], [])",
     "sum(self.minibatches[2:], [])", "test_run", "equations"),
]


def copy_checkout(folder):
    """Copy what git knows of, and what it does not ignore."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.exists(f"{HERE}/{name}"):
            os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
            shutil.copy(f"{HERE}/{name}", f"{folder}/{name}")


def outcome(folder, file, old, new, tests, expression):
    """Put one fault into a copy of the checkout -> "caught", "missed" or what is wrong with it."""
    with open(f"{folder}/{file}", encoding="utf-8") as f:
        sound = f.read()
    if sound.count(old) != 1:
        return f"its text stands {sound.count(old)} times in {file}"
    files = [f"tests/{name}.py" if name != "test_qerl" else f"{name}.py"
             for name in tests.split(" or ")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *files, "-k", expression]
    with open(f"{folder}/{file}", "w", encoding="utf-8") as f:
        f.write(sound.replace(old, new))
    try:
        status = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL).returncode
    finally:
        with open(f"{folder}/{file}", "w", encoding="utf-8") as f:
            f.write(sound)
    said = {0: "missed", 1: "caught", 5: "no test has such a name"}
    return said.get(status, f"pytest ended with {status}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", help="a part of the names of the faults to be tried")
    wanted = [fault for fault in FAULTS if parser.parse_args().k in fault[0]]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(folder)
        for name, *fault in wanted:
            found.append(outcome(folder, *fault))
            print(f"{name:20} {found[-1]}", flush=True)
    print(f"{found.count('caught')} of {len(found)} caught")
    return found.count("caught") != len(found)


if __name__ == "__main__":
    sys.exit(main())
