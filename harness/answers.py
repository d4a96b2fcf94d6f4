r"""Does a completion answer right? GSM8K's answers are numbers, those of other data are numbers or TeX.

Where the right answer is a number, a box or the tags may hold this and nothing else (`one_number`):
- a currency sign or code, one number, a percent or degree sign, and units, in this order;
- a number is a decimal with or without thousands, sign and power of ten, a fraction or a mixed number:
  1,250.00, -.5, 1e5, 2 \times 10^3, 1/2, \frac{1}{2}, 5 1/2; TeX that only sets type says nothing (`plain`);
- units are at most three words behind the number, which the question has, too: in the singular or
  plural, or longer ("min" for minutes); the first there behind a numeral, an article or their like
  (COUNTING), or one word further on; "dollars" also where it has $; "/" or "per" may stand before them;
- words of one or two letters are units if they are measures (UNIT), as others are unknowns;
- number words and comparisons ("million", "more": NO_UNIT) are units only behind "how many" or "number of";
- beside the number may stand calculations, with "=" between, that have its value (2 + 3 = 5, 5 = 2 + 3),
  and one letter (x = 5).

A right answer in TeX is a number if it is one by this rule and no letter stands behind a digit (5x). What
stands in its \text{} and common measures (6 hours) are units, too. Where it has %, ° or a unit's power, a
box has no other. 0.25 is right for 25 %, and 25 % for 0.25 if the question does not speak of percent.

Other TeX is compared by math-verify (pip install math-verify), each side of an equation for itself.

Known, right and refused: 25 % for 0.25 if the question speaks of percent; a unit behind other TeX and not
in \text{} (\sqrt{2} cm); another name of a unit (5 in for 5 inches); a right answer's rare units that the
question lacks (9 litres); numbers for a right answer in words ("twelve"); several roots as equations or
with a word between (x = 1, x = -2 for 1,-2).
Known, wrong and paid: a unit of the question that is not asked for (41 cows for $41); any currency; %, ° or
a unit's power where the right answer has none (24 % for 24); words of the question that are no unit there,
such as an unknown's name (3 theta) and number words of other languages than English and Chinese.
"""
import functools
import logging
import math
import os
import re
import signal
import traceback
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from harness.errors import UserError, require
from harness.folders import fingerprint, run_file

LONGEST = 1000                 # characters: no answer that is meant is longer
PATIENCE = 5                   # seconds of the process: no comparison of TeX that is meant takes longer

# TeX and typography that say nothing about a number, and how `plain` spells them.
PLAIN = {
    r"(?<=\d)\s?\\[dtc]?frac\s?(?:\{(\d+)\}|(\d))\s?(?:\{(\d+)\}|(\d))": r" \1\2/\3\4",     # 5\frac{1}{2}
    r"\\[dtc]?frac\s?(?:\{([^{}]*)\}|(\d))\s?(?:\{([^{}]*)\}|(\d))": r"(\1\2)/(\3\4)",
    r"\^?\s?\{?\\circ\}?": "°",
    r"\\(?:(?:text|math)?(?:bf|it|rm|sf|tt|normal)|text|math|boldsymbol|bm|mbox|f?box(?:ed)?|left|right"
    r"|underline|displaystyle|small|[lL]arge|LARGE|[hH]uge|q?quad)(?![A-Za-z])"
    r"|\\[()\[\],:; ]|~|[^\S\t-\r]": " ",     # any space but tabs and ends of lines
    r"\\[hv]?phantom\s?\{[^{}]*\}|(?<!\\)[{}]|\\!|[\u200b-\u200d\u2060\ufeff]": "",
    r"\\([$%])": r"\1",
    r"\bpercent\b": "%",
    "¢": " cents ",
    "²": "^2",
    "³": "^3",
    r"[\u2010-\u2015\u2212\ufe63\uff0d]": "-",
    r"\\times|\\cdot|[×·]|(?<=\d)\s?x\s?(?=\d)": "*",
    r"\\div|÷": "/",
    r"\\approx|≈": "=",
    r"(?<![\d.,^])10\s?\^\s?([-+]?\d{1,3})(?!\d)": r"1e\1",
}
DECIMAL = r"(?:(?:[1-9]\d{,2}(?:[,\ ]\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
MONEY = (r"(?:[A-Z]{,2}\s?\$|[£-¥฿\u20a0-\u20cf]|\\pounds\b"
         r"|(?:USD?|EUR|GBP|INR|JPY|CNY|RMB|AUD|CAD|CHF|Rs)\b\.?)")
