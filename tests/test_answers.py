"""Answers, rewards and questions."""
import json
import math
import re
import time
import types
from decimal import Decimal

import pytest
import torch
from hypothesis import given, strategies

import qerl
import train_gsm8k
from common import FOREIGN_QUESTIONS, FOREIGN_ROWS, QUICK, batch_of, refused, run_main
from common import without_times
from harness import data as data_module
from harness import answers
from harness.answers import final_number, given_answer, is_right, last_box, last_number, one_number
from harness.data import math_questions, read_questions
from harness.folders import write_jsonl
from harness.small_policy import made_up_problems


def test_word_problems_are_gsm8k_shaped_and_disjoint():
    train, held_out = made_up_problems()
    assert not {p["question"] for p in train} & {p["question"] for p in held_out}
    for problem in train[:300]:
        for left, right in (c.split("=") for c in re.findall(r"<<(.*?)>>", problem["answer"])):
            assert eval(left) == int(right)
        assert problem["answer"].endswith(f"#### {right}")
    careless = made_up_problems(careless=1.0)[0]
    right = {p["question"]: p["answer"] for p in train}
    assert any(p["question"] in right and right[p["question"]] != p["answer"] for p in careless)


@pytest.mark.parametrize("text,number", [
    ("18", "18"), ("$1,250.00", "1250"), ("\\boxed{42}", "42"), ("-3", "-3"), ("-$7.50", "-7.5"),
    ("it is 5 + 3 = 8 apples.", "8"),
    (".5", "0.5"), ("70,000", "70000"), ("20%", "20"), ("12.", "12"),
    ("3-5", "5"), ("Total-5", "5"), ("$-5", "-5"), ("wait...18", "18"), ("3,4", "None"),
    ("\u22123", "-3"), ("x=-5", "-5"),
    ("1/2", "None"), ("\\frac{1}{2}", "None"), ("\\dfrac{1}{2}", "None"), ("(3)/(4)", "None"),
    ("3/4 of 20 is 15", "15"), ("1{,}042", "1042")])
def test_tolerant_numbers(text, number):
    assert last_number(text) == (None if number == "None" else Decimal(number))


def test_rewards():
    good = "<think>6 * 7 = 42</think>\n<answer>$42.00</answer>"
    reward = train_gsm8k.reward
    assert reward(good, Decimal(42), "paper") == (2.2, True)
    assert reward(good, Decimal(41), "paper") == (0.2, False)
    assert reward("<answer>42</answer>", Decimal(42), "paper") == (2.0, True)
    assert reward("the answer is 42", Decimal(42), "paper") == (0.0, False)
    assert reward(good + " and more", Decimal(42), "paper") == (2.0, True)
    assert reward(good, Decimal(42), "answer") == (1.0, True)
    assert reward(good, Decimal(41), "answer") == (0.0, False)
    assert reward("so \\boxed{42}", Decimal(42), "answer") == (1.0, True)
    assert last_number("none") is None
    assert final_number({"answer": "so 12\n#### 1,200 m2"}) == 1200
    assert is_right("so \\boxed{1,042} it is, in 2 days", Decimal(1042), anywhere=True)
    assert is_right("so 12, no, 13.", Decimal(13), anywhere=True)

# What is not 5, though a 5 is its last digit.
NOT_FIVE = [
    # another number
    "1e5", "0x5", "{1}/{5}", "1\u20445", "5\u00bd", "5\u00b2", "2^5", "{5}^{2}", "1,5", "0,005",
    "5.5.5", "\\sqrt{5}", "\\frac{1}{5}", "\\frac15", "1 005", "5!", "|5|", "5(200)",
    # words that change it
    "5 million", "5 thousands", "5 bn", "5 dozens", "5 tenths", "5 halves", "5 times", "5 squared",
    "5 less", "5 minus", "5 or six", "5 out of 7", "5 errors", "negative 5", "minus is 5",
    "less than 5", "less than: 5", "the negative of x is 5", "5 is wrong", "log 5",
    # a sign
    "- 5", "\u20135", "\u22125", "-{5}", "-(5)", "-\\$5", "$-5", "x = - 5", "\\pm 5",
    # an unknown, a relation, a unit that may be a factor
    "5n", "5+n", "x - 5", "(x + 5)", "x/5", "5\\pi", "x_5", "5k", "5m", "5 M", "5 i.",
    "5\\mathrm{i}",
    "f(5)", "\\neq 5", ">5", "x >= 5", "4 = 5", "2x = 5", "x/2 = 5", "\\cancel{5}", "2 \\times 5",
    # denied
    "not 5", "NOT 5", "x is not 5", "isn't 5", "\\text{not }5", "\\neg 5", "not 3, it is 5",
    # several
    "3:5", "3-5", "3, 5", "3;5", "3\n5", "4 or 5", "3 and 5", "x = 3 or x = 5", "3 apples, 5 pears",
    "\\{5\\}",
]

