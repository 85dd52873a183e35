"""A probe whose states are set by hand, so that what is judged by their gaps is tested without a model."""

from contextlib import contextmanager, nullcontext

import torch

from trl_packfix.group import Group
from trl_packfix.isolation.probe import Probe

ROUNDING = 2.0**-20  # as large as in fp32, and without an error in sums and products


class ScriptedProbe(Probe):
    """A probe without a model. The states of a token are its `size`, and what `packed` or `alone` returns.

    Attributes:
        first_pack: the first pack that ran.
        packs: the lengths of the documents of each pack that ran, in order.
        longest_alone: the length up to which each of the runs alone may be, in order.
        draw: the rounding under which the model runs; None without one.
        by_channel: the values of the argument `by_channel` of these roundings.
        draws: each rounding under which the model ran, in order.
    """

    rounding = ROUNDING

    def __init__(self, packed=lambda pack, i: 0.0, alone=lambda document: 0.0, **attributes):
        self.packed = packed
        self.alone = alone
        self.size = 1.0
        self.inner = torch.nn.Identity()
        self.config = "config"
        self.attention = "sdpa"
        self.dtype = torch.float32
        self.degree = 1
        self.has_engine = self.reads_ahead = False
        self.takes_gradient = True
        self.gradient = lambda documents: 0.0
        self.first_pack = self.draw = None
        self.drawing_modules = []
        self.packs = []
        self.longest_alone = []
        self.draws = []
        self.by_channel = set()
        self._words = torch.arange(1, 50)
        self._generator = torch.Generator().manual_seed(0)
        vars(self).update(attributes)
        self.group = Group(self.degree)

    def _make_states(self, document, value):
        second = torch.as_tensor(value, dtype=torch.float64).expand(len(document))
        return torch.stack([torch.full_like(second, self.size), second], dim=1)

    def forward_packed(self, documents, gradient=False):
        self.first_pack = self.first_pack or documents
        self.packs.append([*map(len, documents)])
        return [self._make_states(document, self.packed(documents, i)) for i, document in enumerate(documents)]

    def forward_alone(self, ids):
        return self._make_states(ids, self.alone(ids))

    def run_without_draws(self, run_model):
        return run_model()

    def undisturbed(self):
        return nullcontext()

    def unpacked(self, length):
        self.longest_alone.append(length)
        return nullcontext()

    @contextmanager
    def rounded_otherwise(self, draw, *, by_channel=False):
        self.draw = draw
        self.draws.append(draw)
        self.by_channel.add(by_channel)
        yield
        self.draw = None
