"""What the examples for engines share."""

import torch

from dsv4_compile.errors import CaptureError


def register_into(examples):
    """A decorator that files a function under its name."""

    def register(function):
        examples[function.__name__] = function
        return function

    return register


def tensor(engine, *values):
    return torch.tensor(values, dtype=torch.float32, device=device_of(engine))


def device_of(engine):
    return torch.device("cuda" if engine.name == "cuda" else "cpu")


def capture(engine, run, pool=None):
    return engine.capture(run, pool or engine.make_pool(), name="the example")


def refusal_of(call):
    """The message of the CaptureError that a call raises; AssertionError if it raises none."""
    try:
        call()
    except CaptureError as error:
        return str(error)
    raise AssertionError("no CaptureError was raised")


def random_state(engine):
    return torch.cuda.get_rng_state() if engine.name == "cuda" else torch.get_rng_state()
