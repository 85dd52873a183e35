"""The first step is judged by numbers that are set by hand, at, below and above each limit. No model trains."""

from contextlib import contextmanager, nullcontext
from math import inf, nan
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from support.by_hand import token_scores
from support.host_reads import HostReads
from support.scripted import ScriptedProbe
from torch.nn import functional

from trl_packfix import PackingLeakError
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.rank_share import RankShare
from trl_packfix.feature import PLAIN
from trl_packfix.group import Group
from trl_packfix.isolation.gradients import NUM_VECTORS
from trl_packfix.training import first_step as module
from trl_packfix.training import trainer_view
from trl_packfix.training.first_step import FirstStep, _StepGradients

HALF = 2.0**-6  # rounding as large as in half precision


def document_of(length, num_trained=None):
    """Return a document of so many tokens, of which the last ones are trained: all but the first, if not given."""
    tokens = np.arange(1, 1 + length)
    labels = tokens.copy()
    labels[: length - (length - 1 if num_trained is None else num_trained)] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients_of(loss=1.0, first=1.0, second=1.0):
    """Return a step with the gradients of two parameters, of which only the first product is not 0."""
    products = torch.zeros(2, NUM_VECTORS, dtype=torch.float64)
    products[:, 0] = torch.tensor([first, second])
    return _StepGradients(loss, products)


class ScriptedFirstStep(FirstStep):
    """A comparison whose steps are `packed()` and `unpacked()`, on one rank unless `num_ranks` says otherwise."""

    _compares_gradients = True

    def __init__(self, packed=gradients_of, unpacked=gradients_of, *, dtype=torch.float32, num_ranks=1, **attributes):
        self.packed = packed
        self.unpacked = unpacked
        accelerator = SimpleNamespace(
            num_processes=num_ranks,
            scaler=None,
            distributed_type=DistributedType.NO,
            reduce=lambda value, reduction: value * (num_ranks if reduction == "sum" else 1),
            gather=lambda value: value,
        )
        args = SimpleNamespace(
            gradient_checkpointing=False,
            gradient_checkpointing_kwargs=None,
            max_length=512,
            document_weighting="token",
            loss_type="nll",
            optim="adamw_torch",
            weight_column=None,
            torch_compile=False,
        )
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        model[0].bias.requires_grad = model[1].bias.requires_grad = False
        trainer = SimpleNamespace(
            accelerator=accelerator,
            args=args,
            model=model,
            model_wrapped=model,
            compute_loss_func=None,
            user_code=SimpleNamespace(methods=()),
            is_fsdp_enabled=False,
            aux_loss_enabled=False,
            label_smoother=None,
            get_tp_size=lambda: 1,
            compute_loss_context_manager=nullcontext,
        )
        ranks = SimpleNamespace(copies=1, may_share_packs=False)
        reading = SimpleNamespace(feature=PLAIN, is_text_only=True)
        source = SimpleNamespace(longest_document=inf)
        data = SimpleNamespace(attention_dtype=dtype, ranks=ranks, reading=reading, source=source)
        objective = SimpleNamespace(replaces_trl_loss=True, fused_head_is_exact=True, summed_by_ranks=False)
        super().__init__(trainer, data, objective, training_step=None)
        self._probe = ScriptedProbe(model=model)
        self._probe.device = torch.device("cpu")
        self._has_collectives = False
        self.longest_compared = 32
        vars(self).update(attributes)

    def _make_probe(self, model):
        return self._probe

    def _choose_packs(self):
        return [RankShare([document_of(20), document_of(32), document_of(7)]), RankShare([document_of(32)])]

    def _train_packed(self, packs):
        return self.packed()

    def _train_unpacked(self, packs):
        return self.unpacked()

    def _describe_difference(self, packs, packed, unpacked, *, limits):
        return f"limits {limits}"

    def _undisturbed(self):
        return nullcontext()


@pytest.fixture(autouse=True)
def any_model(monkeypatch):
    monkeypatch.setattr(trainer_view, "base_model", lambda model: model)


# The verdict


def test_equal_steps_have_no_problem():
    step = ScriptedFirstStep()
    comparison = step.compare()
    assert (comparison.loss_gap, comparison.gradient_gap, comparison.problem) == (0, 0, None)
    assert comparison.text == (
        "loss 1.0000 packed, 1.0000 unpacked, apart by 0e+00 (accepted 1e-04); gradients 0e+00 (accepted 1e-03) over 2 "
        "parameters"
    )
    assert step.longest_compared == 32
    assert step._probe.draws == []


