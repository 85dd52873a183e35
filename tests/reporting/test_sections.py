"""The sections of a report count images, ranks and parts as by hand."""

from types import SimpleNamespace

from trl_packfix.reporting.sections import SharedPacks


def stream_of(tokens_per_rank):
    packing = SimpleNamespace(tokens_per_rank=tokens_per_rank, parallel=SimpleNamespace(smallest=4))
    return SimpleNamespace(packing=packing)


def test_the_largest_part_of_a_rank_is_said():
    section = SharedPacks(16, 4, {1: 1_000, 8: 2}, 0.25, 12_345)
    assert section.line() == (
        "micro-steps by degree (ranks that share a pack): 1: 1,000, 8: 2; the largest part of a rank has 12,345 tokens"
    )
    assert SharedPacks(16, 4, {1: 2}).line().endswith(": 1: 2")
    assert SharedPacks.of_stream(stream_of(16), {1: 3}) == SharedPacks(16, 4, {1: 3})
    assert SharedPacks.of_stream(stream_of(None), {1: 3}) is None


def test_the_imbalance_of_images_is_said_where_ranks_share_packs():
    lines = dict(SharedPacks(16, 4, {1: 2}, 0.25).lines(8, 1.25, "; of images"))
    assert lines["modelled time"] == "25.0% of it in the exchange, imbalance 1.250; of images"
