"""Numbers in texts: what a completion answers, and what a question's worked answer ends with."""
import re
from decimal import Decimal

NUMBER = re.compile(r"""
    (?: (?<![\w)}]) - )?                                # perhaps a minus that is not a subtraction
    \$?
    (?: (?: \d{1,3} (?:,\d{3})+ (?!\d) | \d+ )         # digits with or without commas
        (?: \.\d+ )?                                   # and perhaps decimals
      | (?<![\d.]) \.\d+ )                            # or decimals alone
""", re.VERBOSE)
# What stands before the last number if that is a fraction's denominator: "3/" or "\frac{3}{".
FRACTION = re.compile(r"[\d)]\s*/\s*\(?$|\\[dt]?frac\{[^{}]*\}\{$")


def answered_number(completion):
    """The number between the last <answer> tags, else in the last \\boxed{}, else None."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    answers = answers or re.findall(r"\\boxed\{([^{}]*)\}", completion)
    return parse_number(answers[-1]) if answers else None


def stated_number(completion):
    """What evaluation accepts: answered_number, or else the last number of the text."""
    number = answered_number(completion)
    return parse_number(completion) if number is None else number


def final_number(question):
    """The right answer of a question: the first word behind "####"."""
    return parse_number(question["answer"].split("####")[1].split()[0])


def parse_number(text):
    """The last number in a text as Decimal, tolerant of $, commas, .00 and \\boxed{}.

    None without a number, and where the last one is the denominator of a fraction.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",")     # the typographic minus, TeX's comma
    last = None
    for last in NUMBER.finditer(text):
        pass
    if last is None or FRACTION.search(text[:last.start()]):
        return None
    return Decimal(last.group().replace("$", "").replace(",", ""))
