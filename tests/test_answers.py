"""Answers, rewards and questions."""
import random
import re
import shutil
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

import qerl
from harness.errors import UserError
import train_gsm8k
from harness import answers, evaluation
from harness.answers import given_answer, is_right, last_number, one_number
from harness.answers import reward_fingerprint, right_answer, terms
from harness.data import ChatText, load_questions, math_questions, read_questions, with_prompts
from harness.folders import read_jsonl, write_jsonl
from harness.policy import SYSTEM, instruction
from harness.ranks import Ranks
from harness.small_policy import WordText, made_up_problems
from train_gsm8k import answer_reward, paper_reward

# --------------------------------------------------------------------------------------------------
# Answers

QUESTION = ("Ann has 3 red apples and half as many pears, at 2 o'clock. She walks 4 miles per hour, "
            "7 m wide, 9 cm long, twice a day; 10% of it costs $12 million, two-thirds of 6 square feet. "
            "In China 3元, 8个苹果. She has 2 dozen eggs, 3 pairs of socks, 2½ pies, 10⁷ and 7 twelfths of "
            "a pq, with $xy$ of $ab$ and \\sin of \\tan. How many more minutes?")


def entries(table):
    """The texts of a table, which line ends and wide gaps part."""
    return re.split(r"\n *|  +", table.strip())


