"""The questions of a run, made up, GSM8K's or others' (math_data.py), and their order.

A question is {"question", "answer"}. GSM8K's answer is worked steps with <<calculations>>, then
"#### number".
"""
import functools
import glob
import http.client
import json
import os
import random
import urllib.request

from harness.answers import final_number, right_answer
from harness.cache import CACHE
from harness.math_data import DEMANDS, is_text, math_questions, source_name
from harness.run_folder import atomic_write
from harness.small_policy import made_up_problems
from qerl import UserError

GSM8K_URL = ("https://raw.githubusercontent.com/openai/grade-school-math/master/"
             "grade_school_math/data/{}.jsonl")


def load_questions(data, evaluate_on, model):
    """(to train on, held-out) as the settings of these names say."""
    questions = held_out = []
    if data == "gsm8k" and not os.path.isdir(data):
        questions, held_out = gsm8k(None)
    elif data and not os.path.isdir(data):
        questions = math_questions(data)
        if not evaluate_on:
            raise UserError(f"--data {data}: has no held-out questions; name some by --eval")
    elif data or model:
        questions, held_out = gsm8k(data)
    else:
        questions, held_out = made_up_problems()
    if evaluate_on:
        names = [source_name(source) for source in evaluate_on]
        for source, name in zip(evaluate_on, names):
            if names.count(name) > 1:
                raise UserError(f"--eval: two of them are called {os.path.basename(source)}, and each "
                                "has a result of its own; rename one")
        held_out = [q for source in evaluate_on for q in math_questions(source)]
    return not_held_out(questions, held_out, data), held_out


def not_held_out(questions, held_out, data):
    """The questions without those that are held out, too."""
    tested = {q["question"].strip() for q in held_out}
    kept = [q for q in questions if q["question"].strip() not in tested]
    if not kept:
        raise UserError(f"--data {data}: all of its questions are held out, too; give other --data "
                        "or --eval")
    if len(kept) < len(questions):
        print(f"{len(questions) - len(kept)} of {len(questions)} training questions are held out, too, "
              "and are left out")
    return kept


def gsm8k(folder):
    """(train, test) from a folder of jsonl files, or downloaded once into the cache."""
    if folder is None:
        folder = os.path.join(CACHE, "gsm8k")
        os.makedirs(folder, exist_ok=True)
        for split in ("train", "test"):
            download(GSM8K_URL.format(split), f"{folder}/{split}.jsonl")
    return read_questions(folder, "train*.jsonl"), read_questions(folder, "test*.jsonl")


def download(url, path):
    """Fetch a file once. Several processes may do so at the same time."""
    if os.path.exists(path):
        return
    own = f"{path}.{os.getpid()}"
    try:
        atomic_write(own, urllib.request.urlopen(url, timeout=60).read())
        os.replace(own, path)
    except (OSError, http.client.HTTPException) as e:
        raise UserError(
            f"GSM8K could not be downloaded from {url} ({e}); "
            "pass --data FOLDER with train.jsonl and test.jsonl"
        )


def read_questions(folder, pattern):
    """A list of the questions in all files of `folder` that match `pattern`."""
    if not os.path.isdir(folder):
        raise UserError(
            f"--data {folder}: no such folder; it must hold train*.jsonl and test*.jsonl"
        )
    matching = sorted(glob.glob(f"{glob.escape(folder)}/{pattern}"))
    paths = [path for path in matching if "socratic" not in os.path.basename(path)]
    if not paths:
        raise UserError(
            f"--data {folder}: no file matches {pattern}; it must hold train*.jsonl "
            "and test*.jsonl as GSM8K's repository has them"
        )
    questions = []
    for path in paths:
        with open(path, "rb") as f:
            questions += [read_question(line, path, number) for number, line in enumerate(f, 1)]
    if not questions:
        raise UserError(f"{paths[0]}: holds no problem; give a file with at least one line")
    return with_one_answer(questions, f"{folder}/{pattern}")


def with_one_answer(questions, source):
    """The questions without those that stand there with different answers; says how many."""
    answers = {}
    for question in questions:
        answers.setdefault(question["question"].strip(), set()).add(final_number(question))
    kept = [q for q in questions if len(answers[q["question"].strip()]) == 1]
    if not kept:
        raise UserError(f"{source}: each question stands there with different answers; mend them")
    if len(kept) < len(questions):
        print(f"{source}: {len(questions) - len(kept)} of {len(questions)} questions stand there with "
              "different answers and are left out")
    return kept


def read_question(line, path, number):
    """One line of a file: worked steps with <<calculations>>, then "#### number"."""
    try:
        question = json.loads(line)
        if not is_text(question["question"]):
            raise ValueError
        right = final_number(question)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f'{path}:{number}: not a line of {{"question": ..., "answer": "... #### number"}}; '
            "mend or remove it"
        )
    if right is None:
        given = question["answer"].split("####")[1].strip().partition("\n")[0]
        raise UserError(
            f'{path}:{number}: {given[:40]!r} behind "####" is not one clear number; '
            "mend or remove it"
        )
    return {"question": DEMANDS.sub("", question["question"]), "answer": question["answer"]}


def first_of_each(questions, count):
    """The first `count` questions of each set (--eval); 0: all."""
    by_set = {}
    for question in questions:
        by_set.setdefault(question.get("source"), []).append(question)
    return [question for one_set in by_set.values() for question in one_set[:count or None]]


def with_prompts(questions, tokenizer, longest):
    """Add "prompt" (token ids) and "right" (the answer: a number or TeX) to each question.

    Where the prompt opens the reasoning itself, as some chat templates do, "begun" is "<think>":
    it counts as the beginning of each completion. Prompts of more than `longest` tokens are counted
    and left out.
    """
    for question in questions:
        question["prompt"] = tokenizer.prompt(question["question"])
        question["right"] = right_answer(question)
        if tokenizer.decode(question["prompt"]).rstrip().endswith("<think>"):
            question["begun"] = "<think>"
    kept = [q for q in questions if len(q["prompt"]) <= longest]
    if len(kept) < len(questions):
        skipped = f"{len(questions) - len(kept)} of {len(questions)} prompts"
        print(f"{skipped} are longer than {longest} tokens and are skipped")
    if not kept:
        raise UserError(f"no prompt fits into {longest} tokens; lower --max-new-tokens")
    return kept


@functools.lru_cache(maxsize=2)
def epoch_order(count, seed, epoch):
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


def next_questions(questions, drawn, count, seed):
    """The `count` questions after the first `drawn`; each pass over all has a seeded order."""
    total = len(questions)
    places = [divmod(i, total) for i in range(drawn, drawn + count)]
    return [questions[epoch_order(total, seed, epoch)[position]] for epoch, position in places]
