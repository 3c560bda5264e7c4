"""SGLang imports packages of which these tests have no use: its kernels for GPUs, torchvision, of
which PyPI has the build for GPUs, and others. An object that does nothing is imported in their
place. What the tests use of SGLang does not call them."""

import importlib.abc
import importlib.machinery
import sys
from unittest import mock

PACKAGES = ("torchvision", "sgl_kernel", "IPython", "soundfile")


class _Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__spec__, module.__name__, module.__path__ = spec, spec.name, []
        module.__version__ = "0"
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Nothing())