@pytest.mark.parametrize(
    "packed, draws",
    [
        ({"loss": 1.0000999}, 0),
        ({"loss": 1.0001001}, 6),
        ({"loss": 0.9998}, 6),
        ({"loss": nan}, 6),
        ({"second": 1.000999}, 0),
        ({"second": 1.001001}, 6),
        ({"first": 1.1}, 6),
    ],
)
def test_a_loss_differs_above_a_ten_thousandth_and_a_gradient_above_a_thousandth(packed, draws):
    step = ScriptedFirstStep(lambda: gradients_of(**packed))
    comparison = step.compare()
    assert (comparison.problem is not None) == (draws > 0)
    assert len(step._probe.draws) == draws
    if draws:
        assert comparison.problem == "limits [0.0001, 0.001]"


def test_rounding_raises_the_limits_to_three_times_its_change():
    """Measure the change of a drawn rounding from the packed step, whose loss is 1.01, not from the unpacked one."""
    step = ScriptedFirstStep(lambda: gradients_of(1.01 + 0.004 * (step._probe.draw is not None)))
    comparison = step.compare()
    assert comparison.problem is None
    assert step._probe.draws == [0]
    assert step._probe.by_channel == {True}
    assert "apart by 1e-02 (rounding explains 1e-02); gradients 0e+00 (accepted 1e-03)" in comparison.text
    assert comparison.loss_gap == pytest.approx(0.01)
    step = ScriptedFirstStep(lambda: gradients_of(1.01 + 0.003 * (step._probe.draw is not None)))
    assert "limits [0.0089" in step.compare().problem
    step = ScriptedFirstStep(lambda: gradients_of(first=1.01 + 0.004 * (step._probe.draw is not None)))
    comparison = step.compare()
    assert comparison.problem is None
    assert "apart by 0e+00 (accepted 1e-04); gradients 1e-02 (rounding explains 1e-02)" in comparison.text


@pytest.mark.parametrize("gap, is_problem", [(HALF * 0.99, False), (HALF * 1.01, True)])
def test_gradients_in_half_precision_may_differ_by_one_rounding(gap, is_problem):
    step = ScriptedFirstStep(lambda: gradients_of(first=1 + gap, second=1 + gap), dtype=torch.bfloat16)
    step._probe.rounding = HALF
    comparison = step.compare()
    assert (comparison.problem is not None) is is_problem


@pytest.mark.parametrize(
    "dtype, sharded, gap, is_problem",
    [
        (torch.bfloat16, True, 2.0**-7 * 0.99, False),
        (torch.bfloat16, True, 2.0**-7 * 1.01, True),
        (torch.bfloat16, False, 2.0**-7 * 0.99, True),
        (torch.float32, True, 2e-4, True),
        (torch.float32, True, 0.9e-4, False),
    ],
)
def test_the_loss_of_sharded_models_in_half_precision_may_differ_by_an_epsilon(dtype, sharded, gap, is_problem):
    step = ScriptedFirstStep(lambda: gradients_of(1 + gap), dtype=dtype)
    step._trainer.is_fsdp_enabled = sharded
    assert (step.compare().problem is not None) is is_problem


def test_a_gap_that_is_gone_when_ties_are_broken_in_order_is_no_problem():
    losses = [1.01] + [1.01] * 6 + [1.0]  # a step, six roundings, and the step with ties in order
    step = ScriptedFirstStep(lambda: gradients_of(losses.pop(0)))
    comparison = step.compare()
    assert comparison.problem is None
    assert comparison.loss_gap == 0
    assert losses == []


def test_a_rank_that_finds_no_difference_says_that_another_has():
    step = ScriptedFirstStep(_describe_difference=lambda packs, packed, unpacked, limits: "")
    step._probe.is_beyond = lambda gaps, limits: True  # on another rank
    assert "another rank" in step.compare().problem


def test_a_step_without_gradients_is_compared_by_its_loss():
    step = ScriptedFirstStep(lambda: _StepGradients(1.01, None), lambda: _StepGradients(1.0, None))
    comparison = step.compare()
    assert comparison.problem is not None
    assert comparison.gradient_gap is None
    assert comparison.text.endswith("; gradients are held by the engine, not compared")


