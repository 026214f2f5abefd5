"""A gateway and a worker that write texts with a small model of random weights, and the engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import pre_tokenizers

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.engine import Engine
from tests.gateway_process import GatewayProcess
from tests.servers import RedisServer, WorkerProcess, require_module
from tests.workers.generation.packages import write_writer

__all__ = ["Site", "client_of", "writing_site"]

_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
"""It shows the form of calls that the parser `hermes` reads."""


def _bytes_of_letters() -> dict[str, int]:
    """As the library `tokenizers` writes them. Bytes that UTF-8 never has stand for themselves."""
    write = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    points = [*range(0x80, 0x800, 0x3F), *range(0x800, 0xD800, 0x3FF), *range(0xE000, 0x110000, 0x3FF), *range(0x80)]
    found = {chr(byte): byte for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    for character in map(chr, points):
        ((letters, _),) = write(character)
        found.update(zip(letters, character.encode(), strict=True))
    return found


class Site(NamedTuple):
    """The gateway and its worker, and an engine over the same package in this process."""

    gateway: GatewayProcess
    engine: Engine
    worker: WorkerProcess

    def expected(self, prompt: Any, max_tokens: int = 24, **params: Any) -> str:
        """The text of the engine alone."""
        wishes = {"temperature": 0, "ignore_eos": True, **params}
        return self.engine.generate(prompt, SamplingParams(max_tokens=max_tokens, **wishes))[0].outputs[0].text

    def expected_tokens(self, prompt: Any, top: int, **params: Any) -> list[tuple[bytes, float, dict[int, float]]]:
        """Each token of the engine's text: its bytes, its log probability, and those of the most probable ones."""
        wishes = {"temperature": 0, "ignore_eos": True, "max_tokens": 24, "logprobs": top, **params}
        output = self.engine.generate(prompt, SamplingParams(**wishes))[0].outputs[0]
        assert output.logprobs is not None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return [(self.piece(token), at[token], at) for token, at in pairs]

    def piece(self, token: int) -> bytes:
        """The bytes of a token: those of the fixture's tokenizer are letters of `bytes_to_unicode`."""
        return bytes(_BYTES[letter] for letter in self.engine.decoder.tokenizer.convert_ids_to_tokens(token))

    def tokens(self, text: str) -> list[int]:
        """As the model counts them."""
        found: list[int] = self.engine.decoder.tokenizer(text)["input_ids"]
        return found


_BYTES = _bytes_of_letters()


@contextmanager
def writing_site(server: RedisServer, folder: Path) -> Iterator[Site]:
    """A gateway that has the tokenizer of the model `writer`, and a worker for it."""
    package = write_writer(folder / "models")
    (package / "chat_template.jinja").write_text(_TEMPLATE)
    worker = WorkerProcess(server, folder / "models", folder, name="texts@test")
    root = {"PENSTOCK_INFERENCE_REPO_ROOT": str(folder / "models")}
    gateway = GatewayProcess(server, folder / "gateway", environment=root)
    try:
        worker.start()
        gateway.start()
        engine = Engine.from_pretrained(package, max_num_seqs=4, kv_cache_mb=4, packed_linears="off")
        yield Site(gateway, engine, worker)
    finally:
        gateway.stop()
        worker.stop()


def client_of(gateway: GatewayProcess) -> Any:
    """OpenAI's client, without its own retries."""
    return require_module("openai").OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
