"""Text <-> tokens of a real model, by its own tokenizer and chat template."""
import re

import transformers

import qerl
from harness.folders import generation_config
from qerl import UserError


# Put before a chat template: it takes the place of transformers' clock. A template that writes the
# date writes this one on every day, so that a run goes on with the prompts that it began with. The
# day is the one that Llama 3.2's template writes where there is no clock.
ONE_DAY = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%m', '07') | "
    "replace('%b', 'Jul') | replace('%B', 'July') | replace('%Y', '2024') }}{% endmacro %}\n"
)


class ChatText:
    """A Hugging Face tokenizer with its chat template (or plain text where it has none)."""

    def __init__(self, folder, system):
        self.system = system
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            stored = generation_config(folder).eos_token_id
        except Exception as e:
            raise UserError(
                f"model {folder}: its tokenizer or config cannot be read ({qerl.reason(e)}); "
                "fetch the model again"
            )
        qerl.require(self.tokenizer.encode("1"),
                     f"model {folder}: its tokenizer is missing or empty; fetch the model again")
        ends = stored if isinstance(stored, list) else [stored]
        ends = [end for end in [self.tokenizer.eos_token_id, *ends] if end is not None]
        qerl.require(ends and all(type(end) is int for end in ends),
                     f"model {folder}: its eos_token_id {stored} is no token, so that nothing ends a text; "
                     "mend its generation_config.json or config.json")
        self.eos = set(ends)
        self.end = ends[0]
        if self.tokenizer.chat_template:
            self.warn_of_other_ends()

    def prompt(self, question):
        """The token ids of a question, up to where the answer begins."""
        if self.tokenizer.chat_template is None:
            plain = f"{self.system}\n\nProblem: {question}\n\nSolution: "
            return self.tokenizer.encode(plain)
        return self.chat(question, add_generation_prompt=True, return_dict=False)

    def chat(self, *turns, **options):
        """What apply_chat_template makes of the system's text and these turns: user, assistant."""
        said = zip(("system", "user", "assistant"), (self.system, *turns))
        messages = [{"role": role, "content": text} for role, text in said]
        try:
            template = ONE_DAY + self.tokenizer.get_chat_template()
            return self.tokenizer.apply_chat_template(messages, chat_template=template, **options)
        except Exception as e:
            raise UserError(
                f"the model's chat template cannot be used ({qerl.reason(e)}); "
                "mend it or use another model"
            )

    def warn_of_other_ends(self):
        """Say so if the chat template ends an answer with a token at which completions do not end."""
        answer = "An answer."
        try:
            behind = self.chat("A question?", answer, tokenize=False).partition(answer)[2]
        except UserError:              # some templates take no answers
            return
        added = self.tokenizer.added_tokens_decoder
        tokens = [i for i in self.tokenizer.encode(behind, add_special_tokens=False) if i in added]
        if tokens and tokens[0] not in self.eos:
            print(f"warning: the chat template ends an answer with {added[tokens[0]]}, which ends no "
                  f"completion; add {tokens[0]} to eos_token_id in the model's generation_config.json")

    def worked_answer(self, answer):
        """The token ids of a right answer ("work #### number"), in the form that is rewarded."""
        work, final = answer.split("####")
        work = re.sub(r"<<.*?>>", "", work).strip()    # GSM8K's notes for a calculator
        boxed = f"\\boxed{{{final.strip()}}}"
        text = f"{work}\n{boxed}"
        if "<think>" in self.system:
            text = f"<think>\n{work}\n</think>\n<answer>\n{boxed}\n</answer>"
        return self.tokenizer.encode(text, add_special_tokens=False) + [self.end]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def check_tokens(questions, eos, vocabulary):
    """Refuse prompts that ask nothing, and token ids for which the model has no embedding."""
    prompts = {tuple(q["prompt"]) for q in questions}
    qerl.require(len(prompts) >= len({q["question"].strip() for q in questions}),
                 "different questions have the same prompt, by the model's chat template or tokenizer; "
                 "mend it or use another model")
    ids = eos.union(*prompts)
    qerl.require(min(ids) >= 0 and max(ids) < vocabulary,
                 f"the model's tokenizer and eos_token_id give tokens {min(ids)} to {max(ids)}, its "
                 f"vocabulary has {vocabulary}; use the tokenizer and the configs that belong to the weights")