def test_documents_without_a_trained_token_are_not_compared():
    step = ScriptedFirstStep(packed=None)
    step._choose_packs = lambda: [RankShare([document_of(9, 0)]), RankShare([document_of(9, 3)])]
    assert step.compare().text == "not compared with unpacked training: no trained token in the first documents"
    assert step.longest_compared == 32
    step = ScriptedFirstStep()
    step._choose_packs = lambda: [RankShare([document_of(9, 0), document_of(8, 1)]), RankShare([document_of(9, 0)])]
    assert step.compare().problem is None
    assert step.longest_compared == 9


@pytest.mark.parametrize(
    "num_ranks, has_engine, waits", [(1, False, False), (1, True, False), (2, False, False), (2, True, True)]
)
def test_forward_passes_wait_for_other_ranks_of_an_engine(num_ranks, has_engine, waits):
    step = ScriptedFirstStep(num_ranks=num_ranks)
    step._probe.has_engine = has_engine
    models = []
    step._make_probe = lambda model: models.append(model) or step._probe
    step.compare()
    assert step._has_collectives is waits
    assert models == [step._trainer.model_wrapped]


def test_no_gradient_is_left_behind():
    """Gradients are None after the step: weight decay would change a parameter whose gradient is 0."""
    step = ScriptedFirstStep()
    parameter = next(step._trainer.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    step.compare()
    assert parameter.grad is None


@pytest.mark.parametrize("router, images", [(False, False), (True, False), (False, True), (True, True)])
def test_a_router_loss_with_images_is_not_compared(router, images):
    step = ScriptedFirstStep()
    step._trainer.aux_loss_enabled = router
    step._data.reading.is_text_only = not images
    assert ("the router loss is not compared with images" in step.compare().text) is (router and images)


def test_gaps_by_hand():
    step = ScriptedFirstStep()
    gaps = step._measure_gaps(gradients_of(2.0, first=3.0), gradients_of(1.6, first=4.0))
    assert gaps == pytest.approx((0.25, 0.25))
    assert step._measure_gaps(gradients_of(-2.0), gradients_of(-1.0)) == (1, 0)
    assert step._measure_gaps(gradients_of(1e-9), gradients_of(0.0))[0] > 1e100
    assert step._measure_gaps(gradients_of(0.0), gradients_of(0.0))[0] == 0
    assert step._measure_gaps(gradients_of(), _StepGradients(2.0, None)) == (0.5, 0.0)
    assert step._measure_gaps(_StepGradients(1.0, None), gradients_of(2.0)) == (0.5, 0.0)


@pytest.mark.parametrize(
    "dtype, share", [(torch.float32, 1e-3), (torch.float64, 1e-3), (torch.bfloat16, 3e-2), (torch.float16, 3e-2)]
)
def test_a_small_gradient_is_compared_with_a_share_of_the_whole(dtype, share):
    step = ScriptedFirstStep(dtype=dtype)
    gap = step._measure_gaps(gradients_of(second=2e-6), gradients_of(second=1e-6))[1]
    assert gap == pytest.approx(1e-6 / share)
    assert step._measure_gaps(gradients_of(second=0.08), gradients_of(second=0.04))[1] == pytest.approx(1)


# What is not compared


def step_with(path, value):
    """Return a step in which one attribute, given by its path, has another value."""
    step = ScriptedFirstStep()
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(step), name, value)
    return step


@pytest.mark.parametrize(
    "path, value, reason",
    [
        ("_trainer.compute_loss_func", len, "`compute_loss_func` gets"),
        ("_objective.replaces_trl_loss", False, "the loss is TRL's"),
        (
            "_trainer.user_code.methods",
            ("SimpleNamespace.compute_loss",),
            "the loss is that of SimpleNamespace.compute_loss",
        ),
    ],
)
def test_why_a_loss_is_not_compared(path, value, reason):
    text = step_with(path, value).compare().text
    assert text.startswith(f"not compared with unpacked training: {reason}")


@pytest.mark.parametrize(
    "path, value, compares",
    [
        ("_trainer.accelerator.distributed_type", DistributedType.NO, True),
        ("_trainer.accelerator.distributed_type", DistributedType.DEEPSPEED, False),
        ("_trainer.accelerator.distributed_type", DistributedType.MULTI_GPU, True),
        ("_objective.summed_by_ranks", True, False),
        ("_trainer.args.optim", "lomo", False),
        ("_trainer.args.optim", "adalomo", False),
        ("_trainer.get_tp_size", lambda: 2, False),
        ("_trainer.is_fsdp_enabled", True, False),
    ],
)
def test_where_gradients_are_compared(path, value, compares):
    step = step_with(path, value)
    step._unwrapped_model = step._trainer.model
    assert FirstStep._compares_gradients.func(step) is compares


