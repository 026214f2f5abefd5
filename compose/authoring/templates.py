"""The files of a new package, by format: model.yaml, its code, and make.py, which writes its weights.

`NAME`, `VERSION` and `FORMAT` in model.yaml stand for those of the package. make.py is run in the package's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["TEMPLATES", "Template"]


class Template(NamedTuple):
    """files: text by path. inputs: of one job, as Python source. needs: the Python packages that make.py imports.
    extras: those of Penstock that install them."""

    files: Mapping[str, str]
    inputs: str
    needs: tuple[str, ...] = ()
    extras: str = ""


_NUMBERS: Final = """\
name: NAME
version: VERSION
format: FORMAT
signature:
  inputs:
    - {name: x, dtype: float32, shape: [batch, 4]}
  outputs:
    - {name: y, dtype: float32, shape: [batch, 2]}
batching: {max_batch_size: 64}
"""
_CODE: Final = _NUMBERS.replace("signature:", "entrypoint: model:build\nsignature:")
_JOB: Final = '{"x": [[1.0, 2.0, 3.0, 4.0]]}'

_PYTHON: Final = '''\
"""Replace the numbers below by your own model."""

import numpy as np


def build():
    """Called once, when a worker loads the model: load here what `predict` needs."""
    weights = np.ones((4, 2), dtype="float32")

    def predict(inputs):
        """Called for each batch: arrays by name, with the rows of several jobs, in and out."""
        return {"y": inputs["x"] @ weights}

    return predict
'''

_PYTORCH: Final = '''\
"""Replace the layers below by your own module."""

import torch


def build():
    """The module without its weights. A worker fills it from model.safetensors."""
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
'''

_MAKE_PYTORCH: Final = '''\
"""Writes model.safetensors: train the module here, or load your own weights."""

from model import build
from safetensors.torch import save_model

module = build()
save_model(module, "model.safetensors")
'''

_MAKE_TORCHSCRIPT: Final = '''\
"""Writes model.pt: replace the module by your own. A worker needs nothing but that file and model.yaml."""

import torch

module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
torch.jit.script(module).save("model.pt")
'''

_MAKE_ONNX: Final = '''\
"""Writes model.onnx: replace the module by your own. A worker needs nothing but that file and model.yaml."""

import torch

module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
torch.onnx.export(
    module,
    (torch.ones(2, 4),),
    "model.onnx",
    input_names=["x"],
    output_names=["y"],
    dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    dynamo=True,
    external_data=False,
    verbose=False,
)
'''

_TRANSFORMERS: Final = """\
name: NAME
version: VERSION
format: transformers
signature:
  inputs:
    - {name: text, dtype: string, shape: [batch]}
  outputs:
    - {name: embedding, dtype: float32, shape: [batch, 32]}
batching: {max_batch_size: 64, length_input: text, max_length: 128, truncate: true}
"""

_MAKE_TRANSFORMERS: Final = '''\
"""Writes a tiny BERT with random weights. Your own model and tokenizer: call save_pretrained(".") of both.

A pipeline instead of a sentence encoder: name it as `task` in model.yaml.
"""

from pathlib import Path

from transformers import BertConfig, BertModel, BertTokenizer

letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
vocabulary = Path("vocab.txt")
vocabulary.write_text("\\n".join(words))
BertTokenizer(vocab=str(vocabulary)).save_pretrained(".")
vocabulary.unlink()
config = BertConfig(
    vocab_size=len(words),
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=128,
)
BertModel(config).save_pretrained(".")
'''

_GENERATE: Final = """\
name: NAME
version: VERSION
format: generate
generate: {max_model_len: 256, max_num_seqs: 8, kv_cache_mb: 8}
"""

_MAKE_GENERATE: Final = '''\
"""Writes a tiny Llama with random weights. Your own model and tokenizer: call save_pretrained(".") of both."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {"</s>": 0, **{letter: number for number, letter in enumerate(letters, 1)}}
tokenizer = Tokenizer(models.BPE(vocabulary, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(".")
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=0,
)
LlamaForCausalLM(config).save_pretrained(".")
'''

_PIPELINE: Final = """\
name: NAME
version: VERSION
format: FORMAT
signature:
  inputs:
    - {name: x, dtype: float32, shape: [batch, 4]}
  outputs:
    - {name: y, dtype: float32, shape: [batch, 2]}
# Each step is a package of any format in a folder of this one. It takes inputs of the pipeline or outputs of earlier
# steps, and names its own outputs.
steps:
  - package: scale
    inputs: {x: x}
    outputs: {scaled: features}
  - package: predict
    inputs: {x: features}
    outputs: {y: y}
batching: {max_batch_size: 64}
"""

_STEP: Final = """\
name: STEP
version: 1
format: python
entrypoint: model:build
signature:
  inputs:
    - {name: x, dtype: float32, shape: [batch, 4]}
  outputs:
    - {name: OUTPUT, dtype: float32, shape: [batch, WIDTH]}
"""
_SCALE_STEP: Final = _STEP.replace("STEP", "scale").replace("OUTPUT", "scaled").replace("WIDTH", "4")
_PREDICT_STEP: Final = _STEP.replace("STEP", "predict").replace("OUTPUT", "y").replace("WIDTH", "2")

_SCALE: Final = '''\
"""Replace this step by your own: cleaning, features, an embedding."""


def build():
    """Called once, when a worker loads the pipeline."""

    def scale(inputs):
        """Called for each batch: arrays by name, with the rows of several jobs, in and out."""
        return {"scaled": inputs["x"] / 10}

    return scale
'''

TEMPLATES: Final[Mapping[str, Template]] = {
    "python": Template({"model.yaml": _CODE, "model.py": _PYTHON}, _JOB),
    "pytorch": Template(
        {"model.yaml": _CODE, "model.py": _PYTORCH, "make.py": _MAKE_PYTORCH}, _JOB, ("torch", "safetensors"), "torch"
    ),
    "torchscript": Template({"model.yaml": _NUMBERS, "make.py": _MAKE_TORCHSCRIPT}, _JOB, ("torch",), "torch"),
    "onnx": Template(
        {"model.yaml": _NUMBERS, "make.py": _MAKE_ONNX}, _JOB, ("torch", "onnx", "onnxscript"), "onnx,torch"
    ),
    "transformers": Template(
        {"model.yaml": _TRANSFORMERS, "make.py": _MAKE_TRANSFORMERS},
        '{"text": ["a sentence"]}',
        ("torch", "transformers"),
        "torch",
    ),
    "generate": Template(
        {"model.yaml": _GENERATE, "make.py": _MAKE_GENERATE},
        '{"prompt": "a beginning", "sampling_params": {"max_tokens": 8}}',
        ("torch", "transformers"),
        "generate",
    ),
    "pipeline": Template(
        {
            "model.yaml": _PIPELINE,
            "scale/model.yaml": _SCALE_STEP,
            "scale/model.py": _SCALE,
            "predict/model.yaml": _PREDICT_STEP,
            "predict/model.py": _PYTHON,
        },
        _JOB,
    ),
}
"""By format."""
