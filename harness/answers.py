"""Does a completion answer right? GSM8K's answers are numbers, those of other data are TeX.

A number is read by what is allowed around it (NUMBER), in time proportional to the text's length.
Other TeX is compared by math-verify: pip install math-verify.
"""
import functools
import hashlib
import logging
import math
import re
import runpy
import signal
import traceback
from decimal import Decimal
from pathlib import Path

from harness.errors import UserError, require

LONGEST = 1000                 # characters: no answer that is meant is longer

# TeX and typography that say nothing about a number, and how `plain` spells them.
PLAIN = [
    (re.compile(r"\^?\s?\{?\\circ\}?"), "°"),
    (re.compile(r"\\(?:text|math|mbox|f?box|left|right|underline)[a-z]*|\\[()\[\],:; ]|[~\u00a0\u202f]"), " "),
    (re.compile(r"(?<!\\)[{}]|\\!"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"[\u2010-\u2015\u2212\ufe63\uff0d]"), "-"),
    (re.compile(r"\\approx|≈"), "="),
]
# Words that make another number of the one beside them, or say that it is not meant.
CHANGES = r"""\b(?: (?:hundred|thousand|million|billion|trillion|dozen|score|error)s? | [bmt]n
    | (?:ten|fif|four|six|seven|eigh|nin|hundred|thousand)ths? | half | halves | third | quarter
    | times | squared | cubed | factorial | modulo
    | minus | negative | plus | less | than | not | no | or | and | is | be | wrong )\b"""
# The one number of an answer, and all that may stand around it: a currency, and words for a unit.
NUMBER = re.compile(rf"""
    (?: US | [\s$€£¥(*] )*  (?P<sign> [-+]? )  [\s$€£¥(*]{{,3}}
    (?P<digits>
        (?: [1-9]\d{{,2}} (?:[,\ ]\d{{3}})+ | \d+ )  (?: \.\d* )?       # 1,250.00
      | \.\d+
    )
    (?P<power> [eE] [+-]? \d{{1,3}} )?  [\s$)]{{,3}}
    (?: [%€£¢] | °[CF]? | (?: (?<=\s)[mghslL] | [mck]m | [mk]g | m[lL] | ft | lbs? | hrs? ) (?![A-Za-z]) )?
    (?: (?<=[\s/^²³]) (?! {CHANGES}) (?: [A-Za-z][A-Za-z-]+ | a\b )      # more words
      | (?<=[A-Za-z]) \^?[23] | (?<=[A-Za-z]) [²³]                        # cm^2
      | \s?/\s? [A-Za-z]+ | \s                                            # km/h
    ){{,12}}
    [\s$*).,]*
""", re.VERBOSE)
# What stands between a number and what it is: nothing, a name, or a calculation.
EQUALS = re.compile(r"[=:]|\bis\b")
NAMED = re.compile(rf"""
    (?: (?! .* {CHANGES}) [^\W\d] [\w\s'’]*
      | [\d.,\s$()]+ (?: (?: [-+*/×÷] | \\times | \\cdot | \\div ) [\d.,\s$()]+ )+
      | \\[dt]?frac [\d\s]+
    )?
""", re.VERBOSE)
BOX = re.compile(r"""
    \\[{}]                                              # signs, which open and close nothing
    | (?P<box> \\(?:boxed|fbox)\s* )? \{ | \}
    | \\boxed\s* (?P<bare> [^\s{}$\\]*[^\s{}$\\.,] )    # \boxed 2
""", re.VERBOSE)


def last_box(text):
    """What stands in the \\boxed{} that ends last; None if none is closed. Also of "\\boxed 2"."""
    opened = []                        # of each open brace, where its content begins if it is a box's
    last = None
    for brace in BOX.finditer(text):
        if brace["bare"]:
            last = slice(*brace.span("bare"))
        elif brace.group() == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = slice(start, brace.start())
        elif brace.group() not in ("}", r"\{", r"\}"):
            opened.append(brace.end() if brace["box"] else None)
    return None if last is None else text[last]


def given_answer(completion):
    """The text between the last <answer> tags, or in the last \\boxed{} there; None without either.

    Without tags, in the last \\boxed{} of the completion.
    """
    head, _, _ = completion.rpartition("</answer>")
    _, tag, answer = head.rpartition("<answer>")
    answer = answer.partition("</answer>")[0] if tag else completion
    box = last_box(answer)
    return answer if tag and box is None else box


@functools.lru_cache(1)                        # train_gsm8k.score asks, and at once the reward
def is_right(completion, answer, anywhere=False):
    """Does a completion answer with this number (Decimal) or TeX (string)?

    What counts stands in a box or between the tags (given_answer): the last that is closed, so in
    "\\boxed{5}, no, \\boxed{7" the 5. With `anywhere`, as in evaluation, a completion with neither
    is read by its last number. A number may have a unit, but "18 M" is none: nobody knows whether
    metres or millions. None where it took too long to tell: see is_equal.
    """
    assert answer is not None              # a question without a clear answer never gets here
    given = given_answer(completion)
    if isinstance(answer, str):
        if given is None and anywhere:
            return is_equal(completion[-LONGEST:], answer, prose=True)
        return given is not None and is_equal(given, answer)
    if given is None:
        return anywhere and last_number(completion) == answer
    return one_number(given) == answer


