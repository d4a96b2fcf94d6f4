"""Mathematics in TeX, as the paper trains and evaluates on besides GSM8K (its Tables 2 and 3).

--data and --eval take a name of DATASETS, another dataset of Hugging Face (NAME or NAME:CONFIG), or
a local file of one (.jsonl, .json or .parquet). All but .jsonl needs pip install datasets.
"""
import glob
import json
import math
import os
import re

from harness.answers import last_box, right_answer
from qerl import UserError, reason

# Of each: where it lies on Hugging Face, and which split.
DATASETS = {
    "bigmath": ("SynthLabsAI/Big-Math-RL-Verified", "train"),
    "dapo-math": ("BytedTsinghua-SIA/DAPO-Math-17k", "train"),
    "math-500": ("HuggingFaceH4/MATH-500", "test"),
    "aime24": ("HuggingFaceH4/aime_2024", "train"),
    "aime25": ("math-ai/aime25", "test"),
    "amc23": ("math-ai/amc23", "test"),
}
# What these and their like call the two columns, in the order in which they are looked for.
QUESTION = ("question", "problem", "Problem", "prompt")
ANSWER = ("answer", "Answer", "final_answer", "expected_answer", "ground_truth", "solution")
FILES = (".jsonl", ".json", ".parquet")
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")      # on Hugging Face: owner/name:config
SURROGATE = re.compile("[\ud800-\udfff]")       # half of a character, which no file can hold
# Demands of a question on the form of its answer, which is ours to ask for: DAPO-Math's before and
# behind it, and a last sentence that wants the answer after "####", as verl's GSM8K has it.
DEMANDS = re.compile(r"""
    ^Solve\ the\ following\ math\ problem\ step\ by\ step\..*?\n\n
    | \n\nRemember\ to\ put\ your\ answer\ .*
    | (?<=[.?!\n]) [^.?!\n]* \#{4} [^\n?]* $
""", re.VERBOSE | re.DOTALL)


def source_name(source):
    """What a dataset or a file is called in the results."""
    return os.path.basename(source).removesuffix(".jsonl")


def math_questions(source):
    """The questions of a dataset or a file: dicts of "question", "answer" (TeX) and "source".

    What stands there several times is taken once: DAPO-Math-17k has each question a hundred times.
    """
    name = source_name(source)
    questions = {}
    answers = {}
    unclear = set()                                # questions that stand there with several answers
    for number, row in enumerate(rows_of(source), 1):
        question = bare(first_column(row, QUESTION))
        answer = answer_of(row)
        if is_text(answer):
            answer = final_part(answer)                # of which an empty box leaves nothing
        if not is_text(question) or not is_text(answer):
            raise UserError(
                f"{source}:{number}: no question or no answer; its columns are {', '.join(row)}, "
                f"wanted are a text in one of {', '.join(QUESTION)} and in one of {', '.join(ANSWER)}"
            )
        question = {"question": question, "answer": answer, "source": name}
        right = right_answer(question)
        if right is None:
            raise UserError(f'{source}:{number}: what stands behind "####" is not one clear number; '
                            "mend or remove it")
        questions.setdefault(question["question"], question)
        if answers.setdefault(question["question"], right) != right:
            unclear.add(question["question"])
    if unclear:
        print(f"{source}: {len(unclear)} of {len(questions)} questions stand there with different "
              "answers and are left out")
    questions = {text: question for text, question in questions.items() if text not in unclear}
    if not questions:
        raise UserError(f"{source}: holds no question; give another file or dataset")
    return list(questions.values())


def rows_of(source):
    """The rows of a file or a dataset as dicts."""
    if source.endswith(".jsonl") and os.path.isfile(source):
        return jsonl_rows(source)
    repository, split = DATASETS.get(source, (source, "train"))
    is_file = os.path.isfile(source)
    if is_file and not source.endswith(FILES):
        raise UserError(f"{source}: is none of {', '.join(FILES)}; convert it to one of these")
    if not is_file and not NAME.fullmatch(source):         # a dataset's name may be a folder's, too
        if os.path.isdir(source):
            raise UserError(f"{source}: is a folder; name a file in it")
        raise UserError(f"{source}: no such folder or file, and no name of a dataset; mend the path")
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source}: needs the package datasets; pip install datasets")
    try:
        if is_file:
            kind = "parquet" if source.endswith(".parquet") else "json"
            return datasets.load_dataset(kind, data_files=glob.escape(source), split="train")
        return datasets.load_dataset(*repository.split(":"), split=split)
    except Exception as e:
        if is_file:
            raise UserError(f"{source}: cannot be read ({reason(e)}); mend the file")
        raise UserError(
            f"{source}: no such folder or file, and Hugging Face gives no dataset {repository} with a "
            f"split {split} ({reason(e)}); known by name are {', '.join(DATASETS)}"
        )


def jsonl_rows(path):
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):           # bytes that are no UTF-8 are a ValueError
                row = None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: not a JSON object; mend or remove this line")
            yield row


def first_column(row, names):
    """The row's value in the first of these columns that it has."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def answer_of(row):
    """A row's answer as text; numbers become text, what is neither is None."""
    checked = row.get("reward_model")                      # verl's format, in which DAPO-Math comes
    if isinstance(checked, dict):
        row = {**row, **checked}
    answer = first_column(row, ANSWER)
    if answer == row.get("solution") and isinstance(answer, str) and " " in answer.strip():
        answer = last_box(answer)                          # without one it is prose
    if type(answer) is int and abs(answer) < 10 ** 100:
        return str(answer)
    if type(answer) is float and math.isfinite(answer):
        return str(answer)
    return answer


def is_text(value):
    """Is it a text with something in it, of characters that exist?"""
    return isinstance(value, str) and bool(value.strip()) and not SURROGATE.search(value)


def bare(question):
    """A question alone: not as a chat's message, and without demands on the form of its answer."""
    if isinstance(question, list) and all(isinstance(message, dict) for message in question):
        asked = [message.get("content") for message in question if message.get("role") != "system"]
        question = asked[0] if len(asked) == 1 else None
    return DEMANDS.sub("", question.strip()).strip() if isinstance(question, str) else None


def final_part(answer):
    """Of a whole solution what it ends with, in its last box."""
    box = last_box(answer)
    return (answer if box is None else box).strip()