OPEN = r"[\s*`$(\[]{,5}"
CLOSE = r"[\s*`$)\](.,]{,5}"
LETTER = r"[^\W\d_²³¹¼-¾\u2070-\u218b\u2460-\u24ff]"
WORD = rf"{LETTER}+(?:['’]{LETTER}+)?"
NUMBER = re.compile(rf"""
    {OPEN} {MONEY}? {OPEN} (?P<sign> [-+]? ) {OPEN} {MONEY}? {OPEN}
    (?: (?P<whole> \d+ ) \s (?= \d{{1,2}} / \d{{1,3}} (?!\d) ) )?
    (?P<above> {DECIMAL} )
    (?: \s?\*\s? (?P<power> 1e[-+]?\d+ ) | \s?\)?\s? / \s?\(?\s? (?P<below> {DECIMAL} ) )?
    {CLOSE} (?: % | °\s?(?:[CF]\b)? | {MONEY} )? {CLOSE}
    (?: (?: / | per\b ) \s? (?={LETTER}) )? (?P<units> (?: {WORD} (?: \^?[23] )? (?!\w) [\s/-]* ){{,3}} )
    (?<! [\s\d]a ) {CLOSE}
""", re.VERBOSE)
NAME = re.compile(r"[\s$*]*[A-Za-z]?\s*")                # of an unknown, before "="
# What numerals are made of; behind a number it makes another number.
NUMERAL = r"""(?: \d\S* | (?: one | two | three | four | five | six | seven | eight | nine | ten | eleven
    | twelve | fif | eigh | nin | twelf | hundred | thousand | [mbtr]+illion | lakh | crore | dozen | score
    | (?: twen | thir | for | four | fif | six | seven | eigh | nine ) (?: teen | ty | tie )
    | half | halve | third | quarter ) (?: th )? s?
    | [十百万萬亿億半倍]\S* | 千 (?! [克米] ) \S* )"""
# What is no unit, except in a question with "how many" or the like before it.
NO_UNIT = rf"""(?: {NUMERAL} | pairs? | times | more | less | fewer | than | plus | minus | twice | double
    | triple | and | or | to | not | no )"""
# What a unit stands behind in a question, or one word further on.
COUNTING = rf"""(?: {NO_UNIT} | (?: many | much ) (?: \s\S+ )?
    | a | an | the | per | each | every | of | in | what )"""
# A unit of one or two letters, as others are unknowns; or a longer word.
UNIT = r"""(?: an? | of | in | by | on | at | [cdkm]?m | [km]?g | [cdm]?l | [kmgt]b | k?w | [hs] | hr | ft
    | yd | mi | oz | lb | sq | pt | qt | hz | [ap]m | (?! [a-z]{1,2} $ ) .* )"""
# A letter behind a digit, but in 1e5 and 2x10.
UNKNOWN = re.compile(r"\d(?!e[-+]?\d|x\d)[A-Za-z]")
# What a right answer in TeX has for units, whatever the question says: in \text{}, or a measure.
OWN_UNITS = re.compile(r"""
    (?<=\{) [^{}]+ | (?<=\d\ ) (?: [cdkm]m | kg | ml | ft | mph | km/h | m/s | (?: dollar | cent | degree
    | unit | mile | second | minute | hour | day | week | month | year
    | (?: kilo | centi )? (?: meter | metre | gram ) )s? ) \b
""", re.VERBOSE)
# Signs and powers, which make units others.
SIGN = re.compile(r"[%°]|(?<=[A-Za-z])(?<!\de)[23]|(?<=[A-Za-z]\^)[23]")
# The signs of numbers and calculations, and a word behind them that may change them. What parts them.
RUN = re.compile(rf"""
    (?: [A-Za-z] (?=\d) )?
    (?: [-+*/^_|!%:.,\ \d()\[\]$£-¥฿\u20a0-\u20cf\\] | (?<=\d) [eE] (?=[-+]?\d) )+
    (?: (?<=\d) [^\W_]+ | (?<=\ ) {NUMERAL} \b )?
""", re.VERBOSE)
BREAK = re.compile(r"[=<>\n]|\.\.+|[:;?!.,](?=\s|$)|(?<=[^\W\d_])(?<!\d[eE])[-.]|(?<=[^\W\d_])\^[23]")
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