def test_gradients_of_models_that_are_sharded_in_place_are_compared(monkeypatch):
    monkeypatch.setattr(module, "FSDPModule", torch.nn.Linear)
    step = step_with("_trainer.is_fsdp_enabled", True)
    step._unwrapped_model = step._trainer.model
    assert FirstStep._compares_gradients.func(step)


def test_nothing_of_the_run_is_changed_by_a_comparison(monkeypatch):
    monkeypatch.setattr(module, "TrainingTotals", lambda *args: args)
    noise = module.DocumentNoise.__new__(module.DocumentNoise)
    noise.alpha = 5.0
    step = ScriptedFirstStep()
    trainer = step._trainer
    trainer.aux_loss_enabled = True
    trainer.packed_model = SimpleNamespace(own_hooks=[noise, "another hook"], attending=nullcontext)
    totals = step._objective.totals = SimpleNamespace(device="device", sources="sources", shares_rows="shares")
    for packs_images, is_checkpointed in ((True, False), (False, False), (False, True)):
        step._data.reading.is_text_only = not packs_images
        trainer.args.gradient_checkpointing = is_checkpointed
        trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": True}
        with FirstStep._undisturbed(step):
            assert noise.alpha == 0
            assert step._objective.totals == ("device", "sources", "shares")
            assert trainer.aux_loss_enabled is (not packs_images and not is_checkpointed)
        assert noise.alpha == 5
        assert step._objective.totals is totals
        assert trainer.aux_loss_enabled


# The packed step


def train_packed(compares_gradients=True, is_wrapped=True):
    """Return the loss of two micro-batches of losses 2 and 4, and whether gradients were exchanged after each."""
    step = ScriptedFirstStep(_compares_gradients=compares_gradients)
    trainer = step._trainer
    trainer.device = "cpu"
    trainer.accelerator.device = "cpu"
    is_exchanged = []

    @contextmanager
    def no_sync(model):
        is_exchanged.append(False)
        yield
        is_exchanged.append("end")

    trainer.accelerator.no_sync = no_sync
    trainer.accelerator.reduce = lambda value, reduction: value if reduction == "mean" else None
    trainer._get_num_items_in_batch = lambda batches, device: [*map(str, batches)]
    trainer._prepare_inputs = lambda batch: batch
    trainer.current_gradient_accumulation_steps = 7

    def compute_loss(model, batch, num_items_in_batch):
        assert trainer.current_gradient_accumulation_steps == 2
        return torch.tensor(2.0 * len(batch["pack"]))

    trainer.compute_loss = compute_loss
    parameter = trainer.model[0].weight
    parameter.grad = torch.ones_like(parameter)

    def training_step(model, batch, num_items):
        assert parameter.grad is None
        assert num_items == ["{'pack': [1]}", "{'pack': [1, 2]}"]
        is_exchanged.append("step")
        return compute_loss(model, batch, num_items)

    step._training_step = training_step
    step._unwrapped_model = None if is_wrapped else step._probe.model
    step._data.training_collator = lambda names: lambda pack: {"pack": [*pack]}
    step._gradient_products = lambda is_reduced: is_reduced
    gradients = FirstStep._train_packed(step, [RankShare([1]), RankShare([1, 2])])
    assert trainer.current_gradient_accumulation_steps == 7
    assert gradients.products is True, "the trainer's methods have added the gradients of ranks"
    return gradients.loss, is_exchanged


def test_packs_are_trained_as_the_micro_batches_of_a_step():
    assert train_packed() == (6, [False, "step", "end", "step"])
    assert train_packed(is_wrapped=False) == (6, ["step", "step"])
    assert train_packed(compares_gradients=False) == (6, [])


# The unpacked step