FIVE = [
    "5", "5.00", "5e0", "$5.00", "\\$5", "5%", "5\\%", "05", "+5", "5.", "5,", "{5}", "(5)", "$5$",
    "\\(5\\)", "**5**", "x=5", "\n5\n", "\\boxed{5}", "\\mathbf{5}", "\\underline{5}",
    # a unit, words
    "5 apples", "\\text{5 apples}", "5 \\text{ apples}", "5\\text{ more cookies}", "5\\text{m}",
    "5\\,\\text{cm}", "5\\text{ cm}^3", "5 \\mathrm{ft}^{2}", "5 m^2", "5 cm²", "5 lbs", "5 hr",
    "5 square feet", "5 miles per hour", "5 km/h", "\\$5/hour", "$5 a day", "5 percent", "5¢",
    "¥5",
    "€5", "US$5", "$5.00 USD", "5^\\circ", "5°C", "5 in", "5 men", "5 months", "5 apples each",
    # a name or a calculation before it
    "Total: 5", "\\approx 5", "The answer is 5.", "\\text{Total cost} = \\$5", "**Answer:** 5",
    "Bob's age is 5", "2 + 3 = 5 apples.", "90-85=5", "(10-5) = 5", "x = 2 \\times 3 - 1 = 5",
    "\\frac{20}{4} = 5",
]


@pytest.mark.parametrize("text,five",
                         [(text, False) for text in NOT_FIVE] + [(text, True) for text in FIVE])
def test_only_one_clear_number_is_rewarded(text, five):
    for answer in (f"<answer>{text}</answer>", f"so \\boxed{{{text}}}",
                   f"<answer>after 3 tries \\boxed{{{text}}}</answer>"):
        assert train_gsm8k.reward(answer, Decimal(5), "answer") == (five, five)


@pytest.mark.parametrize("text,number", [
    ("<answer>1,250.00</answer>", 1250), ("\\boxed{1{,}250}", 1250), ("\\boxed{1\\,250}", 1250),
    ("\\boxed{1 250}", 1250),
    ("\\boxed{1e5}", 100000), ("\\boxed{\\text{\\$1,250}}", 1250), ("\\boxed{- 5}", -5),
    ("\\boxed{x=-5}", -5),
    ("\\boxed{5} or \\boxed{6", 5), ("<answer>5</answer> <answer>6", 5),
    ("<answer>3 <answer>5</answer> 7</answer>", 5), ("5", None)])
def test_answered_number(text, number):
    assert one_number(given_answer(text) or "") == number


@pytest.mark.parametrize("gold,number", [
    ("18", 18), ("-18", -18), ("$18", 18), ("18 dollars", 18), ("1,250,000", 1250000),
    ("3.0e5", 300000), ("1e3", 1000), ("1 000", 1000),
    ("1,200 m2", 1200), ("5 km/h", 5), ("5 m^2", 5), ("5 t-shirts", 5), ("1,00", None),
    ("1 00", None), ("3:30", None), ("2-3", None), ("1/2", None), ("3 5", None)])
def test_right_answers_are_read_or_refused(tmp_path, gold, number):
    line = json.dumps({"question": "q", "answer": f"so 7\n#### {gold}\n8"})
    (tmp_path / "train.jsonl").write_text('{"question": "p", "answer": "#### 1"}\n' + line + "\n")
    if number is not None:
        assert final_number(read_questions(tmp_path, "train.jsonl")[1]) == number
    else:
        with pytest.raises(qerl.UserError, match=re.escape(f"train.jsonl:2: '{gold}' behind")):
            read_questions(tmp_path, "train.jsonl")


LONG_UNITS = [
    "<answer>", "</answer>", "\\boxed{", "\\boxed{{}", "{", "\\boxed 5", "5", "1,", "1 000 ",
    "5e", "1/ ",
    " ", "5=", "5 or ", "is ", "- ", "<think>", "</think><answer>", "$", "US", "per a", "5.", "*5",
]