@functools.lru_cache(1)                        # the reward asks, and at once train_gsm8k.score
def is_right(completion, answer, question="", anywhere=False):
    """Does a completion answer this question with this number or TeX (a string)?

    What counts stands in a box or between the tags (given_answer): the last that is closed, so in
    "\\boxed{5}, no, \\boxed{7" the 5. With `anywhere`, as in evaluation, a completion with neither
    is read by its last number. None where it is too much work to tell: see is_equal.
    """
    given = given_answer(completion)
    if given is None and not anywhere:
        return False
    number = answer
    if isinstance(answer, str):
        question = " 1 ".join([question, *OWN_UNITS.findall(answer)])
        number = None if UNKNOWN.search(answer) else one_number(answer, question)
    if number is not None:
        found = last_number(completion, question) if given is None else one_number(given, question)
        signs, allowed = (set(SIGN.findall(plain(str(text)))) for text in (given, answer))
        if allowed and signs - allowed:
            return False
        if "%" in allowed - signs and found == number / 100:                           # 0.25 for 25 %
            return True
        if "%" in signs - allowed and abs(number) < 1 and "percent" not in question:   # 25 % for 0.25
            number *= 100
        return found == number
    if given is None:
        return is_equal(completion[-LONGEST:], answer, question, prose=True)
    return is_equal(given, answer, question)


def right_answer(question):
    """What a completion has to state: the number behind the only "####", a Fraction, None if unclear.

    Of an answer without "####" the text, TeX.
    """
    text, *finals = question["answer"].split("####")
    if not finals:
        return text
    line = finals[0].strip().partition("\n")[0]
    return one_number(line, question["question"]) if len(finals) == 1 else None


@functools.lru_cache(1024)                     # many completions of a question have the same answer
def one_number(text, question=""):
    """The number of a text as a Fraction, if it says nothing else: the rule above; else None."""
    if len(text) > LONGEST:
        return None
    sides = plain(text).strip().split("=")
    *others, last = sorted(sides, key=lambda side: bool(NUMBER.fullmatch(side)))
    number = NUMBER.fullmatch(last)
    words = number and re.findall(WORD, number["units"].lower())
    if not number or words and not are_units(words, question):
        return None
    value = calculated(f"{number['sign']}({number['whole'] or 0}+{number['above']}*{number['power'] or 1}"
                       f"/{number['below'] or 1})")
    same = all(NAME.fullmatch(side) or calculated(side) == value for side in others)
    return value if same else None


def calculated(text):
    """The exact value of a calculation with + - * / and brackets, a Fraction; else None."""
    def exact(number):
        return f"Fraction('{re.sub('[, ]', '', number[0])}')"

    text = text.replace("$", " ").strip()
    # Python evaluates numbers and these signs alone: no name, no power.
    if not re.fullmatch(r"(?:[0\s+()-]|[*/](?![*/]))*", re.sub(DECIMAL, "0", text)):
        return None
    try:
        return Fraction(eval(re.sub(DECIMAL, exact, text), {"Fraction": Fraction}))
    except Exception:                          # it is no calculation, or divides by 0
        return None