def train_unpacked(packs, member=0, router_losses=None, **attributes):
    """Return the factor by which the row losses of each document count, and the loss, with a row loss of 1 each."""
    step = ScriptedFirstStep(**attributes)
    shares = [RankShare(pack, Group(2, member)) for pack in packs]
    factors = {}
    if router_losses is not None:
        step._trainer.aux_loss_enabled = True
        step._trainer.router_aux_loss_coef = 0.5
        step._router_loss = lambda pack: torch.tensor(router_losses.pop(0))
    batches = []

    def row_losses(documents):
        rows = torch.ones(len(documents), dtype=torch.float64, requires_grad=True)
        batches.append((documents, rows))
        return rows

    step._row_losses = row_losses
    step._run_backward = lambda loss: (loss.backward() if loss.requires_grad else None) or float(loss.detach())
    step._gradient_products = lambda is_reduced: is_reduced
    gradients = FirstStep._train_unpacked(step, shares)
    assert gradients.products is False, "the gradients of ranks have to be added"
    assert step._probe.longest_alone == [max(len(document["input_ids"]) for document in packs[0])]
    for documents, rows in batches:
        factors |= {id(document): float(grad) for document, grad in zip(documents, rows.grad, strict=True)}
    return [factors[id(document)] for document in packs[0]], gradients.loss, [len(rows) for _, rows in batches]


def test_unpacked_documents_count_by_their_trained_tokens():
    first = document_of(9, 2)
    second = document_of(9, 3)
    third = document_of(5, 1)
    factors, loss, batches = train_unpacked([[first, second, third], [second]])
    assert factors == pytest.approx([1 / 9, 2 / 9, 1 / 9])
    assert loss == pytest.approx(4 / 9)
    assert batches == [2, 1], "documents of equal length are rows of one batch"


def test_unpacked_documents_count_by_their_weights():
    documents = [
        document_of(9, 2) | {module.WEIGHTS: 0.5},
        document_of(8, 3) | {module.WEIGHTS: 2.0},
        document_of(5, 1),
    ]
    factors, _, _ = train_unpacked([documents, documents[:1]])
    assert factors == pytest.approx([1 / 9, 2 / 9, 1 / 9])  # 0.5 * 2 * 2 + 2 * 3 + 1 = 9


@pytest.mark.parametrize("num_trained, divisor", [(2, 4), (1, 4), (0, 2)])
def test_unpacked_documents_count_once_each_with_document_weighting(num_trained, divisor):
    first = document_of(9, num_trained)
    second = document_of(8, 4)
    step = ScriptedFirstStep()
    step._trainer.args.document_weighting = "document"
    factors, _, _ = train_unpacked([[first, second], [first, second]], _trainer=step._trainer)
    assert factors == pytest.approx([2 / max(num_trained, 1) / divisor, 2 / 4 / divisor])


def test_only_one_of_the_ranks_that_share_a_pack_counts_its_documents():
    documents = [document_of(9, 2), document_of(8, 4)]
    factors, loss, _ = train_unpacked([documents], member=1, _sum_over_ranks=lambda value: 6.0 if value == 0 else -1.0)
    assert factors == [0, 0]
    assert loss == 6.0, "the sum over ranks"
    for copies, factor in ((1, 1 / 12), (2, 1 / 6)):  # two copies count the same documents
        data = step_with("_data.ranks.copies", copies)._data
        factors, loss, _ = train_unpacked([documents], _data=data, _sum_over_ranks=lambda value: 2 * value)
        assert factors == pytest.approx([factor] * 2)
        assert loss == pytest.approx(2 / 6)


@pytest.mark.parametrize("has_collectives, packs_images", [(True, False), (False, True)])
def test_documents_run_one_by_one_where_ranks_wait_or_images_may_be(has_collectives, packs_images):
    data = step_with("_data.reading.is_text_only", not packs_images)._data
    documents = [document_of(9), document_of(9), document_of(5)]
    assert train_unpacked([documents], _data=data, _has_collectives=has_collectives)[2] == [1, 1, 1]


def test_the_router_loss_is_a_mean_over_packs():
    documents = [document_of(9, 1)]
    data_of_copies = step_with("_data.ranks.copies", 2)._data  # two ranks have the same packs
    for attributes, expected in (
        ({}, 1 + 0.5 * (2 + 4) / 2),
        ({"_data": data_of_copies, "_sum_over_ranks": lambda value: 2 * value}, 1 + 0.5 * (2 + 4) / 2),
        ({"member": 1, "_sum_over_ranks": lambda value: value + 1}, 1.0),  # another rank counts these packs
    ):
        _, loss, _ = train_unpacked([documents, documents], router_losses=[2.0, 4.0], **attributes)
        assert loss == pytest.approx(expected)


def test_the_router_loss_is_that_of_padded_rows():
    step = ScriptedFirstStep()
    rows = []
    step._unwrapped_model = lambda **batch: rows.append(batch) or SimpleNamespace(aux_loss="loss")
    assert step._router_loss([document_of(2), document_of(4)]) == "loss"
    (batch,) = rows
    assert batch.pop("input_ids").tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert batch.pop("attention_mask").tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch == {"output_router_logits": True, "use_cache": False}


