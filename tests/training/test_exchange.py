"""Packs that ranks share, on one process: which heads and keys a rank gets, and what cannot be shared.

`training/test_on_ranks.py` runs the exchange on real ranks.
"""

import operator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from ranks.exchange import HEADS
from support.examples import leaking_example, type_with_own_attention
from support.runs import build_trainer, proved, texts
from sweep import zoo
from torch import nn

from trl_packfix import IsolationReport, PackingLeakError, group
from trl_packfix.attention import exchange
from trl_packfix.attention.exchange import HeadExchange, exchange_halo, head_ranges
from trl_packfix.attention.packed_forward import PackedForward, packed_forward_entered
from trl_packfix.attention.runs import launches_of
from trl_packfix.attention.varlen import varlen_attention
from trl_packfix.group import ALONE, Group, make_groups
from trl_packfix.isolation.tracing import Leak
from trl_packfix.training.totals import scores_of

BOUNDS = torch.tensor([0, 5, 8], dtype=torch.int32)
WHOLE_PACK = PackedForward(BOUNDS, BOUNDS, 5, 5, group=ALONE)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("degree", [2, 3, 4, 5])
def test_every_head_is_computed_once_with_the_keys_that_it_reads(heads, kv_heads, degree):
    ranges = head_ranges(heads, kv_heads, degree)
    assert [head for queries, _ in ranges for head in range(queries.start, queries.stop)] == [*range(heads)]
    sizes = [queries.stop - queries.start for queries, _ in ranges]
    assert max(sizes) - min(sizes) <= 1
    for queries, keys in ranges:
        read = {head * kv_heads // heads for head in range(queries.start, queries.stop)}
        assert read == set(range(keys.start, keys.stop))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_the_exchange_copies_no_index_to_the_device(heads, kv_heads, monkeypatch):
    """For such a copy the host would wait for the GPU, in every layer. `test_on_ranks.py` has the values."""
    monkeypatch.setattr(torch, "tensor", None)  # it would copy from the host
    monkeypatch.setattr(exchange, "exchange_pieces", lambda flat, send, receive, group: flat.new_empty(sum(receive)))
    query, key, value = (torch.randn(1, n, 3, 4) for n in (heads, kv_heads, kv_heads))
    for member in range(4):
        states = HeadExchange(heads, kv_heads, Group(4, member)).to_heads([query], [key, value])
        assert [values.shape[2] for values in states] == [4 * 3] * 3


def test_a_rank_that_is_alone_communicates_with_no_rank(monkeypatch):
    """Operations of a group of one return what they got, or zeros where other ranks would send rows."""
    monkeypatch.setattr(group, "dist", None)
    monkeypatch.setattr(exchange, "exchange_pieces", None)
    group_of_one = Group()
    query, key, value = (torch.randn(1, n, 5, 4) for n in (6, 3, 3))
    assert group_of_one.sum(query) is query
    assert group_of_one.gather(query, dim=1) is query
    of_heads = HeadExchange(6, 3, group_of_one)
    assert all(map(operator.is_, of_heads.to_heads([query], [key, value]), (query, key, value)))
    assert torch.equal(of_heads.to_tokens(query), query.transpose(1, 2))
    assert not exchange_halo(query[0], 2, group_of_one).any()


def test_a_convolution_of_one_token_needs_no_rows_of_other_ranks(monkeypatch):
    monkeypatch.setattr(exchange, "exchange_pieces", None)
    assert exchange_halo(torch.randn(1, 5, 4), 0, Group(2)).shape == (1, 0, 4)


def attend(tokens, forward, **kwargs):
    q = k = v = torch.randn(1, 2, tokens, 4)
    with packed_forward_entered(forward):
        return varlen_attention(nn.Module(), q, k, v, None, **kwargs)[0]


PART_OF_PACK = replace(WHOLE_PACK, group=Group(2), part_tokens=4)
REFUSED = [
    (lambda: head_ranges(2, 1, 4), r"2 heads got a part of a pack on 4 ranks.*at least one head.*Set `tok"),
    (lambda: make_groups([2]), r"Groups of 2 ranks .* 1 rank\. Every rank needs a group.*divides"),
    (lambda: Group(2).process_group, r"no process group of 2 ranks.*cannot exchange.*`SFTTrainer`"),
    (lambda: attend(8, PART_OF_PACK), r"got 8 tokens.*each of the 2 ranks .* holds 4.*Set tokens_per_rank=None"),
    (
        lambda: attend(4, PART_OF_PACK, dropout=0.1),
        "dropout=0.1 on a part of a pack.*same random numbers.*attention_dropout",
    ),
    (
        lambda: PART_OF_PACK.repaired_batches(1.0),
        r"repaired module got a part of a pack that 2 ranks share.*whole documents",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_ranks_cannot_share_is_refused(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


def test_all_ranks_make_all_groups_where_torch_refuses_a_group_of_some(monkeypatch):
    """torch 2.13 refuses such a group with TORCH_DISTRIBUTED_USE_TORCHCOMMS=1."""
    groups_made = []

    def new_group(ranks, timeout=None, use_local_synchronization=False):
        if use_local_synchronization:
            raise NotImplementedError("new_group cannot delegate to split_group with use_local_synchronization=True")
        groups_made.append(ranks)
        return tuple(ranks)

    monkeypatch.setattr(group, "_process_groups", {})
    monkeypatch.setattr(group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(group.dist, "get_rank", lambda: 6)
    monkeypatch.setattr(group.dist, "new_group", new_group)
    make_groups([4, 2])
    assert groups_made == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert group._process_groups[2].process_group == (6, 7)
    assert group._process_groups[4].process_group == (4, 5, 6, 7)


def test_a_group_of_the_users_check_gets_the_timeout_of_training(monkeypatch):
    """`check_isolation(degree=2)` makes a group with torch's timeout, and training then waits for `ddp_timeout`."""
    timeouts = []
    monkeypatch.setattr(group, "_process_groups", {})
    monkeypatch.setattr(group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(group.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(group.dist, "new_group", lambda ranks, timeout, **kwargs: timeouts.append(timeout) or ranks)
    for timeout in (None, timedelta(hours=2), timedelta(hours=2), None, timedelta(hours=3)):
        make_groups([2], timeout)
    assert timeouts == [None, timedelta(hours=2), timedelta(hours=3)]


def test_boundaries_beyond_the_pack_are_refused_without_a_look_at_them():
    """On a GPU a kernel would read beyond the tensor, and comparing the values would wait for the device."""
    launches_of(WHOLE_PACK, 8)
    forward = replace(WHOLE_PACK, max_length_q=5, max_length_k=5)
    with pytest.raises(ValueError, match=r"2 documents of up to 5 tokens.*pack has 4 tokens.*read beyond"):
        launches_of(forward, 4)


# Proofs


@pytest.mark.parametrize(
    "find_type, on_leak, reason",
    [
        (lambda: leaking_example().model_type, "repair", r"these modules are repaired: .*Attention"),
        (lambda: leaking_example().model_type, "unpack", r"the model is unpacked: UNPACKED"),
        (type_with_own_attention, "repair", r"the attention of the model is 'eager'"),
    ],
    ids=["repaired", "unpacked", "own attention"],
)
def test_models_that_were_changed_to_be_packed_are_not_shared(find_type, on_leak, reason):
    model = zoo.build_model(find_type())
    packed, report = proved(model, on_leak=on_leak)
    assert report.isolated
    with pytest.raises(PackingLeakError, match=rf"A pack was to be shared by 2 ranks, and {reason}.*tokens_per_rank"):
        packed.prove_degree(model, 2)


def test_what_the_probe_finds_on_parts_is_told_with_the_module():
    leaks = [Leak("layers.0.conv", "Conv1d", 0.3)]
    report = IsolationReport(False, True, 0.3, 0.0, None, 4e-6, "packfix_varlen", leaks=leaks, degree=4)
    message = r"A pack was shared by 4 ranks, .*by 3.0e-01.*layers.0.conv \(Conv1d\). Set `tokens_per_rank=None`"
    with pytest.raises(PackingLeakError, match=message):
        report.raise_if_leaking()
    with pytest.raises(PackingLeakError, match=r"shared by 4 ranks, and the model raised: no index.*tokens_per_rank"):
        replace(report, error="no index", leaks=[]).raise_if_leaking()


# Settings

SHARED = {"tokens_per_rank": 64, "per_device_train_batch_size": 1}


def test_packs_of_more_ranks_than_there_are_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`max_length=64` .*`tokens_per_rank=32` on 1 ranks.*2 ranks.*there are 1"):
        build_trainer(tmp_path, texts(8), **SHARED | {"tokens_per_rank": 32})


def test_documents_longer_than_a_rank_are_refused_where_logits_are_needed(tmp_path):
    trainer = build_trainer(tmp_path, texts(8), **SHARED)
    trainer.args.tokens_per_rank = 32  # on one process a document of 64 tokens would be refused at the start
    with pytest.raises(ValueError, match=r"a document of \d+ tokens, `tokens_per_rank` is 32.*whole documents on one"):
        trainer.predict(trainer.train_dataset)


def test_labels_that_were_shifted_before_the_cut_are_all_scored():
    logits = torch.randn(1, 6, 9)
    labels = torch.tensor([[-100, 3, 4, -100, 5, 6]])
    following = torch.cat([labels[:, 1:], torch.tensor([[-100]])], 1)
    halves = (slice(0, 3), slice(3, 6))
    parts = [scores_of(logits[:, half], labels[:, half], following[:, half]) for half in halves]
    joined = torch.cat([part.log_probs for part in parts], 1)
    assert torch.allclose(joined[:, :-1], scores_of(logits, labels).log_probs)
    assert sum(part.label_mask.sum() for part in parts) == 4
