"""Models that cannot be packed run right all the same, on the same batches, with documents as padded rows."""

import pytest
import torch
from support.examples import leaking_example
from support.models import DYNAMIC, build_tiny_model
from support.runs import build_trainer, interrupt_forward, texts
from sweep.judge import packed

from trl_packfix import check_isolation
from trl_packfix.isolation.unpacking import UnpackedForward
from trl_packfix.layout import LAYOUT_KEY, layout_of

pytestmark = pytest.mark.slow


def pack(lengths):
    """Return documents of random tokens, and their pack."""
    documents = [torch.randint(4, 300, (n,)) for n in lengths]
    return documents, packed(documents)


@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 1, 9, 2], [4] * 6, [1] * 64, [32]])
def test_any_documents_come_back_in_order(lengths):
    model = build_tiny_model(attn_implementation="sdpa").eval()
    documents, batch = pack(lengths)
    UnpackedForward(model).install()
    with torch.no_grad():
        in_pack = model(**batch).logits[0]
        of_documents = torch.cat([model(ids[None]).logits[0] for ids in documents])
    torch.testing.assert_close(in_pack, of_documents, rtol=1e-5, atol=1e-6)


def test_padding_is_bounded_by_grouping_documents_of_similar_length():
    model = build_tiny_model(attn_implementation="sdpa")
    UnpackedForward(model).install()
    computed = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[:-1].numel()))
    with torch.no_grad():
        model(**pack([200] + [5] * 60)[1])
    # as rows of one batch these 500 tokens would be 61 x 200
    assert 500 <= sum(computed) < 2 * 500


def test_the_model_does_not_get_the_layout_of_a_batch():
    """On CUDA batches have it for the launches of the kernel, and no model takes it."""
    model = build_tiny_model(attn_implementation="sdpa").eval()
    UnpackedForward(model).install()
    names = set()
    for module in (model.model, model.model.layers[0]):
        module.register_forward_pre_hook(lambda _, args, kwargs: names.update(kwargs), with_kwargs=True)
    _, batch = pack([3, 2])
    with torch.no_grad():
        model(**batch, **{LAYOUT_KEY: layout_of(batch)})
    assert "attention_mask" in names
    assert LAYOUT_KEY not in names


def test_a_forward_that_raises_leaves_nothing_behind():
    model = build_tiny_model(attn_implementation="sdpa").eval()
    unpacked = UnpackedForward(model)
    unpacked.install()
    _, batch = pack([3, 2])
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    handle.remove()
    assert unpacked._running == unpacked._boundaries == []
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 300)


def test_an_interrupted_forward_leaves_nothing_behind_when_the_hooks_are_removed():
    """After Ctrl-C, often in a notebook, torch calls no hook behind the modules that were running."""
    model = build_tiny_model(attn_implementation="sdpa").eval()
    unpacked = UnpackedForward(model)
    unpacked.install()
    interrupt_forward(model.model.layers[1])
    with pytest.raises(KeyboardInterrupt):
        model(**pack([3, 2])[1])
    assert [*map(len, (unpacked._running, unpacked._boundaries))] == [1, 1], "no forward was interrupted"
    unpacked.remove()
    assert unpacked._running == unpacked._boundaries == []


def test_a_forward_inside_another_leaves_the_outer_one_as_it_is():
    model = build_tiny_model(attn_implementation="sdpa").eval()
    UnpackedForward(model).install()
    _, batch = pack([3, 9, 2])
    _, other = pack([4, 5])
    calls = []

    def call_again(*call):
        handle.remove()
        calls.append(model(**other))

    with torch.no_grad():
        expected = model(**batch).logits
        handle = model.model.layers[0].register_forward_pre_hook(call_again)
        logits = model(**batch).logits
    assert len(calls) == 1
    assert torch.equal(logits, expected)


def test_router_logits_come_without_padding():
    model = build_tiny_model("mixtral", attn_implementation="sdpa").eval()
    documents, batch = pack((7, 3, 5))
    UnpackedForward(model).install()
    with torch.no_grad():
        routed = model.model(**batch, output_router_logits=True)
        logits_alone = [model.model(ids[None], output_router_logits=True).router_logits for ids in documents]
    for in_pack, of_documents in zip(routed.router_logits, zip(*logits_alone, strict=True), strict=True):
        torch.testing.assert_close(in_pack, torch.cat(of_documents), rtol=1e-5, atol=1e-6)


def test_the_report_says_that_and_why(tmp_path, capsys):
    model = build_tiny_model(leaking_example().model_type)
    trainer = build_trainer(tmp_path, texts(), model=model, max_steps=1, packing_report=True, on_leak="unpack")
    trainer.train()
    shown = " ".join(capsys.readouterr().out.split())
    assert "UNPACKED, documents as rows of padded batches, because documents move each other by" in shown
    assert "passed: " in shown


def test_evaluation_of_a_leaking_model_before_training_is_right(tmp_path):
    model = build_tiny_model(leaking_example().model_type)
    kwargs = {"model": model, "eval_dataset": texts(20, seed=1)}
    # With "raise" it is not repaired, so rows are padded
    all_settings = ({"packing": False}, {}, {"packing": False, "eval_packing": True}, {"on_leak": "raise"})
    losses = [
        build_trainer(tmp_path, texts(), **kwargs, **settings).evaluate()["eval_loss"] for settings in all_settings
    ]
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * 4


def test_documents_that_move_each_other_through_the_length_of_a_batch_are_not_called_right():
    model = build_tiny_model(**DYNAMIC)
    UnpackedForward(model).install()
    assert not check_isolation(model, max_length=64).isolated