# The loss of a row


DOCUMENTS = [document_of(9, 3), document_of(9), document_of(9, 0)]
DOCUMENTS[1]["labels"][3] = 0


def row_losses(documents, loss_type, smoothing, fused_head_is_exact):
    """Return the model's own logits of rows with two tokens of padding, the labels behind them, and the losses.

    The fused head has halves of these logits.
    """
    step = ScriptedFirstStep()
    step._trainer.args.loss_type = loss_type
    step._objective.fused_head_is_exact = fused_head_is_exact
    if smoothing:
        step._trainer.label_smoother = SimpleNamespace(epsilon=smoothing)
    tokens, labels = (torch.from_numpy(np.stack([row[name] for row in documents])) for name in ("input_ids", "labels"))
    num_rows, num_tokens = tokens.shape
    logits = torch.randn(num_rows, num_tokens + 2, 40, generator=torch.Generator().manual_seed(0))

    def run_model(input_ids, labels=None, fused_lm_head=False):
        assert torch.equal(input_ids, functional.pad(tokens, (0, 2)))
        if not fused_lm_head:
            return SimpleNamespace(logits=logits)
        log_probs, _, _ = token_scores(logits / 2, labels)
        return SimpleNamespace(log_probs=log_probs)

    step._unwrapped_model = run_model
    step._probe.make_unpacked_batch = lambda row: {
        "input_ids": functional.pad(row.reshape(num_rows, num_tokens), (0, 2))
    }
    return logits[:, : num_tokens - 1], labels[:, 1:], step._row_losses(documents)


@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS[:1]], ids=len)
@pytest.mark.parametrize("loss_type, smoothing", [("nll", 0.0), ("nll", 0.1), ("dft", 0.0)])
@pytest.mark.parametrize("fused_head_is_exact", [True, False])
def test_a_row_has_the_loss_of_its_trained_tokens(documents, loss_type, smoothing, fused_head_is_exact):
    """The head that computes the loss of a pack computes it, too: with smoothed labels always the model's own."""
    logits, labels, losses = row_losses(documents, loss_type, smoothing, fused_head_is_exact)
    if not fused_head_is_exact and not smoothing:
        logits = logits / 2
    token_losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    )
    if loss_type == "dft":
        token_losses = token_losses * (-token_losses).exp()
    assert losses.tolist() == pytest.approx(token_losses.view(labels.shape).sum(1).tolist())


def test_a_document_with_images_runs_with_its_images_and_without_its_weight():
    step = ScriptedFirstStep()
    rows = []
    step._probe.make_unpacked_batch = lambda document: rows.append(document) or {}
    step._unwrapped_model = lambda **row: SimpleNamespace(logits=torch.zeros(1, 5, 40))
    document = document_of(5) | {module.WEIGHTS: 2.0, "pixel_values": "pixels"}
    assert step._row_losses([document]).tolist() == pytest.approx([4 * np.log(40)])
    assert rows == [{name: value for name, value in document.items() if name != module.WEIGHTS}]


# Longer documents


def batch_of(*lengths):
    return PackedDataCollator()([document_of(length) for length in lengths])


def compare_longer(step, *batches):
    """Compare, and return the lengths of the documents that ran alone."""
    lengths = []
    run_alone = step._probe.alone
    step._probe.alone = lambda ids: lengths.append(len(ids)) or run_alone(ids)
    step.compare_longer([*batches])
    return lengths


@pytest.mark.parametrize("longest_document, compared_lengths", [(63, []), (64, [64])])
def test_no_batch_is_read_if_no_document_of_the_set_is_long_enough(longest_document, compared_lengths):
    """With constant shapes `max_length_q` is `max_length` in every batch, so each would be read, in every step."""
    step = ScriptedFirstStep()
    step._data.source.longest_document = longest_document
    batch = batch_of(40, 64) | {"max_length_q": 512}
    with HostReads() as reads:
        assert compare_longer(step, batch) == compared_lengths
    assert ("training/step_comparison.py:longest_of" in reads.places) == bool(compared_lengths)


