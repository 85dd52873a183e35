"""The table of equivalences in one process: every row ends with the weights and the log of TRL's unpacked training.

Rounding is measured as in `test_on_ranks.py`, which has the rows that need ranks.
"""

import re
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import trl
from ranks import faults
from ranks.engines import weights_of
from ranks.table import IN_ONE, NUM_STEPS, REPAIRED, ROWS, STATIC
from ranks.training import make_trainer, train
from support.rounding import LIMIT, tolerance
from support.versions import GEMMA3_LEAKS, IS_5_24, current_models, scores_tokens, trl_trains
from test_on_ranks import check_logs, difference, folder, key, logged, reference, rounding, unpacked

from trl_packfix.isolation.packed_model import PackedModel

pytestmark = [pytest.mark.slow, trl_trains]
# Documents see each other in a pack, so they are rows of padded batches
AS_ROWS = (*["paligemma"] * (not IS_5_24), *["gemma3"] * GEMMA3_LEAKS)
# Attention of their own in packs
OWN_ATTENTION = (*REPAIRED, "leaking", "minimax_m3_vl_text", "mamba", "mamba2", "paligemma")
MARKS = {"one_dft": scores_tokens, "one_prefixes_dft": scores_tokens}
MARKS |= {"one_kimi_linear": current_models, "one_minimax_m3": current_models}
NAMES = [pytest.param(name, marks=MARKS.get(name, ())) for name in IN_ONE]


@pytest.mark.parametrize("name", NAMES)
def test_packs_train_what_trl_trains_unpacked(name):
    row = ROWS[name]
    expected = reference(name)
    result = train(folder(), row)
    if row.given.get("bf16"):  # as far from unpacked training as that is with other micro-batches
        apart = difference(unpacked(key(row), halves=True), expected)
        assert 1e-4 < apart < 0.02
        assert difference(result, expected) <= 3 * apart
    else:
        assert difference(result, expected) <= tolerance(rounding()[0])
        check_logs(row, result, expected)
    text = result["report"]["first_step"]
    assert re.match(r"loss .* packed, .*; gradients \de-\d\d \([a-z ]+ \de-\d\d\) over", text)
    isolated, equal, attention = result["proof"]
    assert isolated
    assert equal
    assert len(result["seen"]) == NUM_STEPS * row.micro_batches
    assert max(count for *_, count in result["seen"]) > 2, "nothing was packed"
    assert result["unpacked"] is (row.model in AS_ROWS or "on_leak" in row.ours)
    assert attention == "packfix_varlen" or result["unpacked"] or row.model in OWN_ATTENTION
    if "share_prefixes" in row.ours:
        assert sum(logged(result, "computed_share")) < 0.9 * NUM_STEPS, "hardly anything was shared"
    if row.ours == STATIC:
        assert len(result["shapes"]) == 1


@pytest.mark.faults
@pytest.mark.parametrize("name, fault", [(name, fault) for name in IN_ONE for fault in ROWS[name].faults])
def test_the_table_sees_faults(name, fault):
    expected = reference(name)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(PackedModel, "prove_feature", lambda self, wrapped: None))
        stack.enter_context(faults.uncompared)
        late = faults.BEHIND_PROOF.get(fault)
        if late is None:
            stack.enter_context(faults.ALL[fault]())
        result = train(folder(), ROWS[name], callbacks=[faults.Begins(late, stack)] if late else None)
    assert difference(result, expected) > LIMIT


@pytest.mark.parametrize("name", ["one_sinks", "one_learned_positions"])
def test_stock_packing_leaks(name):
    """Stock TRL lets documents see each other on gpt_oss and opt. If it no longer does, the README is not true."""
    expected = reference(name)
    stock = make_trainer(folder(), replace(ROWS[name], ours={}), cls=trl.SFTTrainer, padding_free=True, max_length=None)
    stock.train()
    assert difference(expected | {"end": weights_of(stock)}, expected) > 1e-2
