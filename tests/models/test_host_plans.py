"""A forward whose plan lies on the host refuses slots and blocks that its caches do not have."""

from __future__ import annotations

import pytest
import torch
from support.requests import Requests

from sparse_attn.framework.torch_private import fake_mode, map_leaves
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

LENGTH = 300  # several blocks of a request of either model, and entries of every ratio


def wrong_slot(requests, plan):
    count = requests.caches.kv[0].shape[0] * requests.caches.kv[0].shape[1]
    plan.slot_mapping[7] = count
    return f"plan.slot_mapping[7]: got {count}, allowed: -1, or 0 to {count - 1} (slots of the cache)"


def slot_of_another(requests, plan):
    plan.slot_mapping[7] = plan.slot_mapping[3]
    return f"plan.slot_mapping[7]: got {int(plan.slot_mapping[3])}, allowed: slots that no other row writes"


def wrong_block(requests, plan):
    column, count = 128 // requests.block_size, len(requests.block_table.flatten()) + 3
    plan.block_table[0, column] = count
    return f"plan.block_table[0, {column}]: got {count}, allowed: -1, or 0 to {count - 1} (blocks of the cache)"


def wrong_request(requests, plan):
    plan.request_ids[5] = 1
    return "plan.request_ids[5]: got 1, allowed: -1, or 0 to 0 (requests)"


def far_position(requests, plan):
    plan.positions[9] = 2**31 - 1
    return "plan.positions[9]: got 2147483647, allowed: at most "


SPOILT = (wrong_slot, slot_of_another, wrong_block, wrong_request, far_position)


def requests_of(name):
    spec = preset(name)
    return Requests(spec, random_params(spec, seed=0), cache_layouts(spec, "fp32"), 1, LENGTH + 1)


def prefill(requests, spoil=lambda requests, plan: None):
    """What ``spoil`` says of the step's plan; it runs with what is spoilt."""
    model, said = requests.model, []

    def run(tokens, caches, plan):
        said.append(spoil(requests, plan))
        return model(tokens, caches, plan)

    requests.model = run
    try:
        requests.step(prefill=[(0, [1] * LENGTH)], padding=2)
        raised = ""
    except ValueError as error:
        raised = str(error)
    return said[0], raised


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_what_a_plan_names_and_caches_do_not_have_is_refused(name, spoil):
    said, raised = prefill(requests_of(name), spoil)
    assert raised.startswith(said)


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_blocks_that_no_row_uses_mean_nothing(name):
    requests = requests_of(name)
    requests.block_table = torch.cat([requests.block_table, torch.full((1, 1), 2**31 - 1, dtype=torch.int32)], 1)
    assert prefill(requests)[1] == ""
    requests.step(decode=[(0, [1])])


def test_stand_ins_are_not_looked_at():
    requests = requests_of("tiny_v32")
    model = requests.model

    def run(tokens, caches, plan):
        with fake_mode() as mode:
            held, *rest = map_leaves(
                lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value,
                (dict(model.named_parameters()), tokens, caches, plan),
            )
            return torch.func.functional_call(model, held, tuple(rest))

    requests.model = run
    assert requests.step(prefill=[(0, [1] * LENGTH)])[0].shape[0] == LENGTH
