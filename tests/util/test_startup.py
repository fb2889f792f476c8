"""What JAX is told before it takes a device."""

import os
import subprocess
import sys

import pytest

CODE = "import os; from tunix.util.startup import prepare_jax; prepare_jax(); print(os.environ[{!r}])"


@pytest.mark.parametrize(("given", "expected"), [(None, "0.92"), ("0.5", "0.5")])
def test_the_share_of_a_gpus_memory_is_set_unless_somebody_has_said_another(given: str | None, expected: str):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    environment = {key: value for key, value in os.environ.items() if key != name} | ({name: given} if given else {})
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(name)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
