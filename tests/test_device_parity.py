"""The stored numbers by which a device is checked: made of transformers, and met by this CPU."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.device.parity import REFERENCE, _size, compared
from tests.device_reference import numbers
from tests.marks import slow
from tests.tiny_models import EACH, HEAVY
from tunix.models.families.table import FAMILIES, from_hf
from tunix.models.model import Model

pytestmark = pytest.mark.models

STORED = json.loads(REFERENCE.read_text())


def test_every_family_is_stored():
    assert STORED.keys() == {*FAMILIES, "gemma4_moe"}


@pytest.mark.parametrize("case", [*EACH, *slow(HEAVY)])
def test_the_numbers_are_those_of_transformers(case: str):
    made, stored = numbers(case), STORED[case.split("-")[0]]
    assert made["weights"] == stored["weights"]
    np.testing.assert_allclose(made["logprobs"], stored["logprobs"], atol=2e-5)
    assert made["gradients"].keys() == stored["gradients"].keys()
    for name, both in stored["gradients"].items():
        np.testing.assert_allclose(made["gradients"][name], both, atol=1e-4 * both[0], err_msg=name)


@pytest.mark.parametrize("mixture", [False, True])
def test_a_token_with_other_experts_is_no_rounding_error_of_a_mixture(mixture: bool):
    errors = np.full(72, 7e-3)
    errors[69] = 0.37
    assert (_size(errors, mixture) > 2 * 7e-3) == (not mixture)
    assert _size(3 * errors, mixture) == pytest.approx(3 * _size(errors, mixture))


@pytest.mark.slow
def test_a_wrong_number_is_found():
    stored = STORED["qwen3"]
    model = Model(from_hf(stored["config"], Path("stored")))
    assert compared("qwen3", model, stored).status == "ok"
    assert compared("qwen3", Model(model.config, dtype="bfloat16"), stored).status == "ok"
    for name, place, change in (("logprobs", 3, 1e-3), ("gradients", "layers/q/w", 0.01)):
        wrong = copy.deepcopy(stored)
        wrong[name][place] = (np.array(wrong[name][place]) * (1 + change)).tolist()
        assert compared("qwen3", model, wrong).status == "failed", name
    with pytest.raises(ValueError, match="draws other weights"):
        compared("qwen3", model, {**stored, "weights": "0"})
