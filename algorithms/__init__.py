"""One file for each algorithm. Importing this package imports them all, and so registers them."""

from importlib import import_module
from pkgutil import iter_modules

__all__ = [module.name for module in iter_modules(__path__)]

for _name in __all__:
    import_module(f"{__name__}.{_name}")
