"""The questions of a run, their order and their prompts.

They are made up, GSM8K's, or mathematics in TeX from elsewhere.

A question is {"question", "answer", "right"}. GSM8K's answer is worked steps with <<calculations>>, then
"#### number"; that of other data is a number or TeX, and "source" names its set. "right" is what a
completion has to state, a number or TeX.

--data and --eval take a name of DATASETS, another dataset of Hugging Face (NAME, NAME:CONFIG or
NAME:CONFIG:SPLIT), or a local file of one (.jsonl, .json or .parquet). All but .jsonl and .json need
pip install datasets.
"""
import functools
import glob
import math
import os
import random
import re
import unicodedata
import urllib.request
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import transformers

from harness.answers import NUMERAL, TEXT, is_right, last_box, one_number, right_answer
from harness.folders import atomic_write, generation_config, made_once, parsed
from harness.small_policy import made_up_problems
from harness.errors import UserError, reason, require


GSM8K_URL = ("https://raw.githubusercontent.com/openai/grade-school-math/master/"
             "grade_school_math/data/{}.jsonl")


class Data(NamedTuple):
    """Questions, dicts: to train on, to choose by during training, to measure at the end."""
    train: list
    validation: list
    held_out: list


def load_questions(settings):
    """The Data that settings of train_gsm8k ask for; none of what is held out is trained on."""
    data = settings.data or settings.model and "gsm8k"
    if not data:
        questions, held_out = made_up_problems()
    elif data == "gsm8k" or os.path.isdir(data):
        folder = data if os.path.isdir(data) else made_once("openai-gsm8k", download)
        questions = read_questions(folder, "train*.jsonl")
        held_out = [] if settings.eval else read_questions(folder, "test*.jsonl")
    else:
        require(settings.eval, f"--data {data}: is no folder, and a dataset has no held-out questions; name "
                               "some by --eval")
        questions, held_out = math_questions(data), []
    if settings.eval:
        held_out = [q for source in settings.eval for q in math_questions(source)]
    tested = {compared(q["question"]) for q in held_out}
    kept = [q for q in questions if compared(q["question"]) not in tested]
    say_what_is_left_out(questions, kept, "training questions are held out, too,")
    cut = len(kept) - settings.validation
    require(cut > 0, f"--data {data or '(the built-in problems)'}: has {len(kept)} training questions that "
                     "are not held out; give more, or lower --validation")
    limit = settings.eval_questions or None
    limited = [q for one_set in by_set(held_out, held_out).values() for q in one_set[:limit]]
    return Data(kept[:cut], kept[cut:], limited)


def say_what_is_left_out(questions, kept, what):
    if len(kept) < len(questions):
        print(f"{len(questions) - len(kept)} of {len(questions)} {what} and are left out")


def download(folder):
    """Fetch GSM8K's two files."""
    for split in ("train", "test"):
        url = GSM8K_URL.format(split)
        try:
            atomic_write(f"{folder}/{split}.jsonl", urllib.request.urlopen(url, timeout=60).read())
        except Exception as e:
            raise UserError(f"GSM8K could not be downloaded from {url} ({e}); pass --data FOLDER with "
                            "train.jsonl and test.jsonl")


def read_questions(folder, pattern):
    """A list of the questions in all files of `folder` that match `pattern`."""
    matching = sorted(Path(folder).glob(pattern))
    paths = [str(path) for path in matching if "socratic" not in path.name]
    require(paths, f"--data {folder}: no file matches {pattern}; it must hold train*.jsonl and test*.jsonl "
                   "as GSM8K's repository has them")
    return questions_of(paths)


def questions_of(sources):
    """The questions of files and datasets, each once, without those that have different answers."""
    found = {}                     # by its text: a question, and whether its answers are the same
    for source in sources:
        for number, row in enumerate(rows_of(source), 1):
            question = question_of(row, f"{source}:{number}")
            first, same = found.setdefault(compared(question["question"]), (question, []))
            text, right = question["question"], question["right"]
            same.append(right == first["right"] or is_right(f"\\boxed{{{right}}}", first["right"], text))
    kept = [question for question, same in found.values() if all(same)]
    names = ", ".join(sources)
    require(kept, f"{names}: holds no question with one answer; give another file or dataset")
    say_what_is_left_out(found, kept, f"questions of {names} stand there with different answers")
    return kept


