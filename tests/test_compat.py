"""Changes of other libraries' objects are undone, with several users at a time, and after errors."""

import logging
import threading

import pytest
import torch
from support.runs import build_trainer, texts
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from trl_packfix import compat


def test_a_value_is_replaced_once_and_until_its_last_user_leaves():
    library = {"__name__": "library", "names": ("a",)}
    first, second = (compat.ReplacedValues([(library, "names")], lambda names, _: (*names, "b")) for _ in range(2))
    first.enter()
    second.enter()
    first.leave()
    assert library["names"] == ("a", "b")
    second.leave()
    assert library["names"] == ("a",)


def test_a_value_that_other_code_has_set_since_stays():
    library = {"__name__": "library", "names": ("a",)}
    replaced = compat.ReplacedValues([(library, "names")], lambda names, _: (*names, "b"))
    replaced.enter()
    library["names"] = ("c",)
    replaced.leave()
    assert library["names"] == ("c",)


def test_the_construction_of_a_trainer_leaves_trls_operators_as_they_were(tmp_path):
    name = "trl.models.selective_activation_checkpointing"
    selective = pytest.importorskip(name, reason="earlier releases of TRL")
    before = selective._ATEN_ATTENTION_PACKET_NAMES
    with pytest.raises(ZeroDivisionError), compat.saves_varlen_attention():
        inside = selective._ATEN_ATTENTION_PACKET_NAMES
        1 / 0  # noqa: B018
    after_error = selective._ATEN_ATTENTION_PACKET_NAMES
    build_trainer(tmp_path, texts(3))
    after = selective._ATEN_ATTENTION_PACKET_NAMES
    assert inside == (*before, compat.VARLEN_KERNEL)
    assert after_error == before
    assert after == before


def test_callbacks_are_called_again_after_an_error():
    callbacks = [TrainerCallback(), PrinterCallback(), TrainerCallback()]
    handler = CallbackHandler(list(callbacks), None, None, None, None)
    with pytest.raises(ZeroDivisionError), compat.callbacks_left_out(handler, (PrinterCallback,)):
        inside = list(handler.callbacks)
        1 / 0  # noqa: B018
    assert inside == [callbacks[0], callbacks[2]]
    assert handler.callbacks == callbacks


def test_hooks_that_were_left_out_are_called_in_their_order_again():
    parameter = torch.nn.Parameter(torch.zeros(1))
    calls = []
    for name in "abc":
        parameter.register_hook(lambda gradient, name=name: calls.append(name))
    table = parameter._backward_hooks
    first = dict(list(table.items())[:1])
    with compat.hooks_left_out([(table, first)]):
        parameter.sum().backward()
        parameter.register_hook(lambda gradient: calls.append("d"))
    assert calls == ["b", "c"]
    parameter.sum().backward()
    assert calls[2:] == ["a", "b", "c", "d"]


def test_a_gradient_is_kept_after_an_error_in_backward():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError), compat.summed_once([parameter]):
        1 / 0  # noqa: B018
    assert torch.equal(parameter.grad, torch.ones(2))


def test_a_logger_is_quiet_in_one_thread_only(caplog):
    logger = logging.getLogger("a library")
    with compat.not_logged(logger):
        logger.warning("here")
        thread = threading.Thread(target=logger.warning, args=["in another thread"])
        thread.start()
        thread.join()
    logger.warning("afterwards")
    assert caplog.messages == ["in another thread", "afterwards"]
