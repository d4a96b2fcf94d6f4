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

# {file: [(old text, new text, arguments of pytest)]}: mistakes that are easily made, a few of each kind.
FAULTS = {
    "qerl.py": [
        ("norm.weight.detach() + sigma * z", "norm.weight.detach() * (1 + sigma * z)",
         "test_qerl.py -k normal_around"),
        ("            norm.noisy_weight = None", "            pass",
         "test_qerl.py -k normal_around"),
        ("(stage - 1) / max(K - 1, 1)", "(stage - 1) / K", "test_qerl.py -k schedules"),
        ("torch.where(has_signal(rewards)[:, None], advantages, 0)", "advantages",
         "test_qerl.py -k group_relative"),
        ("ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)",
         "test_qerl.py -k equal_trl"),
        ("[:, :-1]).float() / temperature", "[:, :-1]).float() * temperature",
         "test_qerl.py -k equal_trl"),
    ],
    "train_gsm8k.py": [
        ("temperature=settings.temperature, ", "", "tests/test_run.py -k equations"),
        ("next_questions(data.train,", "next_questions(sum(data, []),",
         "tests/test_options.py -k best_adapter"),
        ("scaler.scale(torch.zeros((), device=model.device))", "pass",
         "tests/test_processes.py -k float16"),
    ],
    "harness/batches.py": [
        ("for part in mask.tensor_split(", "for part in (mask & teaches[:, None]).tensor_split(",
         "tests/test_run.py -k equations"),
    ],
    "studies/decide.py": [
        ('"error": math.sqrt(of_runs + of_starts)', '"error": math.sqrt(of_runs)',
         "tests/test_studies.py -k starts_add"),
    ],
    "harness/export.py": [
        ("or value in ONE_VALUE.get(name, [])", "or name in ONE_VALUE",
         "tests/test_options.py -k plain_lora"),
    ],
    "harness/folders.py": [
        ("lock.acquire(blocking=False)", "pass", "tests/test_bad_input.py -k folder_that_is_used"),
        ('if o["step"] <= last_step]', "]", "tests/test_bad_input.py -k after_its_checkpoint"),
    ],
    "harness/ranks.py": [
        ("dist.all_reduce(tensor)", "pass", "tests/test_processes.py -k steps_of_one"),
    ],
    "harness/run.py": [
        ("require(then.get(part) == ours", "require(True",
         "tests/test_bad_input.py -k does_not_go_on"),
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