def compared(text):
    """A question as it is compared with others: neither its gaps nor the codes of its letters count."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def by_set(questions, values):
    """{the set that questions are from (--eval): the values of its questions}."""
    found = {}
    for question, value in zip(questions, values):
        found.setdefault(question.get("source"), []).append(value)
    return found


@functools.lru_cache(maxsize=2)
def epoch_order(count, seed, epoch):
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


def next_questions(questions, drawn, count, seed):
    """The `count` questions after the first `drawn`; each pass over all has a seeded order."""
    total = len(questions)
    places = [divmod(i, total) for i in range(drawn, drawn + count)]
    return [questions[epoch_order(total, seed, epoch)[position]] for epoch, position in places]


# --------------------------------------------------------------------------------------------------
# Datasets, as the paper trains and evaluates on besides GSM8K (its Tables 2 and 3)

# Where each lies on Hugging Face; without a third part its split is "train".
DATASETS = {
    "bigmath": "SynthLabsAI/Big-Math-RL-Verified",
    "dapo-math": "open-r1/DAPO-Math-17k-Processed:all",
    "math-500": "HuggingFaceH4/MATH-500::test",
    "aime24": "HuggingFaceH4/aime_2024",
    "aime25": "math-ai/aime25::test",
    "amc23": "math-ai/amc23::test",
}
# What these and their like call the two columns, in the order in which they are looked for.
QUESTION = ("question", "problem", "Problem", "prompt")
ANSWER = ("answer", "Answer", "final_answer", "expected_answer", "ground_truth", "solution")
# Halves of characters; what JSON makes of a lone backslash in \boxed, \frac, \text, \right and their like.
BROKEN = re.compile("[\ud800-\udfff]|[\b\f](?=[a-z])|\t(?=ext|imes|frac|heta)|\r(?=ight)")
# Demands of a question on the form of its answer, which is ours to ask for: DAPO-Math's before and
# behind it, and a last sentence that wants the answer after "####", as verl's GSM8K has it.
DEMANDS = re.compile(r"""
    ^Solve\ the\ following\ math\ problem\ step\ by\ step\..*?\n\n
    | \n\nRemember\ to\ put\ your\ answer\ .*
    | (?<=[.?!\n]) [^.?!\n]* \#{4} [^\n?]* $