@pytest.mark.parametrize(
    "lengths, longest, max_length, compared_lengths",
    [
        ((40, 63), 32, 512, []),
        ((40, 64), 32, 512, [64]),
        ((64, 40), 32, None, [64]),
        ((64, 40), 32, 64, [64]),
        ((64, 40), 32, 63, []),
        ((64, 40), inf, 512, []),
        ((64, 40), 33, 512, []),
    ],
)
def test_a_document_is_compared_from_twice_the_longest_on(lengths, longest, max_length, compared_lengths):
    step = ScriptedFirstStep(longest_compared=longest)
    step._trainer.args.max_length = max_length
    assert compare_longer(step, batch_of(*lengths)) == compared_lengths
    assert step.longest_compared == (64 if compared_lengths else longest)
    if compared_lengths:
        assert step._probe.packs == [[8, 64]]


def test_the_longest_document_of_all_micro_batches_is_compared():
    step = ScriptedFirstStep()
    assert compare_longer(step, batch_of(30, 70), batch_of(90, 40), batch_of(80)) == [90]
    assert compare_longer(step, batch_of(179), batch_of(8)) == []
    assert compare_longer(step, batch_of(8), batch_of(180), batch_of(9)) == [180]
    assert step.longest_compared == 180


def test_padding_to_a_constant_length_is_not_compared():
    step = ScriptedFirstStep()
    batch = batch_of(40, 30)
    batch["max_length_q"] = 512
    assert compare_longer(step, batch) == []
    assert step.longest_compared == 32


def test_ranks_that_wait_for_each_other_compare_together():
    for batches, lengths in (([batch_of(40)], [40]), ([], [2])):  # a rank without a document runs a short one
        # another rank has a document of 70 tokens
        step = ScriptedFirstStep(_has_collectives=True, _max_over_ranks=lambda value: max(value, 70))
        assert compare_longer(step, *batches) == lengths
        assert step.longest_compared == 70


@pytest.mark.parametrize("gap, draws", [(0.99e-4, 0), (1.01e-4, 6)])
def test_states_of_a_long_document_differ_above_a_ten_thousandth(gap, draws):
    """States of a token are (1, value), so a value of d is a distance of d times the square root of 2."""
    step = ScriptedFirstStep()
    step._probe.packed = lambda pack, i: gap / 2**0.5
    if draws:
        with pytest.raises(
            PackingLeakError, match=r"A document of 64 tokens .* differ by 1\.0e-04 \(rounding .* 1\.0e-04\)"
        ):
            compare_longer(step, batch_of(64))
    else:
        compare_longer(step, batch_of(64))
    assert len(step._probe.draws) == draws
    assert step.longest_compared == (32 if draws else 64)


def test_rounding_may_explain_a_difference_of_states():
    step = ScriptedFirstStep()
    step._probe.packed = lambda pack, i: 0.01 + 0.004 * (step._probe.draw is not None)
    compare_longer(step, batch_of(64))
    assert step._probe.draws == [0]
    assert step.longest_compared == 64


def test_states_that_agree_when_ties_are_broken_in_order_are_equal():
    step = ScriptedFirstStep()
    step._probe.packed = lambda pack, i: 0.01 * (len(step._probe.packs) < 8)  # one run, six roundings, and the last
    compare_longer(step, batch_of(64))
    assert step.longest_compared == 64


def test_a_document_that_does_not_fit_ends_comparisons():
    def states_alone(ids):
        raise torch.OutOfMemoryError("no memory")

    step = ScriptedFirstStep()
    step._probe.alone = states_alone
    step.compare_longer([batch_of(64)])
    assert step.longest_compared == inf


# Gradients and ranks


@pytest.mark.parametrize(
    "num_ranks, copies, sharded, is_reduced, factor",
    [
        (1, 1, False, False, 1),
        (2, 1, False, True, 1),
        (2, 1, False, False, 2),
        (2, 2, False, False, 1),
        (4, 2, True, False, 2),
    ],
)
@pytest.mark.parametrize("scale", [None, 8.0])
def test_gradients_of_ranks_are_added_where_the_trainer_has_not(num_ranks, copies, sharded, is_reduced, factor, scale):
    step = ScriptedFirstStep(num_ranks=num_ranks)
    parameter = torch.nn.Parameter(torch.ones(3))
    step._parameters = [parameter]
    step._trainer.is_fsdp_enabled = sharded
    step._data.ranks.copies = copies
    if scale is not None:
        step._trainer.accelerator.scaler = SimpleNamespace(get_scale=lambda: scale)
    assert step._run_backward(parameter.sum()) == 3
    products = step._gradient_products(is_reduced=is_reduced)
    parameter.grad = torch.ones(3)  # without the scale of the loss
    assert torch.allclose(products, module.gradient_products([parameter]) * factor)


