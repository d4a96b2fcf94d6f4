"""Numbers in texts: what a completion answers, and what a question's worked answer ends with.

These are our own expressions and not math-verify's, which takes "3, 5", "4 or 5" and "- 5" for 5
but \\boxed{5 dollars} for nothing, and whose time limit works in the main thread only.
The time that a text takes is proportional to its length, however odd the text.
"""
import re
from decimal import Decimal

NUMBER = re.compile(r"""
    (?: (?<![\w)}]) - )?                               # perhaps a minus that is not a subtraction
    \$?
    (?: \d+ (?:\.\d+)? | (?<![\d.]) \.\d+ )            # digits, decimals or both
    (?: e [+-]? \d{1,3} (?!\d) )?                      # perhaps times a power of ten
""", re.VERBOSE | re.IGNORECASE)
# All before the last side of an equation, or of a sentence that says what a number is.
SIDES = re.compile(r".*(?:(?<!\\not)=|≈|\\approx|\bis\b)", re.DOTALL)
UP_TO_LAST_DIGIT = re.compile(r".*\d", re.DOTALL)
# Digits in groups: of three, which make one number, or else several numbers.
COMMAS = re.compile(r"(?<!\d)(?<!\d\.)\d+(?:,\d+)+")
SPACES = re.compile(r"(?<!\d)(?<!\d\.)\d+(?:[ \u00a0\u202f]\d+)+")
THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:\D\d{3})+")
# What makes another number of the one behind or before it: 1/5, 2^5, x_5, x + 5, \frac{x}{5}, 5²,
# 5k, 5x.
OPERATOR = r"\\(?:[dt]?frac|sqrt|log|ln|exp|sin|cos|tan|cdot|times|div|pm|mp|pi)"
SIGN = r"[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2089\u2150-\u215e\u2044\u2215\u221a÷×±π]"
BEFORE = re.compile(
    rf"(?: [/^<>≠≤≥] | \\(?:neq?|[lg]eq?|[lg]t) | [^\W_]_ | \}}\s*\{{ | {SIGN} | {OPERATOR}"
    rf"  | \b[A-Za-z] \s* [-+*] ) [\s({{$]* $", re.VERBOSE,
)
AFTER = re.compile(
    rf"[kKMxyz]\b | \s*(?:hundred|dozen|thousand|million|billion|trillion)\b | [)}}]* {SIGN}"
    rf" | [\s)}}]* {OPERATOR}", re.VERBOSE,
)
# The imaginary unit behind a number: 5i, 5\,i, 5\mathrm{i}; but not in "5 i think" or "5, i.e. five".
IMAGINARY = re.compile(r"[\s,)}]* \{? i\b (?! \s+\w | \.e )", re.VERBOSE)
# What says of a number that it is not meant: "not 5", "isn't 5", "not equal to 5".
DENIED = re.compile(
    r"(?: (?:\b(?:[Nn]ot|NOT) | n['\u2019]t) (?:\s+ (?:be|equal(?:\s+to)?))? | \\(?:neg|lnot|not\s*=) )"
    r" [\s({}$*]* $", re.VERBOSE,
)
# A minus that NUMBER has not seen: "- 5", "-{5}", "{-}5"; but in "Answer - 5" it is a dash.
MINUS = re.compile(
    r"(?: (?:^|[^\w)}\s])\s*- | \b(?:[Mm]inus|[Nn]egative) ) [\s({})$*]* $", re.VERBOSE,
)
BRACE = re.compile(r"\\[{}]|(\\boxed\s*)?\{|\}")       # \{ and \} are signs, and open or close nothing

SURROGATE = re.compile("[\ud800-\udfff]")       # half of a character, which no file can hold
# What behind a question's answer says that the first word is not all of it: "2 - 3", "5 million",
# "2 hours 30 minutes", but not "1,200 m2" or "5 km/h".
GOES_ON = re.compile(rf"""
    .*? (?: (?<!\w)[-–—/] | [+*=×<>:\\] | (?<![A-Za-z^])\d | {SIGN}
          | \b(?:[kKMB]|to|and|or|less|more|times|over|squared|cubed|half)\b
          | \b(?:hundred|dozen|thousand|million|billion|trillion)\b )
""", re.VERBOSE)
LONGEST = 1000                 # characters: no number that is meant, with its unit, is longer

