"""NEFTune: on a document of L tokens uniform noise of amplitude alpha / sqrt(L d), however it reaches the model."""

import pytest
import torch
from support import vision
from support.examples import leaking_example
from support.features import needs
from support.models import build_tiny_model
from support.runs import build_trainer, texts
from test_objective import OwnLoss, first_step
from transformers.integrations.neftune import activate_neftune

from trl_packfix import PackedDataCollator
from trl_packfix.data.rank_share import cut_part
from trl_packfix.group import Group
from trl_packfix.training.noise import DocumentNoise

pytestmark = pytest.mark.slow

ALPHA = 5.0
LEAKING = "leaking_example()"  # evaluated in the test: it builds models
WITH_IMAGES = vision.ROWS.filter(lambda row: row["images"])
CASES = {
    "packs": {},
    "a loss of a subclass": {"trainer_class": OwnLoss},
    "constant shapes": {"pad_documents_to_multiple_of": 16},
    "rows": {"model": LEAKING, "on_leak": "unpack"},  # longest first, in several calls
    "rows of constant shapes": {"model": LEAKING, "on_leak": "unpack", "pad_documents_to_multiple_of": 16},
    "images": {"family": "llava"},
    "rows with images": {"family": "gemma4", "dataset": WITH_IMAGES, "on_leak": "unpack"},
}


def check_amplitude(noise: torch.Tensor, length: int) -> None:
    """Check the amplitude of values (..., d) that were added to a document.

    The root mean square of n values is known to 0.447/sqrt(n).
    """
    amplitude = ALPHA / (length * noise.shape[-1]) ** 0.5
    amplitude_ratio = noise.square().mean().sqrt() * 3**0.5 / amplitude
    assert amplitude_ratio == pytest.approx(1, abs=5 * 0.447 / noise.numel() ** 0.5)
    assert noise.abs().max() <= amplitude * 1.001


def test_alone_a_document_has_it_by_transformers():
    model = build_tiny_model().train()
    tokens = torch.arange(5, 35)[None]
    clean = model.get_input_embeddings()(tokens)
    activate_neftune(model, ALPHA)
    noise = torch.stack([model.get_input_embeddings()(tokens) - clean for _ in range(60)])
    check_amplitude(noise.detach(), 30)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs("images") if "family" in CASES[name] else ()) for name in CASES]
)
def test_a_document_has_the_noise_that_it_has_alone(name, tmp_path):
    settings = {"neftune_noise_alpha": ALPHA, "per_device_train_batch_size": 6} | CASES[name]
    if settings.get("model") == LEAKING:
        settings["model"] = leaking_example().model_type
    trainer = (
        vision.make(tmp_path, **settings) if "family" in settings else build_trainer(tmp_path, texts(12), **settings)
    )
    (batch,), num_items = first_step(trainer)
    trainer.packed_model.prove(trainer.model)
    assert trainer.packed_model.is_unpacked is ("on_leak" in settings)
    trainer.model.train()
    lengths = [n for n in batch["cu_seq_lens_q"].diff().tolist() if n]
    documents = batch["input_ids"][0, : sum(lengths)].split(lengths)
    assert len(set(lengths)) > 3
    assert lengths != sorted(lengths, reverse=True)
    noise_of_document = {place: [] for place in range(len(lengths))}

    def note(module, args, output):  # behind the noise, which a hook adds, too
        (ids,) = args
        noise = output - module.forward(*args)
        if ids.shape == batch["input_ids"].shape:
            rows = enumerate(noise[0, : sum(lengths)].split(lengths))
        elif len(ids) == len(lengths):
            rows = enumerate(noise)
        else:
            rows = ((place_of(row), values) for row, values in zip(ids, noise, strict=True))
        for place, values in rows:
            noise_of_document[place].append(values[: lengths[place]])

    def place_of(row):
        """Return the place of the longest document that a row begins with."""
        alike = [i for i, tokens in enumerate(documents) if torch.equal(row[: len(tokens)], tokens)]
        return max(alike, key=lambda i: lengths[i])

    trainer.model.get_input_embeddings().register_forward_hook(note)
    with torch.no_grad():
        for _ in range(20):
            trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=num_items)
    for place, noise in noise_of_document.items():
        assert len(noise) == 20
        check_amplitude(torch.stack(noise), lengths[place])


def test_a_forward_inside_another_leaves_the_rows_of_the_other_as_they_are():
    """An unpacked model embeds its longest document, then a hook runs the model again, then the others are embedded."""
    model = build_tiny_model().train()
    noise = DocumentNoise(model, ALPHA)
    batch = PackedDataCollator()([{"input_ids": [5] * length} for length in (4, 100)])
    noise._push_documents(model, (), batch)
    noise._add_noise(model, (), torch.zeros(1, 100, 32))
    noise._push_documents(model, (), batch)
    noise._pop_documents(model, (), None)
    check_amplitude(noise._add_noise(model, (), torch.zeros(1, 4, 32)), 4)


@pytest.mark.parametrize("has_images", [False, True])
def test_parts_of_a_pack_have_the_amplitude_of_documents_and_noise_of_their_own(has_images):
    """Ranks of a group have one seed: without their own generators, equal places would get equal noise.

    With images each rank embeds the whole pack, and its decoder gets the rows of its part.
    """
    draws = 300
    degree = 2
    size = 32
    model = build_tiny_model("llama").train()
    pack = PackedDataCollator(pad_to_multiple_of=degree)([{"input_ids": [5] * n} for n in (30, 3, 9)])
    noise = DocumentNoise(model, ALPHA)
    outputs = []
    for index in range(degree):
        batch = cut_part(pack, Group(degree, index), labels_only=has_images)
        own_rows = slice(index * 21, (index + 1) * 21) if has_images else slice(None)
        torch.manual_seed(0)
        for _ in range(draws):
            noise._push_documents(model, (), batch)
            output = torch.zeros(1, batch["input_ids"].shape[1], size)
            outputs.append(noise._add_noise(model, (), output)[:, own_rows])
            noise._pop_documents(model, (), None)
    noise_of_ranks = torch.stack(outputs).view(degree, draws, -1, size)
    after = torch.randint(2**62, ())  # the shared random state moves on alike on all ranks
    torch.manual_seed(0)
    assert [int(torch.randint(2**62, ())) for _ in range(draws + 1)][-1] == int(after)
    flat = noise_of_ranks.flatten(1)
    assert abs(torch.corrcoef(flat)[0, 1]) < 5 / flat.shape[1] ** 0.5
    tokens = torch.cat([*noise_of_ranks], dim=1)
    for document, length in enumerate((30, 3, 9)):
        check_amplitude(tokens[:, pack["seq_idx"][0] == document], length)


def test_noise_is_on_in_training_only(tmp_path):
    losses = []
    for alpha in (None, 500.0):
        trainer = build_trainer(tmp_path, texts(), neftune_noise_alpha=alpha, max_steps=1)
        losses.append((trainer.evaluate(texts())["eval_loss"], trainer.train().training_loss))
        assert not trainer.model.get_input_embeddings()._forward_hooks
    (evaluated, trained), (evaluated_with_noise, trained_with_noise) = losses
    assert evaluated_with_noise == evaluated
    assert abs(trained_with_noise - trained) > 1e-3
