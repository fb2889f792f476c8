"""What vLLM 0.32 lacks on a CPU, given to its processes as they start: Python imports this file, being on their path.

* **Triton.** The experts of tokens are returned by vLLM's second model runner alone, whose kernels are Triton's. The
  package triton has no backend for CPUs; with TRITON_INTERPRET=1 it runs kernels in Python and needs none, but vLLM
  looks for one. This one compiles nothing.
* **torchvision.** Families with pictures import it, for text too. Its wheels for GPUs do not load with a torch for
  CPUs: their Python part registers shapes of operators that their binary would have declared. They are declared here,
  and never run.
"""

import os
from importlib.metadata import PackageNotFoundError, version


def _declare_operators() -> None:
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.__dict__["_of_torchvision"] = library  # its operators end with it


def _add_backend() -> None:
    from triton.backends import Backend, backends

    class Driver:
        """Of kernels that are interpreted."""

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_device(self) -> int:
            return 0

        def get_current_target(self) -> object:
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cpu", 0, 1)

    backends["cpu"] = Backend(object, Driver)


try:
    if not version("torchvision").endswith("+cpu"):
        _declare_operators()
except PackageNotFoundError:
    pass
if os.environ.get("TRITON_INTERPRET") == "1":
    _add_backend()