# TeX and typography that say nothing about the number, and how `plain` spells them.
PLAIN = [
    (re.compile(r"[\u2010-\u2015\u2212\ufe63\uff0d]"), "-"),
    (re.compile(r"(\\(?:text|mathrm|mbox)\s*\{[^{}]*\})\s*\^\s*\{?[23]\}?"), r"\1"),     # cm^3
    (re.compile(r"\\,|\{,\}"), ","),
    (re.compile(r"\\!|\^\s*\{?\\circ\}?"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\[()\[\]; ]|\\(?:text|math|left|right|boxed|mbox)[a-z]*|~"), " "),
]


def last_box(text):
    """What stands in the \\boxed{} that ends last; None if none is closed."""
    opened = []                        # of each open brace, where its content begins if it is a box's
    last = None
    for brace in BRACE.finditer(text):
        if brace.group() == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = slice(start, brace.start())
        elif brace.group() not in ("}", r"\{", r"\}"):
            opened.append(brace.end() if brace[1] else None)
    return None if last is None else text[last]


def answered_number(completion):
    """The one number between the last <answer> tags, or in the last \\boxed{} there; else None.

    Without tags, in the last \\boxed{} of the completion.
    """
    head, _, _ = completion.rpartition("</answer>")
    _, tag, answer = head.rpartition("<answer>")
    answer = answer.partition("</answer>")[0] if tag else completion
    box = last_box(answer)
    if not tag and box is None:
        return None
    return one_number(answer if box is None else box)


def right_answer(question):
    """What a completion has to state: a Decimal, or where no "####" precedes it the answer's TeX."""
    return final_number(question) if "####" in question["answer"] else question["answer"]


def stated_number(completion):
    """What evaluation accepts: answered_number, or else the last number of the text."""
    number = answered_number(completion)
    return parse_number(completion) if number is None else number


def final_number(question):
    """The right answer of a question: the first word behind "####", or "1 000"; None if unclear."""
    _, text, *others = question["answer"].split("####")
    if others:
        return None
    word = re.match(r"\s*\S+(?:[ \u00a0\u202f]\d+(?!\S))*", text)
    if not word or GOES_ON.match(text[word.end():]):
        return None
    return one_number(word.group())


def one_number(text):
    """The number of a text that holds no other, else None: not for "3, 5", "4 or 5" or "1,00".

    Of an equation, or a sentence with "is", the last side with a number counts.
    """
    numbers = UP_TO_LAST_DIGIT.match(text)
    if not numbers:
        return None
    guesses, _, _ = numbers.group().rpartition(" or ")
    sides = SIDES.match(numbers.group())
    start = sides.end() if sides else 0
    if re.search(r"\d", guesses) or numbers.end() - start > LONGEST:
        return None
    side = SPACES.sub(join_thousands, plain(text[start:numbers.end() + LONGEST]))
    match, *others = NUMBER.finditer(side)
    number = value(match)
    if number is None or others:
        return None
    return -number if MINUS.search(side[:match.start()]) else number


def parse_number(text):
    """The last number in a text as Decimal, tolerant of $, commas, .00, TeX and other numbers.

    None without a number, and where the last one is part of another, as a denominator is, or denied.
    """
    numbers = UP_TO_LAST_DIGIT.match(text)
    if not numbers:
        return None
    end = numbers.end()
    *_, last = NUMBER.finditer(plain(text[max(0, end - LONGEST):end + LONGEST]))
    return value(last)


def plain(text):
    """A text without TeX's wrappings, with one kind of minus and without thousands' commas."""
    for pattern, spelling in PLAIN:
        text = pattern.sub(spelling, text)
    return COMMAS.sub(join_thousands, text)


def join_thousands(digits):
    """The digits of "1,250" or "1 250" as one number, those of "3,4" as two."""
    grouped = THOUSANDS.fullmatch(digits.group())
    return re.sub(r"\D", "" if grouped else " ", digits.group())


def value(match):
    """A match of NUMBER as Decimal; None if what stands around it denies it or makes it another."""
    start, end = match.span()
    text = match.string
    before = text[max(0, start - 16):start]
    if BEFORE.search(before) or DENIED.search(before):
        return None
    if AFTER.match(text, end) or IMAGINARY.match(text, end):
        return None
    return Decimal(match.group().replace("$", ""))
