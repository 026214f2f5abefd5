"""Recognisers of Presidio as a finder of personal data, without a language model and without the internet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings_sections import PrivacyConfig
from penstock.safety.presidio import PresidioFinder
from penstock.safety.privacy import InputRedactor, redactor_of
from tests.servers import require_module

IBAN = "GB82 WEST 1234 5698 7654 32"


class Letters:
    """Finds each `x`."""

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        yield from ((place, place + 1) for place, letter in enumerate(text) if letter == "x")


@pytest.mark.parametrize("text", ["axb", "éxé🦊x", "x\ud800x", ""])
def test_offsets_of_a_finder_are_of_characters(text: str):
    """What a finder finds is replaced, whatever the length of the letters before it; patterns work beside it."""
    redactor = InputRedactor(["b"], finders=[Letters()])
    assert redactor.redact(text) == text.replace("x", "[REDACTED]").replace("b", "[REDACTED]")


def test_finder_alone_makes_a_redactor():
    """Without patterns and detectors, and over nested data with bytes that are no UTF-8."""
    redactor = InputRedactor(finders=[Letters()], replacement="*")
    assert redactor.is_active
    assert redactor.redact_all({"a": [b"\xffx\xfe", "x"]}) == {"a": [b"\xff*\xfe", "*"]}
    assert redactor.changes(["x"])
    assert not redactor.changes(["y"])


def test_entities_of_the_settings_need_presidio():
    """privacy.presidio_entities without the package is an error that names the extra; without entities nothing is."""
    code = (
        "import sys; sys.modules['presidio_analyzer'] = None\n"
        "from penstock.registry.settings_sections import PrivacyConfig\n"
        "from penstock.safety.privacy import redactor_of\n"
        "print(redactor_of(PrivacyConfig()).is_active)\n"
        "try: redactor_of(PrivacyConfig(presidio_entities=('IBAN_CODE',)))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    first, second = shown.stdout.splitlines()
    assert first == "False"
    assert second.startswith("ConfigurationError presidio-analyzer is not installed")
    assert "'.[presidio]'" in second


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_presidio_finds_its_entities():
    """The settings choose the recognisers, and others find nothing."""
    require_module("presidio_analyzer")
    redactor = redactor_of(PrivacyConfig(presidio_entities=("IBAN_CODE", "PHONE_NUMBER")))
    assert redactor.redact(f"é: {IBAN}, call (212) 555-0123") == "é: [REDACTED], call [REDACTED]"
    assert redactor.redact("card 4111 1111 1111 1111") == "card 4111 1111 1111 1111"
    assert not redactor.changes("no data here")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entity", ["PERSON", "EMAIL_ADDRESS", "iban"])
def test_entity_that_needs_more_is_refused(entity: str):
    """One that needs a language model or the internet, and an unknown one: the error names those that can be had."""
    require_module("presidio_analyzer")
    with pytest.raises(ConfigurationError, match=rf"finds {entity} without .* Expected some of: .*IBAN_CODE"):
        PresidioFinder([entity])
