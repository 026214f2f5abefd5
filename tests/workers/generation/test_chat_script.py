"""ES-058: scripts/chat.py as a user runs it, with a small model of random weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.engine import Engine
from tests.servers import ROOT
from tests.workers.generation.engines import write_model

SCRIPT = ROOT / "scripts" / "chat.py"
PATIENCE_S = 180.0
STOPS = ["</s>", "\n\nYou:"]


def talk(folder: Path, questions: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with these lines as its input. A surrogate is written as the byte that it stands for."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *options],
        input=questions,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat") / "model")


def answers(folder: Path, *prompts: str) -> list[str]:
    """What the engine writes after these, alone."""
    engine = Engine.from_pretrained(folder, max_num_seqs=1, packed_linears="off")
    params = SamplingParams(max_tokens=12, temperature=0, stop=STOPS)
    return [output.outputs[0].text for output in engine.generate(list(prompts), params)]


def test_conversation_goes_on_with_what_was_said(folder: Path):
    """The second prompt has the first question and its answer; an empty line ends it."""
    (first,) = answers(folder, "Be kind.\n\nYou: the stream\n\nBot:")
    (second,) = answers(folder, f"Be kind.\n\nYou: the stream\n\nBot: {first.strip()}\n\nYou: größe\n\nBot:")
    options = ("--system", "Be kind.", "--temperature", "0", "--max-tokens", "12")
    done = talk(folder, "the stream\ngröße\n\nnever read\n", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"Bot:{first}\n\nBot:{second}\n\n"
    assert first != second


@pytest.mark.slow
def test_template_of_the_tokenizer_makes_the_prompt(folder: Path):
    """In place of the plain text."""
    template = folder / "chat_template.jinja"
    template.write_text("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}:")
    try:
        (expected,) = answers(folder, "<user>the stream:")
        done = talk(folder, "the stream\n", "--temperature", "0", "--max-tokens", "12")
    finally:
        template.unlink()
    assert done.stdout == f"Bot:{expected}\n\n"


def test_refusal_of_the_template_is_one_line(folder: Path):
    """Such as that of a system text, which many templates have no place for."""
    template = folder / "chat_template.jinja"
    template.write_text("{{ raise_exception('System role not supported') }}")
    try:
        done = talk(folder, "the stream\n", "--system", "Be kind.")
    finally:
        template.unlink()
    assert done.returncode == 2
    assert done.stderr == "The chat template refused the messages: System role not supported\n"


def test_bytes_that_are_no_text_end_no_conversation(folder: Path):
    """They are characters of their own, as in any other text."""
    (expected,) = answers(folder, "You: gr\ufffd\ufffde\n\nBot:")
    done = talk(folder, "gr\udcfc\udcdfe\n", "--temperature", "0", "--max-tokens", "12")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"Bot:{expected}\n\n")


@pytest.mark.slow
def test_seed_and_temperature_are_those_of_the_options(folder: Path):
    """Equal seeds give equal answers."""
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, stop=STOPS)
    engine = Engine.from_pretrained(folder, max_num_seqs=1, packed_linears="off")
    expected = engine.generate("You: the stream\n\nBot:", params)[0].outputs[0].text
    done = talk(folder, "the stream\n", "--seed", "5", "--temperature", "0.9", "--max-tokens", "12")
    assert done.stdout == f"Bot:{expected}\n\n"


@pytest.mark.slow
def test_what_cannot_be_is_one_line(folder: Path):
    """And no trace."""
    done = talk(folder, "the stream\n", "--max-tokens", "5000")
    assert done.returncode == 2
    expected = r"Found a prompt of at least 1 tokens and max_tokens 5000, expected at most 256 together .*\n"
    assert re.fullmatch(expected, done.stderr)


def test_folder_without_a_model_is_one_line(tmp_path: Path):
    """It says what was expected there."""
    done = talk(tmp_path, "")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Found no config.json" in done.stderr