def are_units(words, question):
    """Does the question have these words as units, the first behind a numeral or its like?"""
    # Without TeX's commands and unknowns; "$12" says 12 dollars.
    question = re.sub(r"\$[^$\d]*\$(?!\d)|\\\(\D*?\\\)|\\[a-z]+", " ", question.lower())
    question = plain(question).replace("$", " 1 dollars ")
    said = " ".join(re.findall(rf"\d[\d.,]*|{WORD}", question))

    def follows(before, word):
        if word >= "\u0e00":                   # Thai, Chinese, Japanese: no spaces between words
            return word in question
        beginning = re.sub("(?<=...)(?:ies|e?s|e|y|ren)$", "", word)
        whole = r"\b" if len(beginning) < 3 else ""
        return re.search(rf"(?:^|\s){before}{beginning}{whole}", said, re.VERBOSE)

    def is_unit(word):
        asked = re.search(rf"\b(?:how (?:many|much)|number of) (?:more )?{word}\b", said)
        counted = follows(rf"(?! {NO_UNIT} (?:\s|$) )", word)
        return asked or counted and re.fullmatch(UNIT, word, re.VERBOSE)

    return follows(rf"{COUNTING}\s(?:\S+\s)?", words[0]) and all(map(is_unit, words))


def last_number(text, question=""):
    """The last number of a text as a Fraction; None if it is a part: of 7 - 2, of 5 million."""
    runs = [run for run in RUN.findall(BREAK.sub("\n", plain(text))) if re.search(r"\d", run)]
    return one_number(runs[-1].lstrip(" :,|*").rstrip(" :|/!-"), question) if runs else None


def plain(text):
    """A text without TeX's wrappings and braces, and with one kind of minus."""
    for pattern, spelling in PLAIN.items():
        text = re.sub(pattern, spelling, text)
    return text


class TooSlow(BaseException):
    """Raised by the alarm; no `except Exception` of sympy stops it."""


def within(seconds, function):
    """What a function returns; None after so many seconds of this process. For the main thread."""
    if not hasattr(signal, "setitimer"):               # Windows
        return function()

    def stop(signum, frame):
        raise TooSlow

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        return function()
    except TooSlow:
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def tex_comparison():
    """math-verify's (text, text) -> bool; its first call takes seconds, and so is made here."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise UserError("answers in TeX need the package math-verify; pip install math-verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)    # the time limit here is our own
    # It would leave units out, and with them unknowns: 12ab would be 12.
    config = LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True))

    def compare(right, given):
        texts = (parse(text, [config], parsing_timeout=None) for text in (right, given))
        return verify(*texts, float_rounding=15, timeout_seconds=None)

    compare(r"\boxed{\frac{1}{2}}", r"\boxed{x}")
    return compare


# TeX that is too much work to compare: long numbers, exponents and factorials, towers of powers.
HEAVY = re.compile(r"""
    \d{16} | (?: \^ | \d\s?E ) \s?\{?\s?[-+]?\d{3} | \d{3}\s?[)}]*! | (?: \^ [^^]* ){9}
    | \^\s? (?: \{ [^{}]* | \w\s? ) \^
""", re.VERBOSE)
# What math-verify does not tell apart: bases, factorials, sets, pairs and points.
MARKS = re.compile(r"_\s?\{?(\w+)|(\w+)\s?!|(\\\{)|(\[)[^][()]*,")
TEXT = re.compile(r"\\(?:text|mathrm|mbox)[a-z]*\s?\{([^{}]*)\}")
# What it does not read: units at the end, which are no numerals, and thousands: 1,000x.
UNREAD = re.compile(rf"""
    (?<=[\w)}}]) [\s\\,;]* \\(?:text|mathrm|mbox)[a-z]*\s? (?! [^}}]* \b {NO_UNIT} \b ) \{{[^{{}}]*\}}
    (?: \^\{{?[23]\}}? )? $
    | (?<=\d) (?: , | \{{,\}} ) (?= \d{{3}} (?: ,\d{{3}} )* [A-Za-z\\] )
