"""The errors of `placements`.

Every error of this package is a `PlacementError`, and each class is also the builtin that a caller would expect.
A message has four parts: the operation, the values, the rule that was broken, and the remedy.
"""


class PlacementError(Exception):
    """The base class of every error raised by `placements`."""


class MeshError(PlacementError, ValueError):
    """A mesh that cannot exist, or an axis, rank or coordinate that a mesh does not have."""


class InvalidPlacement(PlacementError, ValueError):
    """A placement that does not fit the array or the mesh it is meant for."""


class PartialTypeError(PlacementError, TypeError):
    """A `Partial` whose op is not defined for the array's dtype: sum of bool, mean of bool or integers."""


class RedistributionError(PlacementError, ValueError):
    """Two layouts between which no array can move: of different meshes, or of different numbers of dims."""