def rows(table):
    """The cells of each line of a table, which "|" parts."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


# What is not 5, though a 5 is its last digit, whatever the question says. Line by line: another number,
# thrice; words that change it, thrice; a sign; an unknown or a relation, twice; words that the question
# does not have or that are too many; an equation that is none; a denial; several numbers; no number.
NOT_FIVE = ["", "3\n5", *entries(r"""
    55   5/7   5^2   1e5   0x5   5½   5²   1,5   5.5.5   1 005   5 ,000   5 x 10^3
    \sqrt{5}   \frac15   5!   |5|   5(200)   5/0   5/2/2
    5⁷   5\textonehalf   5\textperthousand   1 1/5   1\frac{1}{5}   5(1/2)   5/   5¢
    5 pi   5 divided by two   5 point five   5 or six   negative 5
    5 tripled   5 K   5 halves
    5 half apples   5 \text{ hundred}   5百万元   5 million   million 5   minus 5   dozen 5
    5 doz   5 dozen   5 twelfths   5 sixteenths   5 pairs
    - 5   −5   -{5}   \pm 5   \textminus 5
    5n   5 xy   x - 5   x_5   f(5)   >5   2x = 5   \cancel{5}
    5 pq   5 ab   5 a   5 sin   5 tan
    5 walks   5 apples in a day   5 pigs   pigs 5   5 apples pigs   5 is wrong
    5 + 1   1 + 5 = 5   2+2=5   6 = 5   5 = 2 + 2   5 = 2 + 3 = 6   2(3) = 5   1/0 = 5   ((5 = 5   7 + = 5
    x is not 5   \neg 5   not 3, it is 5   5 apples and   5 not   no: 5
    3:5   3-5   5, 3   1 5   x = 3 or x = 5   5 (or 6)   5 hours 30 minutes
    \text{cm}^5
""")]

# Line by line: a number; typesetting, twice; money; other signs; a calculation or an
# unknown beside it, twice.
FIVE = ["\n5\n", "5\u200b", "\ufeff5", *entries(r"""
    5.00   +5   (5)   5e0   05   10/2   0 + 5 = 5   \dfrac{10}{2}   0.5 \times 10^1
    {5}   \(5\)   **5**   [5]   \large 5   \boldsymbol{5}   \rm 5   \small 5   5\quad   `5`
    \phantom{0}5   \hphantom{-}5   \mathbf{5}   \boxed{5}
    US$5   ₹5   Rs. 5   USD 5   5 €   C$5   HK\$5   \pounds 5
    5\%   5 percent   5^\circ   5°C   5^\circ\text{F}
    (10-5) = 5   x = 2 \times 3 - 1 = 5   \frac{20}{4} = 5   \$2 + \$3 = \$5
    5 = 2 + 3   x = 5 = 10/2
""")]

# Only with this question.
FIVE_UNITS = entries(r"""
    \text{5 apples}   5 Apple   5 red apples   2 + 3 = 5 apples.   5 (pears)
    5\text{ cm}^3   5 cm²   5 square feet   5 miles/hour   5 min   5 more minutes   5 o'clock
    $5 a day   5 dollars   5元   $5/hour   5/hour   5 per hour   5/day
""")


@pytest.mark.parametrize("text,five", (
    dict.fromkeys(NOT_FIVE, False) | dict.fromkeys(FIVE + FIVE_UNITS, True)).items())
def test_only_one_clear_number_counts(text, five):
    """Of a completion and, behind "####" or alone, of the right answer. Units are the question's."""
    asked = {"question": QUESTION, "right": Fraction(5)}
    for completion in (f"<answer>{text}</answer>", f"so \\boxed{{{text}}}",
                       f"<answer>after 3 tries \\boxed{{{text}}}</answer>"):
        assert answer_reward(completion, asked) == five
        assert bool(answer_reward(completion, {"right": "5.0"})) == (five and text not in FIVE_UNITS)
    assert (right_answer({"question": QUESTION, "answer": f"so 7\n#### {text}\n8"}) == 5) == five
    if five:
        assert is_right("\\boxed{5}", text, QUESTION)


@pytest.mark.parametrize("text,number", [["1\u2009250", "1250"]] + rows(r"""
    1,250.00 | 1250
    1{,}250 | 1250
    1\,250 | 1250
    1e5 | 100000
    10^{3} | 1000
    1.5 \cdot 10^{-2} | 3/200
    -\tfrac{1}{2} | -1/2
    5 1/2 | 11/2
    -5\frac{1}{2} | -11/2
    2 \dfrac14 | 9/4
    x=- 5 | -5
    \text{-}5 | -5
"""))
def test_the_number_of_an_answer(text, number):
    """The same behind "####" and in TeX."""
    right = right_answer({"question": "", "answer": f"#### {number}"})
    assert is_right(f"\\boxed{{{text}}}", right)
    assert is_right(f"\\boxed{{{number}}}", text)


@pytest.mark.parametrize("text,number", rows(r"""
    -$7.00 | -7
    it is 5 + 3 = 8 apples. | 8
    Total-5 | 5
    wait...18 | 18
    so 5 and **18**. | 18
    18 (eighteen) | 18
    $90/hour | 90
    答案是18。 | 18
    it has 3 000 | 3000
    it is - 5 | -5
    it is 1.5e6 | 1500000
    7 \times 10^{3} | 7000
    = 10^6. | 1000000
    it is 7e-3, so | 7/1000
    it is 5 1/2 | 11/2
    18 km^2 | 18
    18km^2 | None
    5km2 | None
    3,4 | None
    so 7 - 2 | None
    worth 5 million | None
    the 5th | None
    x2 | None
    none | None
"""))
def test_the_last_number_of_a_text(text, number):
    assert str(last_number(text)) == number


@pytest.mark.parametrize("text,answer", rows(r"""
    \boxed{1} \boxed {\frac{3^{\frac{1}{2}}}{2}} } \boxed{2 | \frac{3^{\frac{1}{2}}}{2}
    \boxed{\{1, 2\}} | \{1, 2\}
    \boxed{\boxed{5}} | \boxed{5}
    } boxed{5} | None
    \boxed{5}, no, \boxed{7 | 5
    so $\boxed 2$. | 2
    \fbox{3} | 3
    <answer>3 <answer>5</answer> 7</answer> | 5
    <answer>5</answer> <answer>6 | 5
    <answer>so \boxed{5}</answer> \boxed{6} | 5
"""))
def test_what_stands_in_the_last_box_or_tag_is_the_answer(text, answer):
    assert str(given_answer(text)) == answer


@pytest.mark.parametrize("text", ["5 or 6", "5-6", ""])
def test_in_evaluation_a_box_or_tag_decides(text):
    """The last number counts only where there is neither."""
    for completion in (f"so 6, \\boxed{{{text}}} 6", f"<answer>{text}</answer> 6",
                       f"so \\boxed{{6}} <answer>{text}</answer> 6"):
        assert not is_right(completion, Fraction(6), anywhere=True)
    assert is_right("so \\boxed{6", Fraction(6), anywhere=True)
    for answer in ("\\sqrt{2}", "\\sqrt{3}"):
        assert is_right("so x = $\\sqrt{2}$.", answer, anywhere=True) == (answer == "\\sqrt{2}")


# A right answer in TeX, what is right and what is wrong.
@pytest.mark.parametrize("question,right,fine,wrong", rows(r"""
    | 25\% | 25\%   25 percent   0.25   \frac14   25 | 0.25\%   2500\%   25^\circ   2500
    How likely? | 0.25 | 25\%   25 percent   \frac{1}{4} | 0.25\%   25
    How likely? | \frac12 | 50\% | 0.5\%   50
    What percent? | 0.25 | 0.25\%   0.25 | 25\%   25
    What percent? | 25 | 25\%   25   25 percent | 0.25\%   2500\%   0.25
    | 0.5\% | 0.5\%   0.005 | 50\%   50   0.005\%
    | 1.5 \times 10^{3} | 1500   1.5e3   15 \times 10^2 | 15000   150   1.5
    How likely? | 24 | 24\% | 0.24   2400\%
    | 45^\circ | 45°   45   45^\circ | 45\%   \frac{45}{100}
    A side of 3 cm. | 6\text{ cm}^2 | 6   6 cm^2   6 cm²   6 cm | 6 cm^3   6 cm³   6 %
    | 6\mathrm{~ml} | 6   6 ml   6\text{ ml} | 6 l   6 mlx
    In terms of $x$, $n$, $xy$ and $m$. | 5x | 5x   5 x   x * 5 | 5   5m
    In terms of $x$, $n$, $xy$ and m. | 5m | 5m | 5   5 cm
    In terms of $a$ and $b$. | 12ab | 12ab   12ba | 12   12a   12b
    In terms of $r$ and $h$. | 2\pi rh | 2\pi rh   2 h r \pi | 2\pi r   2\pi
    In terms of $x$. | 5x^2 | 5x^2 | 5   5x
    With $i$. | 6i | 6i | 6
    | 3\pi | 3\pi   \pi 3 | 3   9.424778   9.42477796077
    | \sqrt{2} | \sqrt2   2^{1/2} | 1.414214   1.4142135624   \sqrt{2}\text{ hundred}
    | p - q | -q+p | p+q
    | \text{Evelyn} | Evelyn | Eve
    Is 7 even or odd? | \text{odd} | odd   \text{Odd}   \textbf{odd} | even   \text{Even}
    Which is it? | C | C   (C)   \text{C}   \textbf{(C)} | D   \text{(D)}
    | 2x | 2x | 3, 2x   3x=2x
    | (5,\infty) | (5,\infty)   \left(5,\infty\right) | 5
    | 2\pi | x = \frac{4\pi}{2} = 2\pi | 1+1 = 2\pi
    | 12_8 | 12_8   12_{8} | 12_9
    | 1/2004! | 1/2004! | 1/2006!
    | 12\text{ dozen} | 12\text{ dozen} | 12   12\text{ eggs}
    | 2\sqrt{3}\text{ hundred} | 2\sqrt{3}\text{ hundred} | 2\sqrt{3}
    How long? | 6 hours | 6   6 hours   6\text{ hours} | 6 apples   6 hundred
    | 2\sqrt{3}\text{ cm} | 2\sqrt{3}   2\sqrt3\text{ cm}   \sqrt{12} | 2   2\text{ cm}
    | 1,000x | 1000x   1{,}000x | 1   1,000   (1, 000x)
    | (4,3) | (4,3)   \left(4, 3\right) | [4,3]   \left[4,3\right]   \{4,3\}
    | [0,1) | [0,1) | (0,1)   [0,1]
"""))
def test_a_right_answer_in_tex_says_what_is_right(question, right, fine, wrong):
    for forms, expected in ((fine, True), (wrong, False)):
        for text in entries(forms):
            boxed = f"So \\boxed{{1}}, no, \\boxed{{{text}}}."
            assert bool(is_right(boxed, right, question)) == expected, text
            assert not is_right(f"So {text}.", right, question)


@pytest.mark.parametrize("text", [
    "x^{1000000}", "9^{9^{9}}", "x^9^9", "(999)!", "9E999999", "\\sqrt{12345678901234567}",
    "x^2+x^2+x^2+x^2+x^2+x^2+x^2+x^2+x^2", "(" * 300 + "x" + ")" * 300, "{{a}+" * 20 + "x" + "}" * 20])
def test_answers_that_are_too_much_work_are_left_out_and_counted(text):
    """Whatever the machine has to do besides; the same text is right."""
    start = time.process_time()
    assert is_right(f"\\boxed{{{text}}}", "x+1") is None
    assert is_right(f"\\boxed{{{text}}}", text)
    assert is_right(f"\\boxed{{{1000 * text}}}", "x+1") is False           # no answer that is meant
    assert time.process_time() - start < 1
    rollout = qerl.Rollout(torch.zeros(2, 1), *[None] * 4)
    texts = [f"\\boxed{{{text}}}", "\\boxed{x+1}"]
    scored = train_gsm8k.score([{"right": "x+1"}], rollout, texts, "answer")
    assert scored.timeouts == 1 and scored.correct.tolist() == [[0, 1]]


def test_an_answer_that_takes_for_ever_is_given_up(monkeypatch):
    def compare(right, given):
        while True:
            pass
    monkeypatch.setattr(answers, "tex_comparison", lambda: compare)
    monkeypatch.setattr(answers, "PATIENCE", 0.1)
    assert is_right("\\boxed{x}", "y+1") is None


# Texts of the grader's own pieces.
PIECES = """
    \\boxed \\boxed{ \\fbox{ \\text{ \\mathrm{ \\frac{ { } \\{ ^ ^{2} ^3 _ <answer> </answer> <think>
    </think> #### 5 12 1,250 . .5 , {,} \\, - \u2212 + = : $ \\$ % € e9 e ( ) cm m is per eggs ² ٣
    \\circ \\approx US * / x \\ \x00
""".split() + [" ", "\n", "\u00a0"]


def test_no_text_raises_anything():
    """Nor does any other sign among them."""
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices([*PIECES, chr(rng.randrange(0x110000))], k=rng.randrange(12)))
        for completion in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
            assert paper_reward(completion, {"right": Fraction(5)}) in (0, 0.2, 2, 2.2)
            assert is_right(completion, Fraction(5), anywhere=True) in (True, False)
        right = right_answer({"question": text, "answer": f"so\n#### {text}"})
        assert right is None or isinstance(right, Fraction)


@pytest.mark.parametrize("unit", [
    "<answer>", "\\boxed{", "\\boxed 5", "5", "1,", "1 000 ", " ", "5=", "- ", "<think>", "per a"])
@pytest.mark.parametrize("frame", ["{}", "<think></think><answer>{}0</answer>", "1{}0"])
def test_long_texts_are_graded_in_no_time(unit, frame):
    """100,000 characters take some 20 ms of a CPU; what grows with the square took seconds."""
    text = frame.replace("{}", unit * (100_000 // len(unit)))
    for read in (given_answer, one_number, last_number, train_gsm8k.FORMAT.fullmatch):
        start = time.process_time()
        read(text)
        assert time.process_time() - start < 0.5


# --------------------------------------------------------------------------------------------------
# Rewards

PAPER = "<think>6 * 7 = 42</think>\n<answer>$42.00</answer>"


@pytest.mark.parametrize("completion,earned", {
    PAPER: 2.2,
    PAPER.replace("$42", "41"): 0.2,
    PAPER + " and more": 2,
    "<answer>42</answer>": 2,
    "the answer is 42": 0,
}.items())
def test_the_papers_reward_counts_answer_and_format(completion, earned):
    assert paper_reward(completion, {"right": Fraction(42)}) == earned


def test_what_the_prompt_has_opened_counts_for_the_format():
    tokenizer = SimpleNamespace(prompts=list, decode=str)
    questions = [{"question": f"2+3?{opened}", "answer": "#### 5"} for opened in ("", "\n<think>\n")]
    asked = with_prompts(questions, tokenizer, 100)
    rest = "x\n</think>\n<answer>\\boxed{5}</answer>"
    rollout = qerl.Rollout(torch.zeros(4, 1), *[None] * 4)
    samples = train_gsm8k.score(asked, rollout, [rest, "<think>" + rest] * 2, "paper")
    assert samples.rewards.flatten().tolist() == pytest.approx([2.0, 2.2, 2.2, 2.0])


# --------------------------------------------------------------------------------------------------
# Questions

def test_made_up_problems_are_gsm8k_shaped_and_disjoint():
    train, held_out = made_up_problems()
    right = {p["question"]: p["answer"] for p in train}
    assert not right.keys() & {p["question"] for p in held_out}
    for problem in train[:300]:
        calculation, result = re.findall(r"<<(.*?)=(.*?)>>", problem["answer"])[-1]
        assert eval(calculation) == int(result) == right_answer(problem)
    careless, _ = made_up_problems(careless=1.0)
    assert right.items() - {(p["question"], p["answer"]) for p in careless}


DAPO = (r'{"prompt": "Solve the following math problem step by step. The last line is Answer: $Answer.'
        r'\n\nFive ducks.\n\nAnd so on?\n\nRemember to put your answer on its own line.", '
        '"solution": "34"}')


# Lines of files: DAPO-Math, MATH, AIME, others. Where both are there, "####" has the answer.
@pytest.mark.parametrize("line,question,answer", [
    (DAPO, "Five ducks.\n\nAnd so on?", "34"),
    (r'{"problem": "Twice?", "solution": "so $\\boxed 2$."}', "Twice?", "2"),
    ('{"Problem": "1?", "Answer": 34, "Solution": "so it is"}', "1?", "34"),
    (r'{"problem": "Root?", "solution": "$3 \\sqrt{2}$"}', "Root?", "$3 \\sqrt{2}$"),
    (r'{"problem": "3?", "solution": "not \\boxed{2}\n#### 7"}', "3?", "not \\boxed{2}\n#### 7")])
def test_questions_and_answers_are_found_in_the_columns_that_have_them(
        tmp_path, line, question, answer):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")          # twice there, taken once
    found, = math_questions(str(path))
    expected = {"question": question, "answer": answer, "source": str(path)}
    assert found == expected | {"right": right_answer(found)}


@pytest.mark.parametrize("line", ["[" * 9999, *r"""
{
[[5]]
{"question": "a", "answer": "#### 5 #### 6"}
{"question": "half \ud800", "answer": "#### 5"}
{"question": [{"role": "user"}], "answer": "#### 5"}
{"question": "a", "answer": NaN}
{"question": "a", "answer": true}
{"problem": "a", "answer": "箱は5個、ペンは4本なので20本"}
{"problem": "a", "answer": "There are 5 boxes with 4 pens each, so she has 20 pens in the 5 boxes."}
{"problem": "a", "answer": "with an empty box a completion would be right: \\boxed{ }"}
{"problem": "a", "answer": "The answer is twelve."}
{"problem": "a", "answer": "She has Twenty-one of them"}
{"problem": "a", "answer": "\boxed{12}"}
{"problem": "a", "answer": "\frac{1}{2}"}
{"problem": "a", "answer": "3 \times x"}
{"question": "a", "choices": ["5", "6"], "answer": 1}
{"question": "a", "options": {"A": "5", "B": "6"}, "answer": "A"}
"no object"
""".strip().splitlines()])
def test_an_unfit_file_of_questions_is_refused_by_its_line(tmp_path, line):
    """An empty line at the end is none."""
    fine = '{"question": "fine", "answer": "#### 5"}'
    (tmp_path / "train.jsonl").write_text(f"{fine}\n{line}\n\n", encoding="utf-8")
    with pytest.raises(UserError, match="train.jsonl:2: "):
        read_questions(tmp_path, "*")


@pytest.mark.parametrize("question,demand", [
    ("He has 2.5 eggs. How many are left?", ' Think and output the final answer after "####".'),
    ("He has 3 eggs. How many are left, with the answer after ####?", ""),
])
def test_a_demand_for_another_form_is_taken_out(tmp_path, question, demand):
    """And a column "begun", which steers the reward, is not taken from a file."""
    row = {"question": question + demand, "answer": "#### 5", "begun": "\\boxed{5}"}
    write_jsonl(tmp_path / "train.jsonl", [row])
    assert read_questions(tmp_path, "*") == [{"question": question, "answer": "#### 5", "right": 5}]


def test_questions_with_different_answers_are_left_out(tmp_path, capsys):
    """3 and 3.0 are the same answer, 1 and 10 are not."""
    rows = [{"question": question, "answer": answer} for question, answer in [
        ("a", "1"), ("a", "10"), ("b", "#### 1"), ("b ", "#### 10"), ("c", "#### 3"), ("c", "#### 3.0"),
        ("d", "18"), ("d", "18.0"), ("e", "#### 1"), ("e", "1.0"), ("f", "x+1"), ("f", "1 + x")]]
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert "".join(q["question"] for q in read_questions(tmp_path, "*")) == "cdef"
    assert "stand there with different answers" in capsys.readouterr().out


def test_a_file_of_questions_is_the_one_of_that_name(tmp_path):
    """An answer may be a decimal128."""
    datasets = pytest.importorskip("datasets")
    for name in ("f[1]", "f1"):
        rows = datasets.Dataset.from_list([{"question": name, "answer": Decimal("5.50")}])
        rows.to_parquet(f"{tmp_path}/{name}.parquet")
    found, = math_questions(f"{tmp_path}/f[1].parquet")
    assert (found["question"], found["right"]) == ("f[1]", "5.50")


def test_the_number_of_a_label_is_no_answer(tmp_path):
    datasets = pytest.importorskip("datasets")
    text, label = datasets.Value("string"), datasets.ClassLabel(names=["yes", "no"])
    rows = datasets.Dataset.from_dict({"question": ["Is it?"], "answer": ["no"]},
                                      datasets.Features(question=text, answer=label))
    rows.to_parquet(f"{tmp_path}/rows.parquet")
    with pytest.raises(UserError, match="rows.parquet:1: no question, or no answer that stands alone"):
        math_questions(f"{tmp_path}/rows.parquet")


@pytest.mark.parametrize("content", [
    '[{"question": "a", "answer": "5"},\n {"question": "b", "answer": 6}]',
    '{"question": "a", "answer": "5"}\n{"question": "b", "answer": "6"}\n',
])
def test_json_is_one_list_or_an_object_a_line(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert [q["question"] for q in math_questions(f"{tmp_path}/a.json")] == ["a", "b"]


def test_datasets_are_asked_for_by_name(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"question": "a", "answer": "5"}])
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for name in ("aime25", "openai/gsm8k:main"):
        assert len(math_questions(name)) == 1
    assert asked == [("math-ai/aime25", None, "test"), ("openai/gsm8k", "main", "train")]


SPELLINGS = {
    "two gaps": "two  gaps",
    "line\nend": "line\r\nend",
    "wide gap": "wide\u00a0gap",
    "caf\u00e9": "cafe\u0301",
    "tab": "\ttab\n",
}


def test_held_out_questions_are_not_trained_on(tmp_path, monkeypatch, capsys):
    """Nor in another spelling; validation keeps the last. Of each set held out the first few are asked."""
    monkeypatch.chdir(tmp_path)
    for name, asked in (("train", ["a", "b", "c", *SPELLINGS, "5²", "52"]),
                        ("one", ["c", "d", *SPELLINGS.values()]), ("two", ["f"])):
        write_jsonl(f"{name}.jsonl", [{"question": q, "answer": "5"} for q in asked])
    settings = train_gsm8k.Settings(
        data="train.jsonl", eval=["one.jsonl", "two.jsonl"], eval_questions=2, validation=1)
    for data in "train.jsonl", str(tmp_path):                          # a folder without test*.jsonl
        sets = load_questions(replace(settings, data=data))
        assert [[q["question"] for q in questions] for questions in sets] == [
            ["a", "b", "5²"], ["52"], ["c", "d", "f"]]
        assert "6 of 10 training questions are held out, too, and are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no held-out questions; name some by --eval"):
        load_questions(replace(settings, eval=None))


def test_each_set_held_out_has_its_accuracy(tmp_path, monkeypatch):
    """pass@1 is the mean of three answers to each question; the first and how many are right are kept."""
    rows = [{"question": "a question", "right": Fraction(n), "source": source}
            for source, n in (("a", 70), ("a", 70), ("b", 27))]
    texts = [["70", "no", "no"],
             ["\\boxed{70}", "no", "no", "no", "no", "no", "27", "27", "no"]]
    monkeypatch.setattr(evaluation, "answer_all", lambda *_: texts.pop())
    settings = train_gsm8k.Settings(eval_samples=3, out=str(tmp_path))
    found = train_gsm8k.evaluate(None, None, rows, settings, "now", Ranks())
    expected = {"accuracy": 5 / 12, "accuracy_b": 2 / 3, "greedy": 1 / 4, "greedy_b": 0}
    assert {name: found[f"{name}_now"] for name in expected} == pytest.approx(expected)
    kept = [answer["accuracy"] for answer in read_jsonl(tmp_path / "answers_now.jsonl")]
    assert [answer["text"] for answer in kept] == ["\\boxed{70}", "no", "27"]
    assert [answer["right"] for answer in kept] == [1, 0, 2]


# --------------------------------------------------------------------------------------------------
# Text <-> tokens

def chat_text(qwen, folder, template=None, added=(), special=True):
    """A ChatText, whose system asks for a box, of the model `qwen`; its tokenizer ends each text."""
    shutil.copytree(qwen, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(added), special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)])
    tokenizer.save_pretrained(folder)
    return ChatText(str(folder), "Box it: \\boxed{}.")


SHOWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("template,inside", [
    (SHOWN, False),
    (SHOWN.replace("messages", "messages if m.role != 'system'"), True),
    ("{% if tools %}{{ messages[0].content }}{% endif %}{{ messages[-1].content }}", True),
])
def test_the_instruction_stands_in_each_prompt(qwen, tmp_path, capsys, template, inside):
    text = chat_text(qwen, tmp_path / "model", template)
    prompt = text.shown(text.prompt("2+3?"))
    assert prompt.count("Box it: \\boxed{}.") == 1 and "2+3?" in prompt
    assert ("leaves the system's message out" in capsys.readouterr().out) == inside


@pytest.mark.parametrize("token", ["</answer>", "\\boxed{"])
def test_special_tokens_that_a_reward_looks_for_are_decoded(qwen, tmp_path, token):
    """A prompt without a template does not end the text, though its tokenizer ends each."""
    text = chat_text(qwen, tmp_path / "model", added=[token, "<|pad|>"])
    ids = text.tokenizer.encode(f"a{token}b<|pad|>c")
    assert ids[-1] in text.eos
    assert text.decode(ids) == f"a{token}bc"
    assert text.shown(text.prompt("2+3?")).endswith("Solution:")


def test_the_small_policys_text_has_a_token_for_each_word():
    text = WordText()

    def cut(tokens):
        return "|".join(text.encoding.decode([token]) for token in tokens)
    prompt = text.prompt("Ann fills 7 bags with 12 toys each. How many toys?")
    assert cut(prompt) == "Ann| fills| |7| bags| with| |1|2| toys| each|.| How| many| toys|?|\n"
    answer = text.worked_answer("7*9=<<7*9=63>>63", "63")
    assert cut(answer) == "<think>|7|*|9|=<<|7|*|9|=|6|3|>>|6|3|</think>|<answer>|6|3|</answer>|<end>"


