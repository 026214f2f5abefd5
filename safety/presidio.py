"""Recognisers of Presidio as a finder of InputRedactor, without a language model: patterns, checks and context only.

Presidio comes with the extra `presidio`. Its recognisers of names and places need a language model and are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from penstock.registry.errors import ConfigurationError

__all__ = ["PresidioFinder", "presidio_finder"]

_LANGUAGE: Final = "en"
_NEEDS_NETWORK: Final = frozenset({"EMAIL_ADDRESS", "URL"})
"""Their recognisers fetch a list of domains from the internet at their first use."""


class PresidioFinder:
    """Finds texts of these entities: names of Presidio, such as IBAN_CODE or PHONE_NUMBER. For any thread.

    Raises ConfigurationError without Presidio, and for an entity that no recogniser finds without a language model and
    the internet.
    """

    def __init__(self, entities: Sequence[str]) -> None:
        self._entities: Final = list(entities)
        try:
            self._analyzer = _analyzer(self._entities)
        except ImportError:
            raise ConfigurationError(
                "presidio-analyzer is not installed, and privacy.presidio_entities needs it. Expected: pip install "
                "'.[presidio]' in the checkout of Penstock"
            ) from None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """The offsets of the found texts, in characters."""
        for found in self._analyzer.analyze(text, language=_LANGUAGE, entities=self._entities):
            yield found.start, found.end


@cache
def presidio_finder(entities: tuple[str, ...]) -> PresidioFinder:
    """The finder of these entities. One for the process: it takes a second to make. Raises ConfigurationError."""
    return PresidioFinder(entities)


def _analyzer(entities: Sequence[str]) -> Any:
    from presidio_analyzer import AnalyzerEngine, LocalRecognizer, RecognizerRegistry

    model = _no_language_model()
    known = RecognizerRegistry(supported_languages=[_LANGUAGE])
    known.load_predefined_recognizers(languages=[_LANGUAGE], nlp_engine=model)
    usable = [each for each in known.recognizers if isinstance(each, LocalRecognizer) and "Spacy" not in each.name]
    found = {entity for each in usable for entity in each.supported_entities} - _NEEDS_NETWORK
    if missing := sorted(set(entities) - found):
        raise ConfigurationError(
            f"No recogniser of Presidio finds {', '.join(missing)} without a language model and the internet. "
            f"Expected some of: {', '.join(sorted(found))}"
        )
    chosen = [each for each in usable if set(each.supported_entities) & set(entities)]
    registry = RecognizerRegistry(recognizers=chosen, supported_languages=[_LANGUAGE])
    return AnalyzerEngine(registry=registry, nlp_engine=model, supported_languages=[_LANGUAGE])


def _no_language_model() -> Any:
    """Gives recognisers no words. Presidio's own engines would download a model."""
    from presidio_analyzer.nlp_engine import NlpArtifacts, NlpEngine

    class NoLanguageModel(NlpEngine):  # type: ignore[misc]  # the class of a package that mypy does not look into
        def load(self) -> None:
            """There is nothing to load."""

        def is_loaded(self) -> bool:
            return True

        def process_text(self, text: str, language: str) -> Any:
            return NlpArtifacts([], [], [], [], self, language)

        def process_batch(self, texts: Any, language: str, **_options: Any) -> Iterator[tuple[str, Any]]:
            for text in texts:
                yield text, self.process_text(text, language)

        def is_stopword(self, word: str, language: str) -> bool:
            return False

        def is_punct(self, word: str, language: str) -> bool:
            return False

        def get_supported_entities(self) -> list[str]:
            return []

        def get_supported_languages(self) -> list[str]:
            return [_LANGUAGE]

    return NoLanguageModel()