""", re.VERBOSE)


@functools.lru_cache(2 ** 14)                  # the texts of a rollout repeat themselves
def is_equal(given, answer, question, prose=False):
    """Is this the answer, both in TeX? prose: `given` is a text that ends in what it answers.

    Only what is not the same text goes to math-verify, which reads both and compares them. None for
    what is HEAVY or, as a last resort, takes PATIENCE: nobody is rewarded for it.
    """
    if "".join(given.split()) == "".join(answer.split()):
        return True
    if len(given) > LONGEST:
        return False
    depths = accumulate((sign in "([{") - (sign in ")]}") for sign in given)
    if HEAVY.search(f"{given} {answer}") or max(depths, default=0) > 8:
        return None
    sides = [side for side in given.split("=") if not NAME.fullmatch(side)]
    if len(sides) > 1 and "=" not in answer and not prose:
        verdicts = [is_equal(side, answer, question) for side in sides]
        return None if None in verdicts else all(verdicts)
    words = re.findall(r"[^\s()]+", " ".join(TEXT.findall(given)).lower())
    more_words = {*words} - {*re.findall(r"\w+", f"{answer} {question}".lower())}
    if not prose and (more_words or MARKS.findall(given) != MARKS.findall(answer)):
        return False
    compare = tex_comparison()
    right, box = (f"\\boxed{{{UNREAD.sub('', text)}}}" for text in (answer, given))
    return within(PATIENCE, lambda: compare(right, given if prose else box))


# --------------------------------------------------------------------------------------------------
# A user's own reward

TERM = re.compile(r"""
    (?: ^ | \+ ) \s* (?: ([-+]?(?:\d{1,9}\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?) \s*\*\s* )?
    (answer | paper | random | .+?\.py:\w+ | [^+]*?) (?= \s* (?: \+ | $ ))
""", re.VERBOSE)


def terms(scheme):
    """[(weight, name)] of a --reward, a sum of [WEIGHT*]NAME; the paths in names may hold + and *."""
    found = [(float(weight or 1), os.path.expanduser(name)) for weight, name in TERM.findall(scheme)]
    for weight, name in found:
        require(abs(weight) < 1e30 and re.fullmatch(r"answer|paper|random|.+\.py:\w+", name),
                f"--reward {scheme}: {name or 'an empty term'} is unknown, or its weight is not below 1e30; "
                "choose answer, paper, random or FILE.py:FUNCTION, or a sum as 2*answer+0.1*FILE.py:FUNCTION")
    return found


def own_reward(name):
    """The function of --reward FILE.py:FUNCTION, (completion, question) -> a number.

    completion: the whole text; question: a dict with "question", "answer" and "right", the answer
    as a Fraction or TeX. What goes wrong in it is a UserError that names file and line.
    """
    path, _, function = name.rpartition(":")
    own = getattr(guarded(name, run_file, path), function, None)
    require(callable(own), f"--reward {name}: {path} has no function {function}")

    def earned(completion, question):
        # Its changes are its own; "prompt" is a list, which it could change for all.
        asked = {key: value for key, value in question.items() if key != "prompt"}
        value = guarded(name, own, completion, asked)
        require(guarded(name, math.isfinite, value) and abs(value) < 1e30,
                f"--reward {name}: gave {value}, which is no finite number below 1e30")
        return float(value)

    return earned


def reward_fingerprint(scheme):
    """SHA-256 of the files that a --reward names, which a resumed run must share."""
    paths = [name.rpartition(":")[0] for _, name in terms(scheme)]
    return fingerprint(Path(path).read_bytes() for path in paths if path)


def guarded(name, function, *arguments):
    try:
        return function(*arguments)
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        ours = os.path.dirname(__file__), "<"
        # None if the function takes other arguments.
        places = [f" ({f.filename}:{f.lineno})" for f in frames if not f.filename.startswith(ours)]
        raise UserError(f"--reward {name}, a function of (completion, question): {type(e).__name__}: {e}"
                        + "".join(places[-1:]))


# --------------------------------------------------------------------------------------------------
# Completions and their questions

def answers_to(questions, texts):
    """[(a whole completion, its question)] of the texts, of which each question has as many.

    question["begun"] is what a prompt or a method has begun of the completion.
    """
    group = len(texts) // len(questions)
    asked = [question for question in questions for _ in range(group)]
    return [(question.get("begun", "") + text, question) for question, text in zip(asked, texts)]


def grade(completion, question, anywhere=False):
    """is_right of a completion: True, False, or None if it is too much work to tell."""
    return is_right(completion, question["right"], question.get("question", ""), anywhere)