@pytest.mark.parametrize("written", [
    "\u00e9\u20ac\U0001f600", "\x00\r\n\t", "<think> </answer>", "", "a,b==<<5  Annie's"])
def test_the_small_policy_reads_and_writes_any_text(written):
    text = WordText()
    prompt = text.prompt(written)
    assert text.decode(prompt) == f"{written}\n"
    assert max(prompt) < text.encoding.n_vocab - 5             # what a user writes is no tag
    work = written.replace("<", "")
    assert text.decode(text.worked_answer(work, "5")) == f"<think>{work}</think><answer>5</answer>"


def test_a_reward_lies_in_any_folder_and_imports_its_neighbour(tmp_path, monkeypatch):
    folder = tmp_path / "1.5*c+d e"
    folder.mkdir()
    (folder / "size_of_text.py").write_text("size = len\n")
    own = folder / "own.py"
    own.write_text("from size_of_text import size\n"
                   "def f(text, question):\n    return size(text) * question['right']\n")
    monkeypatch.chdir(tmp_path)
    for path in ("./1.5*c+d e/own.py:f", f"{own}:f"):
        scheme = f"answer + 0.5*{path}+-1e-1 * {path} "
        assert terms(scheme) == [(1, "answer"), (0.5, path), (-0.1, path)]
        reward = train_gsm8k.find_reward(scheme)
        assert reward is train_gsm8k.find_reward(scheme)                   # the file is run once
        assert reward("\\boxed{5}", {"right": 5}) == pytest.approx(1 + 0.4 * 9 * 5)
        assert instruction(f"{scheme}+ 2 * paper") == SYSTEM["paper"]
        assert reward_fingerprint(path) != reward_fingerprint("answer")
