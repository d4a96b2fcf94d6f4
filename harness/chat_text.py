"""Text <-> tokens of a real model, by its own tokenizer and chat template."""
import os
import re

import transformers

import qerl
from qerl import UserError


class ChatText:
    """A Hugging Face tokenizer with its chat template (or plain text where it has none)."""

    def __init__(self, folder, system):
        self.system = system
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            if os.path.exists(f"{folder}/generation_config.json"):
                stored = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
            else:
                stored = transformers.AutoConfig.from_pretrained(folder).eos_token_id
        except Exception as e:
            raise UserError(
                f"model {folder}: its tokenizer or config cannot be read ({qerl.reason(e)}); "
                "fetch the model again"
            )
        if not self.tokenizer.encode("1"):
            raise UserError(
                f"model {folder}: its tokenizer is missing or empty; fetch the model again"
            )
        ends = stored if isinstance(stored, list) else [stored]
        ends = [end for end in [self.tokenizer.eos_token_id, *ends] if end is not None]
        for end in ends:
            if type(end) is not int:
                raise UserError(
                    f"model {folder}: its eos_token_id {end!r} is no token; mend its "
                    "generation_config.json or config.json"
                )
        self.eos = set(ends)

    def prompt(self, question):
        """The token ids of a question, up to where the answer begins."""
        if self.tokenizer.chat_template is None:
            plain = f"{self.system}\n\nProblem: {question}\n\nSolution: "
            return self.tokenizer.encode(plain)
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": question},
        ]
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as e:
            raise UserError(
                f"the model's chat template cannot be used ({qerl.reason(e)}); "
                "mend it or use another model"
            )

    def worked_answer(self, answer):
        """The token ids of a right answer ("work #### number"), in the form that is rewarded."""
        work, final = answer.split("####")
        work = re.sub(r"<<.*?>>", "", work).strip()    # GSM8K's notes for a calculator
        boxed = f"\\boxed{{{final.strip()}}}"
        text = f"{work}\n{boxed}"
        if "<think>" in self.system:
            text = f"<think>\n{work}\n</think>\n<answer>\n{boxed}\n</answer>"
        end = self.tokenizer.eos_token_id
        end = min(self.eos) if end is None else end
        return self.tokenizer.encode(text, add_special_tokens=False) + [end]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def check_tokens(questions, eos, vocabulary):
    """Refuse empty prompts, and token ids for which the model has no embedding."""
    prompts = [q["prompt"] for q in questions]
    if not all(prompts):
        raise UserError(
            "the model's chat template makes an empty prompt; mend it or use another model"
        )
    ids = eos.union(*prompts)
    beyond = [i for i in (min(ids), max(ids)) if not 0 <= i < vocabulary]
    if beyond:
        what = "eos_token_id" if beyond[0] in eos else "tokenizer"
        raise UserError(
            f"the model's {what} gives token {beyond[0]}, its vocabulary has {vocabulary}; "
            "use the tokenizer and the configs that belong to the weights"
        )
