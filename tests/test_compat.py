"""Changes of other libraries' objects are undone, with several users at a time, and after errors."""

import logging
import threading
from contextlib import contextmanager

import pytest
import torch
from support.runs import build_trainer, texts
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from trl_packfix import compat


class Switch:
    """Something of the whole process that is on or off."""

    is_on = False

    @contextmanager
    def change(self):
        assert not self.is_on
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


def test_a_process_wide_change_lasts_until_its_last_user_ends():
    switch = Switch()
    change = compat.ProcessWideChange(switch.change)
    change.__enter__()
    second_has_begun = threading.Event()
    second_may_end = threading.Event()
    states = []

    def second():
        with change:
            second_has_begun.set()
            assert second_may_end.wait(60)
            states.append(switch.is_on)

    thread = threading.Thread(target=second)
    thread.start()
    assert second_has_begun.wait(60)
    change.__exit__()  # the first user ends before the second
    second_may_end.set()
    thread.join()
    assert states == [True]
    assert not switch.is_on


def test_a_process_wide_change_is_undone_after_an_error():
    switch = Switch()
    change = compat.ProcessWideChange(switch.change)
    with pytest.raises(ZeroDivisionError), change:
        1 / 0  # noqa: B018
    assert not switch.is_on


def test_the_construction_of_a_trainer_leaves_trls_operators_as_they_were(tmp_path):
    name = "trl.models.selective_activation_checkpointing"
    selective = pytest.importorskip(name, reason="earlier releases of TRL")
    before = selective._ATEN_ATTENTION_PACKET_NAMES
    with compat.saves_varlen_attention:
        inside = selective._ATEN_ATTENTION_PACKET_NAMES
    build_trainer(tmp_path, texts(3))
    after = selective._ATEN_ATTENTION_PACKET_NAMES
    assert inside == (*before, compat.VARLEN_KERNEL)
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
