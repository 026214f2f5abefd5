"""Text generation: an engine over the models of transformers, with paged attention and continuous batching.

    request -> engine -> scheduler -> pages, prefix cache -> batch -> model, attention -> sampler -> text -> output

In reading order:

config            what an engine can be told
engine            add, step, abort; generate and stream above them
steps             a plan -> computed, or launched while the step before it is not read
launched_step     a step whose tokens lie on the device
scheduler         requests -> what one step computes; pure
request_queue     waiting requests by priority, age and arrival; pure
pages             pages in use, free and idle; pure
prefix_cache      pages by the tokens before and in them; pure
forward_attempts  the forwards of a step, smaller ones where one fails
page_tables       pages that a group of rows reads; pure
batch             a step's plan -> flat tensors
model             a folder -> a decoder
layer_rules       which keys a layer's queries see
short_windows     long windows made short, for the time of a probe
probe             a decoder is served right, or refused
attention         the function that the models call
acceleration_gate what makes a decoder faster is asked of the one gate
logit_evidence    logits of a form -> evidence for the gate
accelerations     joined layers and the kernel, tried at load
huge_pages        memory of pages on a CPU
paged_kernel      attention of decoding rows, in triton
attention_choice  the kernel, or gathered pages
forwards          chunks of a step -> logits
decode_graphs     steps in which every row decodes, as CUDA graphs
compiled_decoding the model in these graphs, compiled
graph_trial       both tried at load
pool_size         pages of the pool, by megabytes or a share of a GPU
flat_positions    positions for models that ask their cache
load_records      what earlier loads have measured and proven
joined_linears    linear layers of one input as one product
packing           linear layers with packed weights, where they are faster
request           one text: its sequence, how its tokens are chosen, its end
text_group        the texts of one request -> its output
token_rules       parameters -> tokens that may come
structure         the form of a text -> tokens that may come next
token_history     tokens counted for penalties
sampling_row      how one token is chosen
logit_changes     penalties, biases, forbidden tokens
sampler, noise    logits -> tokens
speculation       the text so far -> guesses of the next tokens
verification      logits of a step -> tokens of each request, with guesses that were right
text              tokens -> text as it grows
stop_strings      where a text ends before one; pure
chat              messages -> prompt; output -> messages
prompts           a prompt -> its tokens
tool_calls        text -> the tools that it calls
outputs           what the caller gets
backend           the seam between a job and what writes its text
predicted_wait    what is ahead of a text -> seconds until it has a seat; pure
engine_counts     what an engine counts from step to step
engine_times      times and lengths of late, for reports
monitoring        the figures of an engine without a worker: a page, and a line on the console
runner            the backend that owns an engine
server_backend    the backend whose texts another server writes
server_request    a wish -> the request to that server
server_address    its URL -> a connection
server_call       one connection to it: request -> events
server_text       events -> outputs
served            the runtime of format `generate`: jobs -> a backend

The names are loaded at first use, because the engine imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.registry.sampling_params import SamplingParams
    from penstock.workers.generation.config import CacheConfig, Config, SchedulerConfig
    from penstock.workers.generation.engine import Engine
    from penstock.workers.generation.monitoring import Monitoring, start_monitoring
    from penstock.workers.generation.outputs import (
        ChatMessage,
        ChatOutput,
        CompletionOutput,
        Delta,
        EngineStats,
        RequestOutput,
        Usage,
    )
    from penstock.workers.generation.tool_calls import ToolCall

__all__ = [
    "CacheConfig",
    "ChatMessage",
    "ChatOutput",
    "CompletionOutput",
    "Config",
    "Delta",
    "Engine",
    "EngineStats",
    "Monitoring",
    "PriorityRequestQueue",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "ToolCall",
    "Usage",
    "start_monitoring",
]

_MODULES = {
    "CacheConfig": "penstock.workers.generation.config",
    "Config": "penstock.workers.generation.config",
    "Engine": "penstock.workers.generation.engine",
    "Monitoring": "penstock.workers.generation.monitoring",
    "PriorityRequestQueue": "penstock.workers.generation.request_queue",
    "SamplingParams": "penstock.registry.sampling_params",
    "SchedulerConfig": "penstock.workers.generation.config",
    "ToolCall": "penstock.workers.generation.tool_calls",
    "start_monitoring": "penstock.workers.generation.monitoring",
}
"""The module of each name; a name that is missing here is one of the outputs."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "penstock.workers.generation.outputs")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value
