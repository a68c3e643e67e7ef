"""Makes SGLang importable on a machine without CUDA. On PYTHONPATH of the server's processes only.

- torchvision from PyPI is linked against CUDA; beside a CPU torch its C++ operators do not load
  and its import fails on two missing declarations. They are declared first.
- triton is imported at module scope in many places, but no kernel of it runs on the CPU engine:
  when it is not installed, a package that has every name stands in.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class _Anything:
    """Base of every class that the fake triton hands out; may be subclassed with any keywords."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _FakeModule(types.ModuleType):
    """A package whose every attribute exists: classes for capitals, else further packages."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[:1].isupper():
            value = type(name, (_Anything,), {"__module__": self.__name__})
        else:
            full = f"{self.__name__}.{name}"
            value = sys.modules.setdefault(full, _FakeModule(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Used as a decorator (`@jit`) or as a maker of one (`@autotune(...)`).
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        keep: Callable[[Any], Any] = lambda function: function  # noqa: E731
        return keep


class _FakeTriton:
    """Last finder: a real triton wins."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "triton" and not name.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = _FakeModule(spec.name)
        if spec.name == "triton":
            module.__version__ = "3.0.0"
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
        if spec.name == "triton.backends":
            module.backends = {}  # torch.compile asks which ones there are
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _DeclareTorchvisionOps:
    """First finder: declares torchvision's operators at its first import, then finds nothing."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _DeclareTorchvisionOps())  # type: ignore[arg-type]
sys.meta_path.append(_FakeTriton())  # type: ignore[arg-type]
