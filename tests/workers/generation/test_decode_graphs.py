"""What a CUDA graph of decoding rows needs, as far as a CPU can show it: buckets, padding rows, plans of one size.

The replay itself is in `test_paged_kernel`, by a copy of the plan in the interpreter. No graph is captured here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest

from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.decode_graphs import CaptureRefused, DecodeGraphs, DecodePlan, bucket_of, is_decoding
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.generation.scheduler import Chunk
from penstock.workers.generation.scheduler import Sequence as Scheduled
from penstock.workers.runtime.torch_device import TorchDevice
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids

PAGE_SIZE = 4


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (64, 64)]
)
def test_buckets_are_few(rows, expected):
    """The next power of two, and from 8 rows on the next multiple of 8."""
    assert bucket_of(rows) == expected


def test_only_decoding_rows_have_a_graph():
    """A chunk of a prompt, a row with drafts, and a row without logits have other shapes."""
    one = Scheduled("one", [1, 2, 3], 3)
    assert is_decoding([Chunk(one, 2, 1)])
    assert not is_decoding([Chunk(one, 2, 1), Chunk(one, 1, 2)])
    assert not is_decoding([Chunk(one, 2, 2, drafts=(5,))])
    assert not is_decoding([Chunk(one, 1, 1)])


def test_plans_of_a_bucket_have_one_size():
    """However long its rows are: the tables are as wide as the longest text needs."""
    graphs = graphs_of("Gemma2")
    sizes = set()
    for lengths in ((1, 1, 1), (64, 3, 9), (5, 6, 7, 8)):
        steps = [Chunk(Scheduled("", [1] * length, length, pages=[1] * 16), length - 1, 1) for length in lengths]
        sizes.add(tuple(graphs.plan(steps).host.shape))
    assert len(sizes) == 1


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Llama 4 with chunks"])
def test_a_plan_that_is_filled_again_is_as_good_as_a_new_one(name):
    """Requests grow, end, lose their pages and come: of each row, what its query reads is that of a new plan."""
    graphs, chosen = graphs_of(name), random.Random(0)
    running: list[Scheduled] = []
    for turn in range(60):
        running = [one for one in running if len(one.tokens) < 60 and chosen.random() > 0.05]
        while len(running) < 5 or (len(running) < 8 and chosen.random() < 0.3):
            length = chosen.randrange(1, 50)
            running.append(Scheduled("", [chosen.randrange(1, 99) for _ in range(length)], length))
        for one in running:
            one.tokens.append(turn)
            pages = -(-len(one.tokens) // PAGE_SIZE)
            if chosen.random() < 0.05:
                one.pages = []
            one.pages.extend(chosen.randrange(1, 100) for _ in range(pages - len(one.pages)))
        chosen.shuffle(running)
        steps = [Chunk(one, len(one.tokens) - 1, 1) for one in running]
        found, fresh = (read(each.plan(steps)) for each in (graphs, graphs_of(name)))
        assert found == fresh
        assert [row["ids"] for row in found[: len(running)]] == [one.tokens[-1] for one in running]
        assert all(row["slots"] == 0 for row in found[len(running) :])


def test_a_row_that_was_padding_has_its_pages_again():
    """Fewer rows, then the same ones as before: padding rows read page 0, and hide nothing for later."""
    plan = graphs_of("Llama").plan([Chunk(Scheduled("", [1], 1, pages=[1]), 0, 1)])
    steps = [Chunk(Scheduled("", [1] * 9, 9, pages=[7 + row, 20 + row, 40 + row]), 8, 1) for row in range(plan.rows)]
    plan.fill(steps)
    expected = read(plan)
    plan.fill([])
    assert all(own == [0] for row in read(plan) for _, own in row["tables"].values())
    plan.fill(steps)
    assert read(plan) == expected


def test_two_plans_take_turns():
    """The device may still copy the last one."""
    graphs = graphs_of("Llama")
    steps = [Chunk(Scheduled("", [1], 1, pages=[1]), 0, 1)]
    first, second, third = (graphs.plan(steps) for _ in range(3))
    assert first is third
    assert first is not second


def test_a_model_that_cannot_be_captured_decodes_without_graphs(caplog):
    """The first step that meets it is computed all the same."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=4)
    expected = token_ids(engine.generate(prompts_of(5, 9), GREEDY))
    engine.forwards.graphs = cast(Any, Uncapturable())
    assert token_ids(engine.generate(prompts_of(5, 9), GREEDY)) == expected
    assert engine.forwards.graphs is None
    assert [record.message for record in caplog.records] == ["decoding goes on without CUDA graphs"]


class Uncapturable:
    """In the place of graphs."""

    def forward(self, chunks: Sequence[Chunk], tokens: Any) -> Any:
        """Refuses."""
        raise CaptureRefused("it copies to the device")


def read(plan: DecodePlan) -> list[dict[str, Any]]:
    """Of each row: its integers, and the pages from the first to the last key that its query sees, by rule."""
    device = TorchDevice("cpu", 1)
    batch = plan.on_device(device)
    (group,) = batch.groups
    rows = []
    for row in range(plan.rows):
        position = int(group.first_positions[row])
        tables = {}
        for rule, view in group.views.items():
            start = int(view.starts[row])
            own = view.numbers.view(plan.rows, -1)[row].tolist()
            tables[rule] = start, own[: (position - start) // PAGE_SIZE + 1]
        rows.append(
            {
                "ids": int(batch.input_ids[0, row]),
                "positions": (int(batch.position_ids[0, row]), position),
                "slots": int(batch.slots[row]),
                "keep": int(batch.logits_to_keep[row]),
                "tables": tables,
            }
        )
    return rows


def graphs_of(name: str) -> DecodeGraphs:
    """Of a small model of this architecture; on a CPU nothing is captured."""
    return DecodeGraphs(wrap_decoder(decoder(name), None, 64), KeyValuePools(100, PAGE_SIZE))


def test_cpu_has_no_graphs():
    """The option says what happens on a GPU."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=4, cuda_graphs=True)
    assert engine.forwards.graphs is None
