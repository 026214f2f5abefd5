"""A conversation with a model in a terminal: each answer is shown as it is written.

    python scripts/chat.py models/writer
    python scripts/chat.py models/writer --system "You answer in one sentence." --max-tokens 80 --temperature 0

The folder is one in the format of transformers, with a tokenizer; nothing is fetched. A tokenizer with a chat template
makes the prompts; without one, the conversation is plain text:

    System text.  You: first question  Bot: first answer  You: second question  Bot:

An answer ends at `</s>`, or where the model begins to write the next question. An empty line or the end of the input
ends the conversation. Nothing of it is kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any, Final

from transformers.utils.logging import disable_progress_bar

from penstock.registry.errors import InvalidInput, PenstockError
from penstock.workers.generation import Engine, SamplingParams

_STOPS: Final = ("</s>", "\n\nYou:")
_EXIT_REFUSED: Final = 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Talk to a model of transformers in this terminal.")
    parser.add_argument("folder", help="config.json, safetensors, and the files of a tokenizer")
    parser.add_argument("--system", default="", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer (200)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the most probable token (0.7)")
    parser.add_argument("--seed", type=int, help="equal seeds give equal answers to equal questions")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    return parser.parse_args()


class Conversation:
    """What was said so far. Its prompt ends where the model is to write."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str) -> None:
        self._engine: Final = engine
        self._params: Final = params
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def answer(self, question: str) -> Iterator[str]:
        """The pieces of the next answer.

        Raises InvalidInput where the conversation is too long for the model, and where its chat template refuses it.
        """
        self._messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        for output in self._engine.stream(self._prompt(), self._params):
            pieces.append(output.delta_text)
            yield output.delta_text
        self._messages.append({"role": "assistant", "content": "".join(pieces).strip()})

    def _prompt(self) -> str | list[int]:
        tokenizer = self._engine.decoder.tokenizer
        if getattr(tokenizer, "chat_template", None):
            try:
                found = tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, return_dict=False)
            except Exception as error:
                # A template is a program: it raises its own refusals, such as that of a system text.
                raise InvalidInput(f"The chat template refused the messages: {error}") from error
            return [int(token) for token in found]
        names = {"system": "", "user": "You: ", "assistant": "Bot: "}
        said = [f"{names[message['role']]}{message['content']}" for message in self._messages]
        return "\n\n".join([*said, "Bot:"])


def _questions() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            sys.stdout.write("You: ")
            sys.stdout.flush()
        question = sys.stdin.readline().strip()
        if not question:
            return
        yield question


def main() -> int:
    arguments = _arguments()
    disable_progress_bar()
    if isinstance(sys.stdin, TextIOWrapper):
        # The model gets a byte that is no text as a character of its own; no tokenizer takes half a character.
        sys.stdin.reconfigure(errors="replace")
    try:
        params = SamplingParams(
            max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed, stop=_STOPS
        )
        engine = Engine.from_pretrained(arguments.folder, max_num_seqs=1, device=arguments.device)
        conversation = Conversation(engine, params, arguments.system)
        for question in _questions():
            sys.stdout.write("Bot:")
            for piece in conversation.answer(question):
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n\n")
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_REFUSED
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