@pytest.mark.parametrize("unit", LONG_UNITS)
@pytest.mark.parametrize("frame", ["{}", "<think></think><answer>{}0</answer>", "1{}0"])
def test_long_texts_are_graded_in_no_time(unit, frame):
    """100,000 characters take some 20 ms of a CPU; what grows with the square took seconds."""
    text = frame.replace("{}", unit * (100_000 // len(unit)))
    for read in (given_answer, one_number, last_number, train_gsm8k.FORMAT.fullmatch):
        start = time.process_time()
        read(text)
        assert time.process_time() - start < 0.5


@pytest.mark.parametrize("kind", FOREIGN_ROWS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_foreign_questions_are_read(tmp_path, kind, ending):
    path = tmp_path / f"{kind}.{ending}"
    if ending == "jsonl":
        write_jsonl(path, FOREIGN_ROWS[kind])
    else:
        pytest.importorskip("datasets").Dataset.from_list(FOREIGN_ROWS[kind]).to_parquet(str(path))
    found = math_questions(str(path))
    assert [(q["question"], q["answer"]) for q in found] == [FOREIGN_QUESTIONS[kind]]


@pytest.mark.parametrize("row", [
    {"question": "a", "answer": "x #### 2-3"}, {"question": "a", "answer": "#### "},
    {"question": "a", "answer": "#### 5 million"},
    {"question": 5, "answer": "5"}, {"question": ["a"], "answer": "5"},
    {"question": [{"role": "user"}], "answer": "5"}, {"question": {"a": 1}},
    {"question": " ", "answer": "5"}, {"question": "a", "answer": [1, 2]},
    {"question": "a", "answer": math.nan},
    {"question": "a", "reward_model": 5}, {"question": "a\ud800b", "answer": "5"}, b"\xff{}",
    {"problem": "a", "solution": "so it is 5"}, {"question": "a", "answer": "#### 5 #### 6"},
    {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}], "answer": "5"}])
def test_what_is_no_question_is_refused_by_its_line(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "fine", "answer": "5"}\n' + (row
        if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
    with pytest.raises(qerl.UserError, match="rows.jsonl:2: "):
        math_questions(str(path))


@pytest.mark.parametrize("gold", [
    "2 hours 30 minutes", "5 x 10^3", "1 in 4", "5 out of 6", "x + 5", "3 ± 1", "1 . 5", "5 ,000",
    "3 to 4", "3 and 4", "5 (or 6)", "1 1/2", "5 million", "4 = 5"])
def test_unclear_gold_answers_are_no_number(gold):
    assert final_number({"answer": f"so\n#### {gold}"}) is None


def test_gsm8k_by_name_is_fetched(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    held_out = [{"question": "test"}]
    monkeypatch.setattr(data_module, "gsm8k", lambda folder: ([{"question": str(folder)}], held_out))
    assert data_module.load_questions("gsm8k", None, None) == ([{"question": "None"}], held_out)
    (tmp_path / "gsm8k").mkdir()
    # a folder of that name
    assert data_module.load_questions("gsm8k", None, None) == ([{"question": "gsm8k"}], held_out)


def test_datasets_are_asked_for_by_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset",
                        lambda *args, **options: asked.append((*args, options))
                        or FOREIGN_ROWS["aime25"])
    for name in ("aime25", "somebody/else", "openai/gsm8k:main"):
        assert len(math_questions(name)) == 1
    assert asked == [("math-ai/aime25", {"split": "test"}), ("somebody/else", {"split": "train"}),
                     ("openai/gsm8k", "main", {"split": "train"})]


@pytest.mark.parametrize("right,answer", [
    ("5", "5"), ("27.0", "27"), ("\\frac{3}{4}", "0.75"),
    ("(3, \\frac{\\pi}{2})", "\\left(3,\\frac{\\pi}{2}\\right)"),
    ("p - q", "-q+p"), ("3,5,7", "7, 5, 3"), ("1000", "1,000"), ("\\text{Evelyn}", "Evelyn"),
    ("90^\\circ", "90")])
def test_mathematics_is_compared_and_not_its_spelling(right, answer):
    pytest.importorskip("math_verify")
    assert is_right(f"So \\boxed{{1}}, no, \\boxed{{{answer}}}.", right)
    assert not is_right(f"So {answer}.", right)
    assert not is_right(f"\\boxed{{{answer}}} or \\boxed{{x + 1}}", right)


@pytest.mark.parametrize("answer,right", [
    *((answer, "5")
      for answer in ["3, 5", "4 or 5", "- 5", "5^2", "x", "", "5" * 2000, "x + 5", "5x"]),
    ("5", "x+5"), ("2", "2x"), ("3", "3!"), ("5", "(5,\\infty)"), ("7b", "7a"), ("5", "5\\theta"),
    ("5", "f(5)")])
def test_other_mathematics_earns_nothing(answer, right):
    pytest.importorskip("math_verify")
    assert not is_right(f"\\boxed{{{answer}}}", right)


@pytest.mark.parametrize("text,box", [
    ("\\boxed{1} \\boxed {\\frac{3^{\\frac{1}{2}}}{2}} } \\boxed{2", "\\frac{3^{\\frac{1}{2}}}{2}"),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("\\boxed{\\boxed{5}}", "\\boxed{5}"), ("\\boxed{}", ""), ("} boxed{5}", None),
    ("\\boxed{5}, no, \\boxed{7", "5"),
    ("so $\\boxed 2$.", "2"), ("\\boxed 2.", "2"), ("\\boxed12 \\boxed", "12"), ("\\fbox{3}", "3"),
    ("\\boxed{1 \\boxed 2}", "1 \\boxed 2"),
    ("\\boxed{" * 10 ** 5, None)])
def test_the_last_box_of_any_depth(text, box):
    assert last_box(text) == box


def test_foreign_columns_of_a_file_steer_nothing(tmp_path):
    line = {"question": "a", "answer": "#### 5", "source": ["b"], "begun": "\\boxed{5}", "right": 3}
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", [line])
    assert data_module.gsm8k(str(tmp_path)) == ([{"question": "a", "answer": "#### 5"}],) * 2


def test_a_limit_of_held_out_questions_holds_for_each_set():
    both = [{"source": name, "number": number} for name in "ab" for number in range(5)]
    assert data_module.first_of_each(both, 2) == both[:2] + both[5:7]
    assert data_module.first_of_each(both, 0) == both
    assert data_module.first_of_each([{}] * 3, 2) == [{}] * 2


def test_held_out_questions_are_not_trained_on(tmp_path, capsys):
    rows = [{"question": f"how many {i}?", "answer": str(i)} for i in range(4)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "exam.jsonl", rows[2:])
    data, exam = str(tmp_path / "train.jsonl"), str(tmp_path / "exam.jsonl")
    train, held_out = data_module.load_questions(data, [exam], None)
    assert [q["answer"] for q in train] == ["0", "1"]
    assert [q["answer"] for q in held_out] == ["2", "3"]
    assert "2 of 4 training questions are held out, too, and are left out" in capsys.readouterr().out
    with pytest.raises(qerl.UserError, match="all of its questions are held out"):
        data_module.load_questions(data, [data], None)


def test_a_run_on_foreign_questions_with_two_sets_held_out(qwen, tmp_path, monkeypatch, capsys):
    for kind in ("bigmath", "aime25", "amc23"):
        write_jsonl(tmp_path / f"{kind}.jsonl", FOREIGN_ROWS[kind] * 2)
    out = tmp_path / "run"
    options = ("--model", qwen[0], *QUICK, "--steps", 1, "--prompts", 1, "--data",
               tmp_path / "bigmath.jsonl")
    assert "--eval" in refused(monkeypatch, capsys, *options, "--out", out)
    texts = iter(["\\boxed{5}", "5", "\\boxed{70}", "27", "70", "no"])
    monkeypatch.setattr(train_gsm8k, "decode_all",
                        lambda _, rollout: [next(texts) for _ in rollout.length])
    run_main(monkeypatch, *options, "--eval", tmp_path / "aime25.jsonl", tmp_path / "amc23.jsonl",
             "--skip-eval-before", "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    metrics, = without_times(out / "metrics.jsonl")
    # of "\\boxed{5}" and "5"
    assert metrics["accuracy"] == 0.5
    assert summary["accuracy_after"] == 1.0 and summary["greedy_after"] == 0.5
    assert summary["greedy_aime25_after"] == 1.0 and summary["greedy_amc23_after"] == 0.0


def test_a_random_reward_knows_nothing_of_the_answer():
    texts = [f"\\boxed{{{n}}}" for n in range(400)]
    rewards = [train_gsm8k.reward(text, Decimal(5), "random") for text in texts]
    assert 160 < sum(r for r, _ in rewards) < 240
    assert rewards == [train_gsm8k.reward(t, Decimal(5), "random") for t in texts]
    assert [correct for _, correct in rewards] == [float(n == 5) for n in range(400)]


@pytest.mark.parametrize("text", ["{-}5", "{-} 5", "\\text{-}5", "$-$ {5}"])
def test_a_minus_in_braces_is_one(text):
    assert one_number(given_answer(f"so \\boxed{{{text}}}")) == -5


PIECES = ["\\boxed", "\\boxed{", "\\fbox{", "\\text{", "\\mathrm{", "\\frac{", "{", "}", "\\{", "^",
          "^{2}", "^3", "_", "<answer>", "</answer>",
          "<think>", "</think>", "####", "5", "12", "1,250", ".", ".5", ",", "{,}", "\\,", "-",
          "\u2212", "+", "=", ":", "$", "\\$", "%", "€", "e9",
          "e", "(", ")", "cm", "m", " ", "\n", "is", "per", "eggs", "²", "٣", "\\circ", "\\approx",
          "US", "*", "/", "x", "\\", "\u00a0", "\x00"]


@given(strategies.lists(strategies.sampled_from(PIECES) | strategies.text(max_size=3)).map("".join))
def test_no_text_raises_anything(text):
    for completion in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        for scheme in ("answer", "paper", "random"):
            assert train_gsm8k.reward(completion, Decimal(5), scheme)[1] in (0.0, 1.0)
        assert is_right(completion, Decimal(5), anywhere=True) in (True, False)
    question = {"answer": f"so\n#### {text}"}
    assert final_number(question) is None or isinstance(final_number(question), Decimal)


@pytest.mark.parametrize("text",
                         ["\\boxed{\\text{cm}^2}", "<answer>\\text{m}^3</answer>",
                          "some \\mathrm{ft}^{2}"])
def test_a_unit_alone_is_no_answer(text):
    assert not is_right(text, Decimal(2)) and not is_right(text, Decimal(2), anywhere=True)
    assert final_number({"answer": f"#### {text}"}) is None


@pytest.mark.parametrize("text",
                         ["5 or 6", "5, 6", "5-6", "30:6", "6 is not 5, 6", "5 \\text{ out of } 6",
                          ""])
def test_in_evaluation_a_box_or_tag_decides(text):
    for completion in (f"so 6, \\boxed{{{text}}} 6", f"<answer>{text}</answer> 6",
                       f"so \\boxed{{6}} <answer>{text}</answer> 6"):
        assert not is_right(completion, Decimal(6), anywhere=True)
    assert is_right("so it is 6", Decimal(6), anywhere=True)
    assert is_right("so \\boxed{6", Decimal(6), anywhere=True)


def test_what_a_box_without_braces_or_without_end_gives():
    pytest.importorskip("math_verify")
    for answer in (Decimal(2), "2"):
        assert is_right("so $\\boxed 2$.", answer) and not is_right("so $\\boxed 3$.", answer)
        assert is_right("\\boxed{2}, or rather \\boxed{7", answer)
        assert not is_right("\\boxed{2}, or rather \\boxed{7}", answer)
    assert not is_right("\\boxed{18 M}", Decimal(18)) and not is_right("\\boxed{18 M}", "18")


@pytest.mark.parametrize("opens", [True, False])
def test_what_the_prompt_has_opened_counts_for_the_format(opens):
    class Text:
        def prompt(self, question):
            return list(f"{question}\n<think>\n" if opens else question)

        def decode(self, tokens):
            return "".join(tokens)
    asked = data_module.with_prompts([{"question": "2+3?", "answer": "#### 5"}], Text(), 100)
    texts = ["x\n</think>\n<answer>\\boxed{5}</answer>",
             "<think>x\n</think>\n<answer>\\boxed{5}</answer>",
             "<think><think>x\n</think>\n<answer>\\boxed{5}</answer>"]
    rollout = qerl.Rollout(torch.zeros(3, 1), *[None] * 4)
    rewards = train_gsm8k.score(asked, rollout, texts, "paper").rewards
    assert rewards.tolist() == [pytest.approx([2.2, 2.0, 2.0] if opens else [2.0, 2.2, 2.0])]


@pytest.mark.parametrize("row,answer", [
    ({"prompt": "a", "solution": "34", "reward_model": {"ground_truth": "34"}}, "34"),
    ({"prompt": "a", "solution": "34"}, "34"),
    ({"prompt": "a", "solution": "it is so", "reward_model": {"ground_truth": "34"}}, "34"),
    ({"problem": "a", "ground_truth": "x+1"}, "x+1"),
    ({"problem": "a", "solution": "so $\\boxed 2$."}, "2"),
    ({"problem": "a", "solution": 34}, "34")])
def test_answers_are_found_in_the_columns_that_have_them(tmp_path, row, answer):
    write_jsonl(tmp_path / "rows.jsonl", [row])
    assert [q["answer"] for q in math_questions(str(tmp_path / "rows.jsonl"))] == [answer]


@pytest.mark.parametrize("demand", [
    'Let\'s think step by step and output the final answer after "####".',
    "Give the answer as #### number", "\nAnswer behind ####!"])
def test_a_demand_for_another_form_is_taken_out(tmp_path, demand):
    row = {"question": f"He has 2.5 eggs. How many are left? {demand}", "answer": "so\n#### 5"}
    write_jsonl(tmp_path / "train.jsonl", [row])
    for asked in (math_questions(str(tmp_path / "train.jsonl")),
                  read_questions(tmp_path, "train.jsonl")):
        assert asked[0]["question"].rstrip() == "He has 2.5 eggs. How many are left?"


def test_a_question_that_is_a_demand_itself_stays(tmp_path):
    question = "Tom has 3 apples. How many are left, with the answer after ####?"
    write_jsonl(tmp_path / "train.jsonl", [{"question": question, "answer": "#### 3"}])
    assert read_questions(tmp_path, "train.jsonl")[0]["question"] == question


@pytest.mark.parametrize("name", ["f[1].parquet", "z*.json"])
def test_a_file_of_questions_is_the_one_of_that_name(tmp_path, name):
    datasets = pytest.importorskip("datasets")
    for file, question in ((name, "right?"), (name.replace("[1]", "1").replace("*", "z"), "wrong?")):
        rows = datasets.Dataset.from_list([{"question": question, "answer": "5"}])
        getattr(rows, "to_" + name.rpartition(".")[2])(str(tmp_path / file))
    assert [q["question"] for q in math_questions(str(tmp_path / name))] == ["right?"]


SLOW = [("x^{1000000}+1", "(x+1)^{1000000}"), ("9^{9^{9}}", "5")]


@pytest.mark.parametrize("text,right", SLOW)
def test_answers_that_take_for_ever_earn_nothing_and_are_counted(text, right):
    """Equal texts are graded once: a rollout of them takes as long as one."""
    pytest.importorskip("math_verify")
    count = 8
    rollout = qerl.Rollout(*[torch.ones(count, 1)] * 3, torch.ones(count, dtype=torch.long),
                           torch.ones(count, dtype=bool))
    asked = [{"prompt": [1], "right": right}]
    start = time.monotonic()
    samples = train_gsm8k.score(asked, rollout, [f"\\boxed{{{text}}}"] * count, "answer")
    assert samples.correct.tolist() == [[0] * count]
    batch = batch_of([[1]] * count, rollout)
    clock = types.SimpleNamespace(seconds={"rollout": 1}, since_restart=lambda: 1)
    assert train_gsm8k.describe(samples, batch, clock, qerl)["timeouts"] == count
    assert time.monotonic() - start < 20                       # 5 s each were 40 s


def test_each_slow_answer_leaves_less_time_for_the_next(monkeypatch):
    """So that a rollout of different slow texts is bounded; a quick answer is still read right."""
    pytest.importorskip("math_verify")
    assert is_right(r"\boxed{\frac{x}{2}}", r"\frac12 x")
    monkeypatch.setattr(answers, "patience", 0.5)
    for i in range(12):
        assert is_right(f"\\boxed{{x^{{1000000}}+{i}}}", "(x+1)^{1000000}") is None
    assert answers.patience == 0.2
    assert is_right(r"\boxed{\frac{x}{4}}", r"\frac14 x")
    assert answers.patience > 0.2