def right_answer(question):
    """What a completion has to state: a Decimal, or where no "####" precedes it the answer's TeX."""
    return final_number(question) if "####" in question["answer"] else question["answer"]


def final_number(question):
    """The right answer of a question, a Decimal: the line behind its only "####"; None if unclear."""
    _, text, *others = question["answer"].split("####")
    return None if others else one_number(text.strip().partition("\n")[0])


def one_number(text):
    """The number of a text as Decimal, if it says nothing else (NUMBER, NAMED); else None."""
    if len(text) > LONGEST:
        return None
    *names, side = EQUALS.split(plain(text))
    number = NUMBER.fullmatch(side)
    if not number or not all(NAMED.fullmatch(name.strip(" \n$*")) for name in names):
        return None
    digits = re.sub("[, ]", "", number["digits"])
    return Decimal(f"{number['sign']}{digits}{number['power'] or ''}")


def last_number(text):
    """The last word of a text with a digit in it, as one_number reads it."""
    words = re.split(r"[\s=<]+|\.\.+|(?<=\w)-", plain(text))
    last = next((word for word in reversed(words) if re.search(r"\d", word)), "")
    return one_number(last.strip(",;:!?\"'`[]"))


def plain(text):
    """A text without TeX's wrappings and braces, and with one kind of minus."""
    for pattern, spelling in PLAIN:
        text = pattern.sub(spelling, text)
    return text


class TooSlow(BaseException):
    """Raised by the alarm; no `except Exception` of sympy stops it."""


def within(seconds, function):
    """What a function returns; TooSlow after so many seconds. In the main thread alone."""
    if not hasattr(signal, "setitimer"):               # Windows
        return function()

    def stop(signum, frame):
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def tex_comparison():
    """math-verify's (text, text) -> bool; its first call takes seconds, and so is made here."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UserError("answers in TeX need the package math-verify; pip install math-verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)    # the time limit here is our own

    def compare(right, given):
        texts = (parse(text, parsing_timeout=None) for text in (right, given))
        return verify(*texts, timeout_seconds=None)

    compare(r"\boxed{\frac{1}{2}}", r"\boxed{x}")
    return compare


patience = 1.0                 # seconds for the next TeX answer, between 0.2 and 1


@functools.lru_cache(2 ** 14)                  # the texts of a rollout repeat themselves
def is_equal(given, answer, prose=False):
    """Is this the answer, both in TeX? prose: `given` is a text that ends in what it answers.

    Only what is neither the same text nor the same number goes to math-verify, which reads both and
    compares them within `patience`: a second, which shrinks by a tenth at each text that takes longer
    and grows by as much at each that does not. So 512 slow texts take two minutes. None for a slow text:
    nobody is rewarded for TeX that takes for ever.
    """
    global patience
    if "".join(given.split()) == "".join(answer.split()):
        return True
    number = one_number(given)
    if number is not None and number == one_number(answer):
        return True
    if len(given) > LONGEST:
        return False
    compare = tex_comparison()
    text = given if prose else f"\\boxed{{{given}}}"
    try:
        right = within(patience, lambda: compare(f"\\boxed{{{answer}}}", text))
        patience = min(1, patience / 0.9)
    except TooSlow:
        right = None
        patience = max(0.2, patience * 0.9)
    return right


# --------------------------------------------------------------------------------------------------
# A user's own reward

def own_reward(name):
    """The function of --reward FILE.py:FUNCTION, (completion, question) -> a number.

    completion: the whole text; question: a dict with "question", "answer" and "right", the answer
    as a Decimal or TeX. What goes wrong in it is a UserError that names file and line.
    """
    path, _, function = name.rpartition(":")
    require(path.endswith(".py"),
            f"--reward {name}: unknown; choose answer, paper, random or FILE.py:FUNCTION")
    own = guarded(name, runpy.run_path, path).get(function)
    require(callable(own), f"--reward {name}: {path} has no function {function}")

    def earned(completion, question):
        value = guarded(name, own, completion, dict(question))       # its changes are its own
        require(guarded(name, math.isfinite, value) and abs(value) < 1e30,
                f"--reward {name}: gave {value}, which is no finite number below 1e30")
        return float(value)

    return earned


def reward_fingerprint(scheme):
    """SHA-256 of the files that a --reward names, which a resumed run must share."""
    paths = re.findall(r"([^+*]+\.py):", scheme)
    return hashlib.sha256(b"".join(Path(path.strip()).read_bytes() for path in paths)).hexdigest()


def guarded(name, function, *arguments):
    try:
        return function(*arguments)
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        # None if the function takes other arguments.
        places = [f" ({f.filename}:{f.lineno})" for f in frames
                  if f.filename != __file__ and not f.filename.startswith("<")]
        raise UserError(f"--reward {name}, a function of (completion, question): {type(e).__name__}: {e}"
                        + "".join(places[-1:]))
