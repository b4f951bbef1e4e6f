"""The catalogue of failures to survive: public bug reports restated as numbered scenarios, and where each is tested.

`test_cases_<kind>.py` names every test after its case: `test_b08_view_mutated_after_split` is a variant of B08.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CASES = {
    "B01": "a tuple or list of a split op crosses the boundary as a container",
    "B02": "a split op returns a fresh tensor, the next piece reads the captured address",
    "B03": "the wrong symbol is taken for the number of tokens",
    "B04": "host scalars are frozen at capture",
    "B06": "a graph input is mutated, the mutation lands in the static copy",
    "B08": "a view made before the split is mutated after it",
    "B11": "the output of one call is overwritten by the next",
    "B13": "a torch.Size crosses the boundary",
    "B14": "work that depends on step metadata is captured",
    "B16": "a padded slot of -1 is written as the last slot",
    "B17": "padded rows leak into real ones through an operation across tokens",
    "B19": "a dummy run for a capture poisons live state",
    "B21": "a branch chosen from short dummy metadata is baked in",
    "B22": "a persistent workspace grows after a capture",
    "B23": "one workspace is shared by users that are alive at the same time",
    "B24": "the indexer allocates its output on every call",
    "B26": "ops with side effects are reordered",
    "B28": "an op returns its mutated buffer",
    "B29": "a split op is not recognised by its spelling",
    "B31": "a size is an expression whose symbol no piece was given",
    "B33": "a batch of one token, and of none",
    "B34": "no bucket fits, or one fits exactly",
    "B36": "the number of tokens does not divide by the compression ratio",
    "B38": "a host sync inside a piece",
    "B40": "pools and handles outlive what owned them",
    "B41": "weights are reloaded into other storage",
    "B43": "the fake layout of an op is not the real one",
    "B44": "pieces of nothing, and pieces merged away",
    "B46": "higher-order ops and attributes inside pieces",
    "B48": "a piece returns a bare value, a tuple or a list",
    "B50": "recompiles after all was captured",
    "B52": "training use",
    "B53": "random draws in a piece",
    "B54": "inputs in host memory",
    "B55": "Python state in ops",
    "B56": "options and modes",
    "B58": "compiling a piece changes graphs or mixes them up",
    "B60": "collection, side streams and threads during a capture",
    "B61": "state_dict, deepcopy and pickle",
}


@pytest.fixture(scope="module")
def tested() -> set[str]:
    files = Path(__file__).parent.glob("test_cases_*.py")
    return {f"B{number}" for file in files for number in re.findall(r"^def test_b(\d\d)_", file.read_text(), re.M)}


def test_every_case_is_tested(tested: set[str]) -> None:
    assert tested == CASES.keys()