""", re.VERBOSE | re.DOTALL)


def math_questions(source):
    """The questions of a dataset or a file, each with its "source"."""
    return [{**question, "source": source} for question in questions_of([source])]


def question_of(row, place):
    """{"question", "answer", "right"} of a row: worked steps and "#### number", or TeX."""
    question = DEMANDS.sub("", first_text(row, QUESTION)).strip()
    answer = first_text(row, ANSWER)
    if "####" not in answer:
        # Of prose with numbers only its box counts: any of them may be meant.
        box = last_box(answer)
        words = re.findall(r"[\u0e00-\ud7af]|(?<![\\\w])[^\W\d_]{2,}", TEXT.sub("", answer))
        number = re.search(rf"(?xi) (?<![a-z]) {NUMERAL} (?![a-z])", answer)
        if box is not None or len(words) > 2 and number and one_number(answer, question) is None:
            answer = (box or "").strip()
    # Beside choices the answer is the place or the letter of one.
    require(question and answer and not (row.get("choices") or row.get("options")),
            f"{place}: no question, or no answer that stands alone; its columns are {', '.join(row)}, "
            f"wanted are a text in one of {', '.join(QUESTION)} and in one of {', '.join(ANSWER)}; mend or "
            "remove it")
    found = {"question": question, "answer": answer}
    found["right"] = right_answer(found)
    require(found["right"] is not None,
            f'{place}: what stands behind "####" is not one clear number; mend or remove it')
    return found


def rows_of(source):
    """The rows of a file or a dataset as dicts."""
    if source.endswith((".jsonl", ".json")):
        return json_rows(source)
    # Of a folder the library would take the questions to train on.
    require(not os.path.isdir(source), f"{source}: is a folder; name a file in it")
    name, config, split, *_ = f"{DATASETS.get(source, source)}::".split(":")
    options = {"name": config or None, "split": split or "train"}
    if os.path.isfile(source):
        # The library would read others, too; of them pickles run code.
        require(source.endswith(".parquet"),
                f"{source}: is no .jsonl, .json or .parquet; convert it to one of these")
        name = "parquet"
        options = {"data_files": glob.escape(source), "split": "train"}
    try:
        import datasets
        found = datasets.load_dataset(name, **options)
        labels = [name for name, kind in found.features.items() if isinstance(kind, datasets.ClassLabel)]
        return found.remove_columns(labels)                    # a label's number is no answer
    except ImportError:
        raise UserError(f"{source}: needs the package datasets; pip install datasets")
    except Exception as e:
        raise UserError(f"{source}: cannot be read ({reason(e)}); give a file, .jsonl, .json or .parquet, or "
                        f"a dataset of Hugging Face; known by name are {', '.join(DATASETS)}")


def json_rows(path):
    """The rows of a file with a JSON object a line, or with one list of them (.json)."""
    content = Path(path).read_bytes().rstrip()
    rows = parsed(content) if path.endswith(".json") else None
    if not isinstance(rows, list):
        rows = map(parsed, content.splitlines())
    for number, row in enumerate(rows, 1):
        require(isinstance(row, dict), f"{path}:{number}: not a JSON object; mend or remove this line")
        yield row


def first_text(row, names):
    """What stands in the first of these columns that holds something: a text or a number; else "".

    A text that JSON can hold, but nobody means (BROKEN), is none.
    """
    value = next((row[name] for name in names if row.get(name) not in (None, "")), None)
    if type(value) in (int, float, Decimal) and abs(value) < math.inf:
        value = str(value)
    is_text = isinstance(value, str) and not BROKEN.search(value)
    return value.strip() if is_text else ""


# --------------------------------------------------------------------------------------------------
# Prompts: text <-> tokens of a real model, by its own tokenizer and chat template

# Put before a chat template: it takes the place of transformers' clock. A template that writes the
# date writes this one on every day, so that a run goes on with the prompts that it began with. The
# day is the one that Llama 3.2's template writes where there is no clock.
ONE_DAY = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%m', '07') | "
    "replace('%b', 'Jul') | replace('%B', 'July') | replace('%Y', '2024') }}{% endmacro %}\n"
)
# What the rewards look for, which some tokenizers have as special tokens.
REWARDED = re.compile(r"</?(?:think|answer)>|boxed")


class ChatText:
    """A Hugging Face tokenizer with its chat template (or plain text where it has none)."""

    def __init__(self, folder, system, options=None):
        self.system = system
        self.options = options or {}       # --chat-template-kwargs
        self.in_question = False           # does the user's message hold the system's text, too?
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            stored = generation_config(folder).eos_token_id
            if self.tokenizer.chat_template and system not in self.chat([["A question?"]], tokenize=False)[0]:
                self.in_question = True
                print("the chat template leaves the system's message out: each question begins with it")
            for name in self.options:
                require(name in re.findall(r"\w+", str(self.tokenizer.chat_template)),
                        f"its chat template reads no {name} of --chat-template-kwargs")
            self.prompt("A question?")     # no question later fails where this one does not
        except Exception as e:
            raise UserError(
                f"model {folder}: its tokenizer, chat template or config cannot be used ({reason(e)}); "
                "mend it, fetch the model again or use another"
            )
        ends = stored if isinstance(stored, list) else [stored]
        ends = [end for end in [self.tokenizer.eos_token_id, *ends] if end is not None]
        require(ends, f"model {folder}: has no eos_token_id, so that nothing ends a text; mend its "
                      "generation_config.json or config.json")
        self.eos = set(ends)
        self.end = ends[0]
        added = self.tokenizer.added_tokens_decoder.items()
        unread = self.eos.union(i for i, token in added if token.special)
        self.silent = {i for i in unread if not REWARDED.search(self.shown([i]))}
        if self.tokenizer.chat_template:
            self.warn_of_other_ends()

    def prompt(self, question):
        """The token ids of a question, up to where the answer begins."""
        return self.prompts([question])[0]

    def prompts(self, questions):
        """Those of each question; together they take half of the time."""
        if self.tokenizer.chat_template:
            turns = [[question] for question in questions]
            return self.chat(turns, add_generation_prompt=True, return_dict=False)
        texts = [f"{self.system}\n\nProblem: {question}\n\nSolution:" for question in questions]
        end = [self.tokenizer.eos_token_id]            # some tokenizers end each text
        return [ids[:-1] if ids[-1:] == end else ids for ids in map(self.tokenizer.encode, texts)]

    def chat(self, all_turns, **options):
        """What apply_chat_template makes of the system's text and the turns of each: user, assistant."""
        conversations = []
        for question, *answer in all_turns:
            said = [("system", self.system), ("user", question), *zip(["assistant"], answer)]
            if self.in_question:
                said[:2] = [("user", f"{self.system}\n\n{question}")]
            conversations.append([{"role": role, "content": text} for role, text in said])
        template = ONE_DAY + self.tokenizer.get_chat_template()
        return self.tokenizer.apply_chat_template(
            conversations, chat_template=template, **self.options, **options)

    def warn_of_other_ends(self):
        """Say so if the chat template ends an answer with a token at which completions do not end."""
        answer = "An answer."
        try:
            behind = self.chat([["A question?", answer]], tokenize=False)[0].partition(answer)[2]
        except Exception:              # some templates take no answers
            return
        added = self.tokenizer.added_tokens_decoder
        tokens = [i for i in self.tokenizer.encode(behind, add_special_tokens=False) if i in added]
        if tokens and tokens[0] not in self.eos:
            print(f"warning: the chat template ends an answer with {added[tokens[0]]}, which ends no "
                  f"completion; add {tokens[0]} to eos_token_id in the model's generation_config.json")

    def worked_answer(self, work, final):
        """The token ids of a right answer, its steps and its end, in the form that is rewarded."""
        work = re.sub(r"<<.*?>>", "", work).strip()    # GSM8K's notes for a calculator
        boxed = f"\\boxed{{{final}}}"
        text = f"{work}\n{boxed}"
        if "<think>" in self.system:
            text = f"<think>\n{work}\n</think>\n<answer>\n{boxed}\n</answer>"
        if not self.tokenizer.chat_template:
            text = f" {text}"                          # behind "Solution:"
        return self.tokenizer.encode(text, add_special_tokens=False) + [self.end]

    def decode(self, ids):
        """The text of a completion without special tokens and its end, but with what a reward looks for."""
        return self.tokenizer.decode([i for i in ids if i not in self.silent])

    def shown(self, ids):
        """The text of a prompt with its special tokens."""
        return self.tokenizer.decode(ids)


