"""A function's torch calls, recorded once and made again in one call (csrc/program_ops.cpp).

    program = Program(inputs, function)     function() calls operations on `inputs` and on tensors that stay as they are
    program.run(others)                     the same calls with others in the place of inputs

For functions that decide by nothing but what Python knows beforehand, and whose operations write into their arguments:
while recording nothing is computed. Besides the time of some hundred calls this saves as many hand-overs of the
interpreter's lock, which cost most when another thread is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.cpp_linear import load_operations


class Program:
    """See the module's text."""

    def __init__(self, inputs: Sequence[torch.Tensor], function: Callable[[], object]) -> None:
        """Raises build.NoKernels; ValueError if an operation makes a new tensor."""
        load_operations()
        self._program = torch.classes.tandem.Program()
        with torch.inference_mode(), _Recording(self._program, inputs):
            function()

    def run(self, inputs: list[torch.Tensor]) -> None:
        """As many inputs as were recorded with, in their order; of any shape."""
        self._program.run(inputs)

    def decode_steps(self, block_size: int) -> Any:
        """What runs this program from a few numbers per row: csrc/decode_steps.h."""
        return torch.classes.tandem.DecodeSteps(self._program, block_size)


class _Recording(TorchDispatchMode):
    """Writes down every operation instead of running it."""

    def __init__(self, program: Any, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._program = program
        self._numbers = {id(tensor): number for number, tensor in enumerate(inputs)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to keep it out of here: a hundred megabytes and a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
        values = tuple(given.get(argument.name, argument.default_value) for argument in schema.arguments)
        written = [
            value
            for argument, value in zip(schema.arguments, values, strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written:
            raise ValueError(f"{schema.name} writes into none of its arguments, so it can't be part of a program")
        places = [place for place, value in enumerate(values) if id(value) in self._numbers]
        numbers = [self._numbers[id(values[place])] for place in places]
        self._program.add(schema.name, schema.overload_name, values, places, numbers)
        return written[0] if schema.returns else None