def test_without_gradients_nothing_runs_backward():
    step = ScriptedFirstStep(_compares_gradients=False)
    parameter = torch.nn.Parameter(torch.ones(3))
    assert step._run_backward(parameter.sum()) == 3
    assert parameter.grad is None
    assert step._gradient_products(is_reduced=False) is None


def test_the_largest_value_of_all_ranks_counts():
    step = ScriptedFirstStep()
    step._trainer.accelerator.gather = lambda value: torch.cat([value + 1, value, value - 1])
    assert step._max_over_ranks(7) == 8


# What differs


def describe(packed, unpacked, limits=(0.25, 0.25)):
    step = ScriptedFirstStep()
    step._parameter_names = ["first", "second"]
    return FirstStep._describe_difference(step, [RankShare([])], packed, unpacked, limits=[*limits])


def test_what_differs_is_named():
    right = gradients_of()
    assert describe(gradients_of(1.25), right) == ""
    assert describe(gradients_of(1.5), right) == "the loss is 1.5 packed and 1 unpacked"
    assert describe(gradients_of(first=1.25, second=1.25), right) == ""
    assert describe(gradients_of(second=1.5), right) == "gradients of 1 parameters differ, of `second` by 5.0e-01"
    text = describe(gradients_of(first=2.0, second=1.5), right)
    assert text.startswith("gradients of 2 parameters differ, of `first` by 1")
    assert describe(_StepGradients(1.0, None), right) == ""
    assert describe(right, _StepGradients(1.0, None)) == ""
    assert describe(gradients_of(1.5, second=1.5), right, (0.25, 0.6)) == "the loss is 1.5 packed and 1 unpacked"
    assert describe(gradients_of(1.5, second=1.5), right, (0.6, 0.25)).startswith("gradients of 1 parameters")


def test_the_document_that_differs_is_named():
    """Train each document of the first pack alone in it, with the labels of the other documents masked."""
    step = ScriptedFirstStep()
    step._parameter_names = ["first", "second"]
    documents = [document_of(5, 2), document_of(6, 3)]

    def train_packed(packs):
        (pack,) = packs
        assert [len(document["input_ids"]) for document in pack] == [5, 6]
        (trained,) = [document for document in pack if module.count_trained(document)]
        return gradients_of(1.5, first=2.0, second=2.0) if trained is documents[1] else gradients_of()

    def train_unpacked(packs):
        ((document,),) = packs
        assert any(document is one for one in documents)
        return gradients_of()

    step._train_packed = train_packed
    step._train_unpacked = train_unpacked
    packs = [RankShare(documents), RankShare([document_of(9)])]
    description = FirstStep._describe_difference(step, packs, gradients_of(), gradients_of(), limits=[0.25, 0.25])
    assert description == (
        "document 1 of 2 (3 trained tokens) has the loss 1.5 in the pack, 1 alone, and gradients that differ by 1.0e+00"
    )


# The packs


@pytest.mark.parametrize("degree, second", [(1, [9]), (2, [5, 9])])
def test_the_second_pack_has_the_longest_document_or_all_but_the_first(monkeypatch, degree, second):
    documents = [*map(document_of, (7, 5, 9)), document_of(6, 0), document_of(8) | {module.WEIGHTS: 0.0}]
    monkeypatch.setattr(module, "choose_documents", lambda documents_found: documents_found)
    step = ScriptedFirstStep()
    step._data.source = SimpleNamespace(first_documents=lambda num_documents: (documents, Group(degree, degree - 1)))
    packs = FirstStep._choose_packs(step)
    assert [[len(document["input_ids"]) for document in pack] for pack in packs] == [[7, 5, 9], second]
    assert [pack.group for pack in packs] == [Group(degree, degree - 1)] * 2


@pytest.mark.parametrize("waits, num_chosen", [(False, 3), (True, 1)])
def test_documents_are_chosen_for_all_ranks_only_where_ranks_wait(monkeypatch, waits, num_chosen):
    documents = [document_of(7), document_of(5), document_of(9)]
    monkeypatch.setattr(module, "choose_documents", lambda documents_found: documents_found)
    step = ScriptedFirstStep(_has_collectives=waits)
    step._data.source = SimpleNamespace(first_documents=lambda num_documents: (documents, Group(1, 0)))
    step._data.reading.select_alike_on_ranks = lambda documents_found, sum_over_ranks: documents_found[:1]
    assert len(FirstStep._choose_packs(step)[0]) == num_chosen
