"""Wraps functions of a module as it is imported: faults that an experiment puts in from outside. Imports nothing of
dhp, for it is there in each process of a run from its start."""

import functools
import importlib.machinery
import sys


def wrap_on_import(module, functions, wrap):
    """Once the module is there, each of its functions (`name`, or `Class.name`) is what `wrap` makes of it."""
    sys.meta_path.insert(0, _Finder(module, functions, wrap))


class _Finder:
    """Finds one module as the others do."""

    def __init__(self, module, functions, wrap):
        self._module, self._functions, self._wrap = module, functions, wrap

    def find_spec(self, name, path=None, target=None):
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_wrap(module):
            execute(module)
            for function in self._functions:
                *owners, own = function.split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, own, self._wrap(getattr(owner, own)))

        spec.loader.exec_module = execute_and_wrap
        return spec