def check_tokens(questions, eos, vocabulary):
    """Refuse prompts that ask nothing, and token ids for which the model has no embedding."""
    prompts = {tuple(q["prompt"]) for q in questions}
    require(len(prompts) >= len({q["question"] for q in questions}),
            "different questions have the same prompt, by the model's chat template or tokenizer; "
            "mend it or use another model")
    ids = eos.union(*prompts)
    require(min(ids) >= 0 and max(ids) < vocabulary,
            f"the model's tokenizer and eos_token_id give tokens {min(ids)} to {max(ids)}, its "
            f"vocabulary has {vocabulary}; use the tokenizer and the configs that belong to the weights")


def with_prompts(questions, tokenizer, longest):
    """Add "prompt" (token ids) to each question, and "right" to those that are made up.

    Where the prompt opens the reasoning itself, as some chat templates do, "begun" is "<think>":
    it counts as the beginning of each completion. Prompts of more than `longest` tokens are counted
    and left out.
    """
    if not questions:
        return []
    prompts = tokenizer.prompts([question["question"] for question in questions])
    for question, question["prompt"] in zip(questions, prompts):
        question["right"] = question.get("right") or right_answer(question)
        if tokenizer.decode(question["prompt"][-8:]).rstrip().endswith("<think>"):
            question["begun"] = "<think>"
    kept = [q for q in questions if len(q["prompt"]) <= longest]
    require(kept, f"no prompt fits into {longest} tokens; lower --max-new-tokens")
    say_what_is_left_out(questions, kept, f"prompts are longer than {longest} tokens")
    return kept


def write_prompts(data, tokenizer, config, max_new_tokens, processes):
    """The Data with_prompts; refuses questions that the model or the processes cannot take."""
    longest = config.max_position_embeddings - max_new_tokens
    data = Data(*(with_prompts(part, tokenizer, longest) for part in data))
    questions = sum(data, [])
    check_tokens(questions, tokenizer.eos, config.vocab_size)
    fewest = min(len(data.held_out), len(data.validation) or processes)
    require(fewest >= processes,
            f"held-out questions: {fewest}, fewer than the {processes} processes; raise "
            "--eval-questions and --validation, give more of them, or start fewer processes")
    print(f"the first prompt: {tokenizer.shown(questions[0]['prompt'])!r}")
    return data


def decode_all(tokenizer, rollout):
    """The texts of a rollout's completions."""
    rows = zip(rollout.tokens.cpu(), rollout.length.tolist())
    return [tokenizer.decode(row[:length].tolist()) for row, length in rows]
