"""Reads of tensors on the host in a training, each of which waits for a GPU, by the place in the code that reads.

Counted are `.item()`, `bool()`, `int()` and `float()` of a tensor, `.tolist()`, `.numpy()`, `.cpu()`, selections by a
mask, and operators whose result has a size that depends on values. On a CPU all tensors count, also those that would
not be on a GPU.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

ATEN = torch.ops.aten
READING = {
    ATEN._local_scalar_dense.default,
    ATEN.equal.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN._unique2.default,
    ATEN.unique_dim.default,
    ATEN.unique_consecutive.default,
}
METHODS = ("tolist", "numpy", "cpu")  # on the CPU no operator runs
STAND_INS = {"strict_varlen.py", "strict.py"}  # for the kernels of a GPU: they read, kernels do not


class HostReads(TorchDispatchMode):
    """`places`: how often each place, as "package/module.py:function", read a tensor."""

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is ATEN.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
        repeats = func is ATEN.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if func in READING or by_mask or repeats:
            self._count()
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._methods = {name: getattr(torch.Tensor, name) for name in METHODS}
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, self._counted(method))
        return super().__enter__()

    def __exit__(self, *error):
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*error)

    def _counted(self, method):
        def counted(tensor, *args, **kwargs):
            self._count()
            return method(tensor, *args, **kwargs)

        return counted

    def _count(self):
        frame = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.name not in STAND_INS:
            self.places[f"{'/'.join(path.parts[-2:])}:{frame.f_code.co_name}"] += 1


class ReadsOfSteps(TrainerCallback):
    """Counts the reads of the third to the sixth step of a training, with all that is between them."""

    first = 2
    last = 6

    def __init__(self):
        self.counter = HostReads()
        self.micro_batches = 0
        self.switch = lambda is_on: None  # called when counting begins and when it ends

    def on_substep_end(self, args, state, control, **kwargs):
        self.micro_batches += self.first <= state.global_step < self.last

    def on_step_end(self, args, state, control, **kwargs):
        self.micro_batches += self.first < state.global_step <= self.last
        if state.global_step == self.first:
            self.counter.__enter__()
            self.switch(True)
        elif state.global_step == self.last:
            self.switch(False)
            self.counter.__exit__(None, None, None)

    @property
    def per_micro_batch(self):
        """Return the reads by place."""
        return {place: number / self.micro_batches for place, number in self.counter.places.items()}
